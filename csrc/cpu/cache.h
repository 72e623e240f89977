// Writing K and V into the paged cache, and the layout of a tile.
//
// Inside one (block, kv head) the block_size tokens are stored as tiles of 16 tokens, each 16 * D elements. The
// orders below make a tile load straight into vectors over tokens (K) and over dims (V), and the bf16 ones are the
// operands of vdpbf16ps and of AMX tiles. Levels without those instructions split a 32-bit pair with one shift and
// one mask, so one layout serves every level:
//   K float32  [D][16]          V float32  [16][D]
//   K bfloat16 [D/2][16][2]     V bfloat16 [8][D][2]     (pairs of dims; pairs of tokens)
#pragma once

#include "cpu/types.h"

namespace pagemill {

struct CacheWrite {
  const char* key;          // [num_tokens, num_kv_heads, key_dim]
  const char* value;        // [num_tokens, num_kv_heads, value_dim]
  char* key_cache;          // [num_blocks, num_kv_heads, block_size, key_dim]
  char* value_cache;        // [num_blocks, num_kv_heads, block_size, value_dim]
  const int64_t* slots;     // [num_tokens]; negative: skip
  int64_t key_token_stride, key_head_stride;      // elements
  int64_t value_token_stride, value_head_stride;  // elements
  int64_t key_block_stride, value_block_stride;   // elements
  int64_t num_kv_heads, block_size, key_dim, value_dim;
  ElementType type;
};

}  // namespace pagemill
