// The launchers that csrc/cuda_ops.cpp registers as torch ops; each is explained where it is defined, in cuda/NAME.cu.
#pragma once

#include <cstdint>

extern "C" {

int pagemill_reshape_and_cache(const void* key, const void* value, void* key_cache, void* value_cache,
                               const int64_t* slots, const float* key_scale, const float* value_scale,
                               int64_t num_tokens, int64_t num_kv_heads, int64_t block_size, int64_t key_dim,
                               int64_t value_dim, int64_t key_token_stride, int64_t key_head_stride,
                               int64_t value_token_stride, int64_t value_head_stride, int64_t key_block_stride,
                               int64_t value_block_stride, int64_t type, int64_t cache_type, void* stream);
int pagemill_paged_attention(
    void* out, const void* query, const void* key_cache, const void* value_cache, const int32_t* block_tables,
    const int32_t* query_start, const int32_t* seq_lens, const float* sinks, const float* key_scale,
    const float* value_scale, void* workspace, int64_t workspace_bytes, int64_t num_tokens, int64_t num_seqs,
    int64_t max_query_len, int64_t max_seq_len, int64_t table_stride, int64_t query_token_stride,
    int64_t query_head_stride, int64_t out_token_stride, int64_t out_head_stride, int64_t key_block_stride,
    int64_t value_block_stride, int64_t num_query_heads, int64_t num_kv_heads, int64_t block_size, int64_t key_dim,
    int64_t value_dim, int64_t window, int64_t chunk, int64_t causal, int64_t query_type, int64_t cache_type,
    int64_t scales_per_head, int64_t num_multiprocessors, float scale, float softcap, void* stream);
int64_t pagemill_paged_attention_workspace(int64_t num_seqs, int64_t max_query_len, int64_t max_seq_len,
                                           int64_t num_query_heads, int64_t num_kv_heads, int64_t value_dim);
int pagemill_rms_norm(const void* x, const void* weight, void* residual, void* out, int64_t rows, int64_t inner,
                      int64_t outer_stride, int64_t inner_stride, int64_t dim, float eps, int64_t variant, int64_t type,
                      int64_t weight_type, void* stream);
int pagemill_linear(void* out, const void* x, const void* weight, const void* bias, const void* residual, void* workspace,
                    int64_t workspace_bytes, int64_t rows, int64_t out_features, int64_t in_features, int64_t x_stride,
                    int64_t weight_stride, int64_t gated, int64_t activation, int64_t float32_out, int64_t bias_type,
                    int64_t type, void* stream);
int64_t pagemill_linear_workspace(int64_t rows, int64_t weight_rows, int64_t in_features);
int pagemill_activation(const void* x, void* out, int64_t count, int64_t kind, int64_t type, void* stream);
int pagemill_gated_activation(const void* x, void* out, int64_t rows, int64_t width, int64_t kind, int64_t type,
                              void* stream);
int pagemill_sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const float* temperature,
                    const int32_t* top_k, const float* top_p, const float* min_p, const uint8_t* greedy,
                    const int64_t* seed_keys, const int64_t* positions, int64_t* ids, void* stream);
int pagemill_logprobs_of(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* ids,
                         int64_t num_ids, float* logprobs, void* stream);

}  // extern "C"
