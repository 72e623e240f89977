// reshape_and_cache writes K and V rows into the paged cache; rope_and_cache does the norm and the rotation of queries
// and keys on the way, so that K is not written and read once more.
//
// Inside one (block, kv head) rows of D elements follow one another, token by token: 16-byte pieces for cp.async, whole
// lines. A cache of another type than the rows is e4m3: value / scale, saturating.
// Tiling: a warp takes one head of one token (K, V, and in rope_and_cache Q), a block four heads of it; no shared memory.
// Floor: K and V are read once and written once, in rope_and_cache Q as well and K twice; no reuse, little arithmetic:
// bandwidth, or launch latency in decode, which is what the fusion saves.
#include "cuda/heads.cuh"
#include "cuda/rows.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kWarpsPerBlock = 4;

struct CacheRows {
  const void* key;    // [num_tokens, num_kv_heads, key_dim]
  const void* value;  // [num_tokens, num_kv_heads, value_dim]
  void* key_cache;    // [num_blocks, num_kv_heads, block_size, key_dim], blocks at a stride
  void* value_cache;  // [num_blocks, num_kv_heads, block_size, value_dim], likewise
  const int64_t* slots;
  const float* key_scale;    // one number on the device; null: 1
  const float* value_scale;
  int64_t num_tokens, num_kv_heads, block_size, key_dim, value_dim;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;  // elements
  int64_t key_block_stride, value_block_stride;                                      // elements
};

PAGEMILL_DEVICE float scale_of(const float* scale) { return scale == nullptr ? 1.0f : *scale; }

// Where a slot's row lies. Cached: the cache's type.
template <typename Cached>
PAGEMILL_DEVICE Cached* cached_row(void* cache, int64_t block_stride, const CacheRows& rows, int64_t dim, int64_t slot,
                                   int64_t head) {
  const uint32_t size = static_cast<uint32_t>(rows.block_size), place = static_cast<uint32_t>(slot);  // quick to divide
  return static_cast<Cached*>(cache) + int64_t{place / size} * block_stride + (head * size + place % size) * dim;
}

// One row by one warp, as it is or scaled to e4m3.
template <typename T, typename Cached>
PAGEMILL_DEVICE void write_row(const T* from, Cached* to, int64_t dim, const float* scale) {
  constexpr int n = kPerLoad<T>;
  const auto bits = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  if constexpr (sizeof(T) == sizeof(Cached)) {
    const bool wide = bits % 16 == 0 && dim % n == 0;
    if (wide) {
      for (int64_t i = lane_id() * n; i < dim; i += kWarp * n) store_16(to + i, load_16(from + i));
    } else {
      for (int64_t i = lane_id(); i < dim; i += kWarp) to[i] = from[i];
    }
  } else {
    const float by = scale_of(scale);
    const bool wide = bits % 16 == 0 && dim % 4 == 0;
    if (wide) {
      for (int64_t i = lane_id() * 4; i < dim; i += kWarp * 4) {
        uint32_t packed = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) packed |= uint32_t(round_to<Cached>(to_float(from[i + j]) / by).bits) << 8 * j;
        *reinterpret_cast<uint32_t*>(to + i) = packed;
      }
    } else {
      for (int64_t i = lane_id(); i < dim; i += kWarp) to[i] = round_to<Cached>(to_float(from[i]) / by);
    }
  }
}

template <typename T, typename Cached>
PAGEMILL_DEVICE void write_value(const CacheRows& rows, int64_t token, int64_t head, int64_t slot) {
  const T* from = static_cast<const T*>(rows.value) + token * rows.value_token_stride + head * rows.value_head_stride;
  write_row(from, cached_row<Cached>(rows.value_cache, rows.value_block_stride, rows, rows.value_dim, slot, head),
            rows.value_dim, rows.value_scale);
}

template <typename T, typename Cached>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) write_heads(CacheRows rows) {
  const int64_t which = static_cast<int64_t>(blockIdx.y) * kWarpsPerBlock + warp_id();
  if (which >= 2 * rows.num_kv_heads) return;
  const int64_t token = blockIdx.x, slot = rows.slots[token];
  if (slot < 0) return;
  if (which >= rows.num_kv_heads) return write_value<T, Cached>(rows, token, which - rows.num_kv_heads, slot);
  const T* from = static_cast<const T*>(rows.key) + token * rows.key_token_stride + which * rows.key_head_stride;
  write_row(from, cached_row<Cached>(rows.key_cache, rows.key_block_stride, rows, rows.key_dim, slot, which),
            rows.key_dim, rows.key_scale);
}

template <typename T, typename Cached, int STEPS>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) rope_and_write_heads(HeadRows heads, CacheRows rows) {
  const int64_t which = static_cast<int64_t>(blockIdx.y) * kWarpsPerBlock + warp_id();
  const int64_t turned = heads.num_query_heads + heads.num_kv_heads;
  if (which >= turned + heads.num_kv_heads) return;
  const int64_t token = blockIdx.x, slot = rows.slots[token];
  if (which >= turned) {
    if (slot >= 0) write_value<T, Cached>(rows, token, which - turned, slot);
    return;
  }
  WarpHead<T, STEPS> head;
  process_head(heads, token, which, head);
  if (which < heads.num_query_heads || slot < 0) return;
  Cached* to = cached_row<Cached>(rows.key_cache, rows.key_block_stride, rows, rows.key_dim, slot,
                                  which - heads.num_query_heads);
  const int64_t half = heads.rotary.cos == nullptr ? heads.dim / 2 : heads.rotary.rotary_dim / 2;
  const bool wide = heads.wide && reinterpret_cast<uintptr_t>(to) % 4 == 0;
  head.store(to, heads.dim, half, wide, sizeof(T) == sizeof(Cached) ? 1.0f : scale_of(rows.key_scale));
}

// A block for every four heads of every token.
dim3 grid_of(int64_t num_tokens, int64_t heads) {
  return dim3(static_cast<unsigned>(num_tokens), static_cast<unsigned>(ceil_div(heads, kWarpsPerBlock)));
}

// run(T{}, Cached{}): caches of the rows' own type, or e4m3.
template <typename Run>
int with_types(int64_t type, int64_t cache_type, const Run& run) {
  return with_type(type, [&](auto element) {
    if (cache_type == type) return run(element, element);
    if (cache_type == kFloat8) return run(element, Fp8{});
    return kInvalidArgument;
  });
}

}  // namespace

// key, value: tokens and heads at a stride, elements contiguous. slots: [num_tokens] int64, block * block_size + offset;
// negative: skip. cache_type: type, or e4m3 with key_scale and value_scale, one float each on the device (null: 1).
PAGEMILL_EXPORT int pagemill_reshape_and_cache(
    const void* key, const void* value, void* key_cache, void* value_cache, const int64_t* slots, const float* key_scale,
    const float* value_scale, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size, int64_t key_dim,
    int64_t value_dim, int64_t key_token_stride, int64_t key_head_stride, int64_t value_token_stride,
    int64_t value_head_stride, int64_t key_block_stride, int64_t value_block_stride, int64_t type, int64_t cache_type,
    void* stream) {
  if (block_size < 1) return kInvalidArgument;
  if (num_tokens * num_kv_heads == 0) return 0;
  const CacheRows rows{key, value, key_cache, value_cache, slots, key_scale, value_scale, num_tokens, num_kv_heads,
                       block_size, key_dim, value_dim, key_token_stride, key_head_stride, value_token_stride,
                       value_head_stride, key_block_stride, value_block_stride};
  return with_types(type, cache_type, [&](auto element, auto cached) {
    auto kernel = &write_heads<decltype(element), decltype(cached)>;
    PAGEMILL_LAUNCH(kernel, grid_of(num_tokens, 2 * num_kv_heads), kWarpsPerBlock * kWarp, 0, stream)(rows);
    return launch_status();
  });
}

// qk_norm (weights null: none), the rotation (cos null: none) and the cache write in one pass. query and key are changed
// in place as by those ops; heads of a token are contiguous; dim is the width of query and key heads.
PAGEMILL_EXPORT int pagemill_rope_and_cache(
    void* query, void* key, const void* value, const void* query_weight, const void* key_weight, float eps,
    int64_t variant, const void* cos, const void* sin, const int64_t* positions, void* key_cache, void* value_cache,
    const int64_t* slots, const float* key_scale, const float* value_scale, int64_t num_tokens, int64_t num_query_heads,
    int64_t num_kv_heads, int64_t block_size, int64_t dim, int64_t value_dim, int64_t rotary_dim,
    int64_t query_token_stride, int64_t key_token_stride, int64_t value_token_stride, int64_t key_block_stride,
    int64_t value_block_stride, int64_t type, int64_t cache_type, void* stream) {
  if (block_size < 1 || variant < 0 || variant > 2) return kInvalidArgument;
  if (cos != nullptr && (rotary_dim % 2 != 0 || rotary_dim > dim)) return kInvalidArgument;
  const int64_t per_token = num_query_heads + 2 * num_kv_heads;
  if (num_tokens * per_token == 0) return 0;
  HeadRows heads{query, key, num_tokens, num_query_heads, num_kv_heads, dim, query_token_stride, key_token_stride,
                 {query_weight, eps, variant}, {key_weight, eps, variant}, {cos, sin, positions, rotary_dim}, false};
  heads.wide = wide_heads(heads);
  const CacheRows rows{key, value, key_cache, value_cache, slots, key_scale, value_scale, num_tokens, num_kv_heads,
                       block_size, dim, value_dim, key_token_stride, dim, value_token_stride, value_dim,
                       key_block_stride, value_block_stride};
  return with_types(type, cache_type, [&](auto element, auto cached) {
    return with_steps(dim, [&](auto steps) {
      auto kernel = &rope_and_write_heads<decltype(element), decltype(cached), decltype(steps)::value>;
      PAGEMILL_LAUNCH(kernel, grid_of(num_tokens, per_token), kWarpsPerBlock * kWarp, 0, stream)(heads, rows);
      return launch_status();
    });
  });
}

}  // namespace pagemill::cuda
