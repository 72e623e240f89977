// What one call of the CUDA paged attention takes: the launcher's arguments, in their order.
//
// Same meaning as the CPU op's (cpu/attention.h), with the rows of a block in their natural order. A query row is one
// (token, head). Keys are cut into splits of 256, anchored at absolute position 0; within a split a row goes through
// tiles of 64 keys from left to right, and the splits' results are folded from left to right. Who computes a split, and
// beside which other rows, changes no bit.
#pragma once

#include <cstdint>

namespace pagemill::cuda {

constexpr int kSplitKeys = 256, kTileKeys = 64, kPieceKeys = 16;  // a piece never crosses a block
constexpr int kMaxHeadSize = 256;
constexpr int64_t kWorkspaceLimit = int64_t{64} << 20;  // bytes; more would not make the device busier

struct PagedAttentionArgs {
  void* out;                    // [num_tokens, num_query_heads, value_dim], of query_type
  const void* query;            // [num_tokens, num_query_heads, key_dim]
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, key_dim], of cache_type
  const void* value_cache;      // [num_blocks, num_kv_heads, block_size, value_dim]
  const int32_t* block_tables;  // [num_seqs, ...], entries that no query sees may be -1
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* seq_lens;      // [num_seqs]
  const float* sinks;           // [num_query_heads] or null
  const float* key_scale;       // [1] or [num_kv_heads]: a cached key times it is the key; null: 1
  const float* value_scale;
  void* workspace;              // may hold anything; 16-byte aligned
  int64_t workspace_bytes;      // pagemill_paged_attention_workspace(...); less is slower, and gives the same bits
  int64_t num_tokens, num_seqs;
  int64_t max_query_len;  // no sequence has more queries in this batch; 0: unknown
  int64_t max_seq_len;    // no sequence is longer
  int64_t table_stride;
  int64_t query_token_stride, query_head_stride;  // elements, even
  int64_t out_token_stride, out_head_stride;      // elements, even
  int64_t key_block_stride, value_block_stride;   // elements, multiples of 16 bytes
  int64_t num_query_heads, num_kv_heads, block_size, key_dim, value_dim;
  int64_t window, chunk;             // 0: none
  int64_t causal;                    // 0 or 1
  int64_t query_type, cache_type;    // ElementCode: bfloat16 or float16; the same, or float8
  int64_t scales_per_head;           // 1: key_scale and value_scale are [num_kv_heads]
  int64_t num_multiprocessors;       // of the device: how many blocks are launched
  float scale, softcap;              // softcap 0: none
};

}  // namespace pagemill::cuda
