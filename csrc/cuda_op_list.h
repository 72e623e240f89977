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
Tensor logprobs_of(const Tensor logits, const Tensor ids);

}  // namespace pagemill::cuda
