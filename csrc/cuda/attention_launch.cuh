// Launches one call for one head size: decode, prefill where the batch may have some, and the merge.
#pragma once

#include "cuda/attention_decode.cuh"
#include "cuda/attention_merge.cuh"
#include "cuda/attention_prefill.cuh"

namespace pagemill::cuda {

// What the host knows of the batch.
struct AttentionBounds {
  int64_t max_query_len, max_seq_len, num_multiprocessors;
};

// Decode blocks that find room on one multiprocessor of the largest shared memory (228 KiB, 1 KiB of each the system's).
constexpr int64_t blocks_per_multiprocessor(int64_t shared_bytes) {
  const int64_t blocks = 228 * 1024 / (shared_bytes + 1024);
  return blocks < 1 ? 1 : blocks > 4 ? 4 : blocks;
}

template <typename T, typename C, int D>
int launch_decode(const AttentionParams& params, const AttentionBounds& bounds, void* stream) {
  using Block = DecodeBlock<T, C, D>;
  auto kernel = &decode_attention<T, C, D>;
  const int64_t shared = Block::kBytes + DecodePlan::bytes(params.num_seqs);
  if (const int error = allow_shared(kernel, shared)) return error;
  const int64_t groups = ceil_div(ceil_div(bounds.max_seq_len, kSplitKeys) + 1, Block::Shape::kWarps);
  const int64_t row_tiles = ceil_div(params.group > 64 ? params.group : 64, 16);
  const int64_t most = params.num_seqs * params.num_kv_heads * groups * row_tiles;
  const int64_t room = bounds.num_multiprocessors * blocks_per_multiprocessor(shared);
  const int64_t grid = most < 1 ? 1 : most < room ? most : room;
  PAGEMILL_LAUNCH(kernel, dim3(static_cast<unsigned>(grid)), Block::kThreads, shared, stream)(params);
  if (ceil_div(bounds.max_seq_len, kSplitKeys) <= Block::Shape::kWarps || params.num_seqs == 0) return 0;
  auto merge = &merge_splits<T>;
  const unsigned rows = static_cast<unsigned>(params.num_seqs) * static_cast<unsigned>(params.num_query_heads);
  PAGEMILL_LAUNCH(merge, dim3(rows), ceil_div(params.value_dim, kWarp) * kWarp, 0, stream)
  (params, Block::Shape::kWarps);
  return 0;
}

template <typename T, typename C, int D>
int launch_prefill(const AttentionParams& params, const AttentionBounds& bounds, void* stream) {
  using Block = PrefillBlock<T, C, D>;
  if (bounds.max_query_len <= 1 || bounds.max_query_len * params.group <= 64 || params.num_seqs == 0) return 0;
  auto kernel = &prefill_attention<T, C, D>;
  if (const int error = allow_shared(kernel, Block::kBytes)) return error;
  const int64_t tiles = static_cast<int64_t>(params.num_tokens) * params.group / Block::kRows + params.num_seqs;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(params.num_kv_heads));
  PAGEMILL_LAUNCH(kernel, grid, Block::kThreads, Block::kBytes, stream)(params);
  return 0;
}

template <typename T, typename C, int D>
int launch_both(const AttentionParams& params, const AttentionBounds& bounds, void* stream) {
  if (const int error = launch_prefill<T, C, D>(params, bounds, stream)) return error;
  return launch_decode<T, C, D>(params, bounds, stream);
}

// query_type and cache_type: ElementCode.
template <int D>
int launch_head_size(const AttentionParams& params, const AttentionBounds& bounds, int64_t query_type,
                     int64_t cache_type, void* stream) {
  return with_half_type(query_type, [&](auto query) {
    using T = decltype(query);
    if (cache_type == query_type) return launch_both<T, T, D>(params, bounds, stream);
    if (cache_type == kFloat8) return launch_both<T, Fp8, D>(params, bounds, stream);
    return kInvalidArgument;
  });
}

// Each in a file of its own, which the compiler takes long for.
int launch_head_size_64(const AttentionParams&, const AttentionBounds&, int64_t, int64_t, void*);
int launch_head_size_96(const AttentionParams&, const AttentionBounds&, int64_t, int64_t, void*);
int launch_head_size_128(const AttentionParams&, const AttentionBounds&, int64_t, int64_t, void*);
int launch_head_size_256(const AttentionParams&, const AttentionBounds&, int64_t, int64_t, void*);

}  // namespace pagemill::cuda
