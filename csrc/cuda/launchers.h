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
int pagemill_sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* source,
                    const float* temperature,
                    const int32_t* top_k, const float* top_p, const float* min_p, const uint8_t* greedy,
                    const int64_t* seed_keys, const int64_t* positions, int64_t* ids, void* stream);
int pagemill_logprobs_of(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* ids,
                         int64_t num_ids, float* logprobs, void* stream);
int pagemill_logprobs_topn(const float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* source,
                           const int64_t* ids, int64_t num_ids, float* logprobs, int64_t num_top, int64_t* top_ids,
                           float* top_logprobs, int32_t* ranks, void* stream);
int pagemill_shape_logits(float* logits, int64_t count, float scale, float softcap, void* stream);
int pagemill_load_counts(int32_t* counts, uint32_t* prompt_bits, int64_t vocab, const int64_t* slots,
                         const int32_t* token_ids, int64_t token_stride, const int32_t* num_prompt,
                         const int32_t* num_tokens, int64_t rows, void* stream);
int pagemill_count_tokens(int32_t* counts, int64_t vocab, const int64_t* slots, const int64_t* ids, int64_t rows,
                          void* stream);
int pagemill_apply_penalties(float* logits, int64_t rows, int64_t vocab, int64_t stride, const int64_t* slots,
                             const int32_t* counts, const uint32_t* prompt_bits, const float* presence,
                             const float* frequency, const float* repetition, void* stream);
int pagemill_add_bias(float* logits, int64_t stride, const int64_t* rows, const int64_t* ids, const float* values,
                      int64_t count, void* stream);
int pagemill_apply_token_bitmask(float* logits, int64_t rows, int64_t vocab, int64_t stride, const uint32_t* mask,
                                 int64_t words, const int64_t* mask_rows, void* stream);
int pagemill_rotary(void* query, void* key, const void* cos, const void* sin, const int64_t* positions,
                    int64_t num_tokens, int64_t num_query_heads, int64_t num_kv_heads, int64_t dim, int64_t rotary_dim,
                    int64_t query_token_stride, int64_t key_token_stride, int64_t type, void* stream);
int pagemill_qk_norm(void* query, void* key, const void* query_weight, const void* key_weight, float eps,
                     int64_t variant, const void* cos, const void* sin, const int64_t* positions, int64_t num_tokens,
                     int64_t num_query_heads, int64_t num_kv_heads, int64_t dim, int64_t rotary_dim,
                     int64_t query_token_stride, int64_t key_token_stride, int64_t type, void* stream);
int pagemill_rope_and_cache(void* query, void* key, const void* value, const void* query_weight, const void* key_weight,
                            float eps, int64_t variant, const void* cos, const void* sin, const int64_t* positions,
                            void* key_cache, void* value_cache, const int64_t* slots, const float* key_scale,
                            const float* value_scale, int64_t num_tokens, int64_t num_query_heads,
                            int64_t num_kv_heads, int64_t block_size, int64_t dim, int64_t value_dim,
                            int64_t rotary_dim, int64_t query_token_stride, int64_t key_token_stride,
                            int64_t value_token_stride, int64_t key_block_stride, int64_t value_block_stride,
                            int64_t type, int64_t cache_type, void* stream);
int pagemill_prepare_batch(const int32_t* token_ids, int64_t token_stride, const int32_t* row_tables,
                           int64_t table_stride, int64_t block_size, const int64_t* rows, const int32_t* computed,
                           const int32_t* counts, int64_t num_seqs, int64_t table_width, int64_t* input_ids,
                           int64_t* positions, int64_t* slot_mapping, int32_t* query_start_loc, int32_t* seq_lens,
                           int32_t* block_tables, int64_t* logits_indices, void* stream);
int pagemill_advance_batch(int32_t* token_ids, int64_t token_stride, const int32_t* row_tables, int64_t table_stride,
                           int64_t block_size, const int64_t* rows, const int64_t* drawn, const int32_t* num_seqs,
                           int64_t capacity, int64_t* input_ids, int64_t* positions, int64_t* slot_mapping,
                           int32_t* seq_lens, void* stream);
int pagemill_store_tokens(int32_t* token_ids, int64_t token_stride, const int64_t* rows, const int64_t* positions,
                          const int64_t* drawn, int64_t count, void* stream);
int pagemill_copy_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers, const int64_t* pairs,
                         int64_t count, void* stream);
int pagemill_gather_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers, const int64_t* ids,
                           int64_t count, void* staging, void* stream);
int pagemill_scatter_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers, const int64_t* ids,
                            int64_t count, void* staging, void* stream);

}  // extern "C"
