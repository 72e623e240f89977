// rotary: position embedding of queries and keys (Su et al. 2021), in place; qk_norm: an RMS norm over every head
// before it, as Qwen 3 and Gemma 3 have, in the same pass.
//
// Tiling: a warp takes one head of one token (heads.cuh), a block four heads of it; no shared memory.
// Floor: queries and keys are read and written once, 2 * sizeof(T) bytes per element; the tables' rows are shared by
// all heads of a token and come from L2. A handful of operations per element: bandwidth, or launch latency in decode.
#include "cuda/heads.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;

template <typename T, int STEPS>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) process_heads(HeadRows rows) {
  const int64_t index = static_cast<int64_t>(blockIdx.y) * kWarpsPerBlock + warp_id();
  if (index >= rows.num_query_heads + rows.num_kv_heads) return;
  WarpHead<T, STEPS> head;
  process_head(rows, blockIdx.x, index, head);
}

int process(HeadRows rows, int64_t type, void* stream) {
  const int64_t heads = rows.num_query_heads + rows.num_kv_heads;
  if (rows.rotary.cos != nullptr && (rows.rotary.rotary_dim % 2 != 0 || rows.rotary.rotary_dim > rows.dim))
    return kInvalidArgument;
  if (rows.num_tokens * heads == 0) return 0;
  const dim3 grid(static_cast<unsigned>(rows.num_tokens), static_cast<unsigned>(ceil_div(heads, kWarpsPerBlock)));
  rows.wide = wide_heads(rows);
  return with_type(type, [&](auto element) {
    return with_steps(rows.dim, [&](auto steps) {
      auto kernel = &process_heads<decltype(element), decltype(steps)::value>;
      PAGEMILL_LAUNCH(kernel, grid, kWarpsPerBlock * kWarp, 0, stream)(rows);
      return launch_status();
    });
  });
}

}  // namespace

// query [num_tokens, num_query_heads, dim], key [num_tokens, num_kv_heads, dim]: tokens at a stride, rotated in place.
// cos, sin: [num_positions, rotary_dim] of the same type, sin's first half negated; positions: [num_tokens], int64.
// Elements from rotary_dim on stay as they are. dim is even, at most 512.
PAGEMILL_EXPORT int pagemill_rotary(void* query, void* key, const void* cos, const void* sin, const int64_t* positions,
                                    int64_t num_tokens, int64_t num_query_heads, int64_t num_kv_heads, int64_t dim,
                                    int64_t rotary_dim, int64_t query_token_stride, int64_t key_token_stride,
                                    int64_t type, void* stream) {
  const HeadRows rows{query, key, num_tokens, num_query_heads, num_kv_heads, dim, query_token_stride, key_token_stride,
                      {}, {}, {cos, sin, positions, rotary_dim}, false};
  return process(rows, type, stream);
}

// An RMS norm over each head (weights [dim]; eps and variant as in rms_norm), then the rotation; cos null: no rotation.
PAGEMILL_EXPORT int pagemill_qk_norm(void* query, void* key, const void* query_weight, const void* key_weight, float eps,
                                     int64_t variant, const void* cos, const void* sin, const int64_t* positions,
                                     int64_t num_tokens, int64_t num_query_heads, int64_t num_kv_heads, int64_t dim,
                                     int64_t rotary_dim, int64_t query_token_stride, int64_t key_token_stride,
                                     int64_t type, void* stream) {
  if (variant < 0 || variant > 2) return kInvalidArgument;
  const HeadRows rows{query, key, num_tokens, num_query_heads, num_kv_heads, dim, query_token_stride, key_token_stride,
                      {query_weight, eps, variant}, {key_weight, eps, variant}, {cos, sin, positions, rotary_dim}, false};
  return process(rows, type, stream);
}

}  // namespace pagemill::cuda
