// The functions ops.cpp registers; each is defined in cpu/NAME_op.cpp, which checks its arguments.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace pagemill {

using torch::stable::Tensor;

std::string isa();
std::string isa_levels();
void set_isa(std::string name);

void reshape_and_cache(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                       const Tensor slot_mapping);
void paged_attention(Tensor out, const Tensor query, const Tensor key_cache, const Tensor value_cache,
                     const Tensor block_tables, const Tensor query_start_loc, const Tensor seq_lens, double scale,
                     bool causal, int64_t window, int64_t chunk, double softcap, const std::optional<Tensor> sinks);
void copy_blocks(const std::vector<Tensor> caches, const Tensor pairs);
void gather_blocks(const std::vector<Tensor> caches, const Tensor ids, Tensor staging);
void scatter_blocks(const std::vector<Tensor> caches, const Tensor ids, const Tensor staging);

Tensor pack_linear(const Tensor weight, bool gated);
Tensor linear(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
              bool float32_out, const std::optional<std::string> activation, const std::optional<Tensor> residual);
Tensor pack_linear_quant(const Tensor values, const Tensor scales, const std::optional<Tensor> minimums, int64_t bits,
                         bool gated);
Tensor linear_quant(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
                    bool float32_out, const std::optional<std::string> activation);
Tensor embed_quant(const Tensor ids, const Tensor packed, const Tensor like, int64_t vocab_size);

int64_t decoder_create(const std::vector<Tensor> ends, const std::vector<Tensor> layers,
                       const std::vector<int64_t> sizes, const std::vector<int64_t> windows,
                       const std::vector<int64_t> ropes, const std::vector<double> numbers,
                       const std::vector<double> eps, std::string variants, std::string activation);
void decoder_adapt(int64_t handle, const std::vector<Tensor> low_ranks, const std::vector<int64_t> ranks);
int64_t decoder_step_bytes(int64_t handle, int64_t num_tokens, int64_t num_wanted);
void decoder_destroy(int64_t handle);
void decoder_attach(int64_t handle, const std::vector<Tensor> ropes, const std::vector<Tensor> key_caches,
                    const std::vector<Tensor> value_caches);
Tensor decoder_forward(int64_t handle, const Tensor input_ids, const Tensor positions, const Tensor block_tables,
                       const Tensor query_start_loc, const Tensor seq_lens, const Tensor slot_mapping,
                       const std::optional<Tensor> logits_indices, const std::vector<int64_t> spans);

Tensor rms_norm(const Tensor x, const Tensor weight, double eps, std::string variant);
Tensor fused_add_rms_norm(const Tensor x, Tensor residual, const Tensor weight, double eps, std::string variant);
Tensor activation(const Tensor x, std::string kind);
Tensor gated_activation(const Tensor x, std::string kind);
void shape_logits(Tensor logits, double scale, double softcap);
Tensor sample(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
              const Tensor greedy, const Tensor seed_keys, const Tensor positions);
Tensor sample_edited(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p,
                     const Tensor min_p, const Tensor greedy, const Tensor seed_keys, const Tensor positions,
                     const std::optional<Tensor> source, const std::optional<Tensor> penalties,
                     const std::optional<Tensor> token_ids, const std::optional<Tensor> token_starts,
                     const std::optional<Tensor> output_starts, const std::optional<Tensor> bias_ids,
                     const std::optional<Tensor> bias_values, const std::optional<Tensor> bias_starts,
                     const std::optional<Tensor> masks, const std::optional<Tensor> mask_of,
                     std::optional<Tensor> drawn, const std::optional<Tensor> drawn_at,
                     const std::optional<std::vector<int64_t>> parameter_rows);
Tensor logprobs_of(const Tensor logits, const Tensor ids);
std::tuple<Tensor, Tensor, Tensor, Tensor> logprobs_topn(const Tensor logits, const Tensor ids, int64_t num_top,
                                                         const std::optional<Tensor> source, bool ranks);

}  // namespace pagemill
