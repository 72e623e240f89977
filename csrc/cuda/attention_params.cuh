// What kernels get of a call, and what a sequence's rows see.
#pragma once

#include "cuda/attention_args.cuh"
#include "cuda/portable.cuh"

namespace pagemill::cuda {

struct alignas(8) FloatPair {
  float first, second;
};

struct AttentionParams {
  void* out;
  const void* query;
  const char* key_cache;
  const char* value_cache;
  const int32_t* block_tables;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const float* sinks;
  const float* key_scale;
  const float* value_scale;
  int32_t* bases;           // workspace: [num_seqs], a sequence's first row below, or -1: it needs none
  FloatPair* partial_sums;  // workspace: [num_kv_heads, capacity], largest score and total
  float* partials;          // workspace: [num_kv_heads, capacity, value_dim]
  int64_t table_stride, query_token_stride, query_head_stride, out_token_stride, out_head_stride;  // elements
  int64_t key_block_stride, value_block_stride;                                                    // bytes
  int num_tokens, num_seqs, num_query_heads, num_kv_heads, group, block_size, key_dim, value_dim;
  int window, chunk, causal, scales_per_head, capacity;
  float scale, softcap;
};

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNothing = -__builtin_huge_valf();  // the largest score of no keys

// The keys that queries see: [begin, end); empty when end <= begin.
struct KeyRange {
  int begin, end;
};

// A sequence in this batch. Its rows: every query by every head of one kv head's group.
struct Sequence {
  int index, first_token, num_queries, length;

  PAGEMILL_DEVICE Sequence(const AttentionParams& params, int sequence)
      : index(sequence),
        first_token(params.query_start[sequence]),
        num_queries(params.query_start[sequence + 1] - first_token),
        length(params.seq_lens[sequence]) {}

  PAGEMILL_DEVICE int rows(const AttentionParams& params) const { return num_queries * params.group; }

  // Few rows: computed by the decode kernel, which cuts the keys among blocks.
  PAGEMILL_DEVICE bool is_decode(const AttentionParams& params) const {
    return num_queries == 1 || rows(params) <= 64;
  }

  // What query `first` to query `last` see together.
  PAGEMILL_DEVICE KeyRange visible(const AttentionParams& params, int first, int last) const {
    const int position = length - num_queries + first;
    int begin = 0;
    if (params.window > 0 && position - params.window + 1 > begin) begin = position - params.window + 1;
    if (params.chunk > 0 && position > 0) {
      const int chunk_begin = position / params.chunk * params.chunk;
      if (chunk_begin > begin) begin = chunk_begin;
    }
    const int end = params.causal != 0 ? length - num_queries + last + 1 : length;
    return {begin, end};
  }

  // The same for rows [first, end).
  PAGEMILL_DEVICE KeyRange visible_rows(const AttentionParams& params, int first, int end) const {
    const int num_rows = rows(params);
    const int last = (end < num_rows ? end : num_rows) - 1;
    if (last < first) return {0, 0};
    return visible(params, first / params.group, last / params.group);
  }
};

// One of a thread's rows.
struct Row {
  int token, head;  // token -1: past the sequence's last row
  KeyRange keys;

  PAGEMILL_DEVICE Row(const AttentionParams& params, const Sequence& sequence, int kv_head, int row) {
    const int query = row / params.group;
    token = query < sequence.num_queries ? sequence.first_token + query : -1;
    head = kv_head * params.group + row % params.group;
    keys = token < 0 ? KeyRange{0, 0} : sequence.visible(params, query, query);
  }

  PAGEMILL_DEVICE bool exists() const { return token >= 0; }
  PAGEMILL_DEVICE bool sees_keys() const { return keys.end > keys.begin; }
};

// What turns a product into a score's power of two: score = product * factor, or tanh(product * inner) * factor.
struct Exponent {
  float factor, inner;  // inner 0: no softcap

  PAGEMILL_DEVICE Exponent(const AttentionParams& params, int kv_head) {
    float scale = params.scale;
    if (params.key_scale != nullptr) scale = scale * params.key_scale[params.scales_per_head != 0 ? kv_head : 0];
    inner = params.softcap > 0 ? scale / params.softcap : 0.0f;
    factor = (params.softcap > 0 ? params.softcap : scale) * kLog2e;
  }
};

PAGEMILL_DEVICE float value_scale_of(const AttentionParams& params, int kv_head) {
  return params.value_scale == nullptr ? 1.0f : params.value_scale[params.scales_per_head != 0 ? kv_head : 0];
}

PAGEMILL_DEVICE int ceil_div_int(int a, int b) { return (a + b - 1) / b; }

}  // namespace pagemill::cuda
