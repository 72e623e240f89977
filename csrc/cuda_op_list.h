// The functions cuda_ops.cpp registers for CUDA tensors.
#pragma once

#include "op_list.h"

namespace pagemill::cuda {

void reshape_and_cache(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                       const Tensor slot_mapping);
void reshape_and_cache_scaled(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                              const Tensor slot_mapping, const std::optional<Tensor> key_scale,
                              const std::optional<Tensor> value_scale);
void paged_attention(Tensor out, const Tensor query, const Tensor key_cache, const Tensor value_cache,
                     const Tensor block_tables, const Tensor query_start_loc, const Tensor seq_lens, double scale,
                     bool causal, int64_t window, int64_t chunk, double softcap, const std::optional<Tensor> sinks);
void paged_attention_into(Tensor out, const Tensor query, const Tensor key_cache, const Tensor value_cache,
                          const Tensor block_tables, const Tensor query_start_loc, const Tensor seq_lens, double scale,
                          bool causal, int64_t window, int64_t chunk, double softcap, const std::optional<Tensor> sinks,
                          const std::optional<Tensor> key_scale, const std::optional<Tensor> value_scale,
                          Tensor workspace, int64_t max_query_len, int64_t max_seq_len);
Tensor pack_linear(const Tensor weight, bool gated);
Tensor linear(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
              bool float32_out, const std::optional<std::string> activation, const std::optional<Tensor> residual);
Tensor rms_norm(const Tensor x, const Tensor weight, double eps, std::string variant);
Tensor fused_add_rms_norm(const Tensor x, Tensor residual, const Tensor weight, double eps, std::string variant);
Tensor activation(const Tensor x, std::string kind);
Tensor gated_activation(const Tensor x, std::string kind);
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

void shape_logits(Tensor logits, double scale, double softcap);
void load_counts(Tensor counts, Tensor prompt_bits, const Tensor rows, const Tensor token_ids, const Tensor num_prompt,
                 const Tensor num_tokens);
void count_tokens(Tensor counts, const Tensor rows, const Tensor ids);
void apply_penalties(Tensor logits, const Tensor rows, const Tensor counts, const Tensor prompt_bits,
                     const Tensor presence, const Tensor frequency, const Tensor repetition);
void add_bias(Tensor logits, const Tensor rows, const Tensor ids, const Tensor values);
void apply_token_bitmask(Tensor logits, const Tensor masks, const std::optional<Tensor> mask_of);

void rotary(Tensor query, Tensor key, const Tensor cos, const Tensor sin, const Tensor positions);
void qk_norm(Tensor query, Tensor key, const Tensor query_weight, const Tensor key_weight, double eps,
             std::string variant, const std::optional<Tensor> cos, const std::optional<Tensor> sin,
             const Tensor positions);
void rope_and_cache(Tensor query, Tensor key, const Tensor value, const std::optional<Tensor> query_weight,
                    const std::optional<Tensor> key_weight, double eps, std::string variant,
                    const std::optional<Tensor> cos, const std::optional<Tensor> sin, const Tensor positions,
                    Tensor key_cache, Tensor value_cache, const Tensor slot_mapping,
                    const std::optional<Tensor> key_scale, const std::optional<Tensor> value_scale);

void prepare_batch(const Tensor token_ids, const Tensor row_tables, int64_t block_size, const Tensor rows,
                   const Tensor computed, const Tensor counts, Tensor input_ids, Tensor positions, Tensor slot_mapping,
                   Tensor query_start_loc, Tensor seq_lens, Tensor block_tables, Tensor logits_indices);
void advance_batch(Tensor token_ids, const Tensor row_tables, int64_t block_size, const Tensor rows, const Tensor drawn,
                   const Tensor num_seqs, Tensor input_ids, Tensor positions, Tensor slot_mapping, Tensor seq_lens);
void store_tokens(Tensor token_ids, const Tensor rows, const Tensor positions, const Tensor drawn);
void copy_blocks(const std::vector<Tensor> caches, const Tensor pairs);
void gather_blocks(const std::vector<Tensor> caches, const Tensor ids, Tensor staging);
void scatter_blocks(const std::vector<Tensor> caches, const Tensor ids, const Tensor staging);

}  // namespace pagemill::cuda
