// linear with float32 weights, for models that are kept so and for tests: no tensor cores, every product and sum float32.
//
// Tiling: a block takes 32 rows of x by 32 rows of the weight (gated: 32 of either half), 32 elements of K at a time
// through shared memory; a thread has one column and four rows.
// Batch invariance: a sum is one chain of fmaf in ascending order of K, whatever block computes it; so does the CPU's op.
// Floor: 2 * rows * out_features * in_features operations on the float32 units (67 TFLOP/s on an H200), which this
// simple loop reaches a part of: two reads of shared memory feed eight operations.
#pragma once

#include "cuda/linear_finish.cuh"

namespace pagemill::cuda {

constexpr int kFloatTile = 32, kFloatThreads = 256, kFloatRows = 4;
constexpr int kFloatRow = kFloatTile + 1;  // of shared memory: 32 rows at the same place lie in 32 banks
constexpr int kFloatTileSize = kFloatTile * kFloatRow;

// Elements [k, k + 32) of rows [first, first + 32); zero where there are none.
PAGEMILL_DEVICE void fetch_float_tile(float* to, const float* from, int64_t stride, int64_t first, int64_t rows, int64_t k,
                                      int64_t length) {
  const int place = lane_id();
#pragma unroll
  for (int row = warp_id(); row < kFloatTile; row += kFloatThreads / kWarp) {
    const bool there = first + row < rows && k + place < length;
    to[row * kFloatRow + place] = there ? from[(first + row) * stride + k + place] : 0.0f;
  }
}

template <bool GATED>
__global__ void __launch_bounds__(kFloatThreads) multiply_float32(LinearParams p) {
  PAGEMILL_SHARED(shared);
  float* x = reinterpret_cast<float*>(shared);
  float* weights = x + kFloatTileSize;
  float* up_weights = weights + kFloatTileSize;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kFloatTile, row = static_cast<int64_t>(blockIdx.y) * kFloatTile;
  const float* weight = static_cast<const float*>(p.weight);
  float sums[kFloatRows] = {}, ups[kFloatRows] = {};
  for (int64_t k = 0; k < p.in_features; k += kFloatTile) {
    sync_block();  // readers of the last elements
    fetch_float_tile(x, static_cast<const float*>(p.x), p.x_stride, row, p.rows, k, p.in_features);
    fetch_float_tile(weights, weight, p.weight_stride, column, p.out_features, k, p.in_features);
    if constexpr (GATED)
      fetch_float_tile(up_weights, weight + p.out_features * p.weight_stride, p.weight_stride, column, p.out_features, k,
                       p.in_features);
    sync_block();
    const int64_t left = p.in_features - k;
    const int many = left < kFloatTile ? static_cast<int>(left) : kFloatTile;
    for (int i = 0; i < many; ++i) {
#pragma unroll
      for (int r = 0; r < kFloatRows; ++r) {
        const float value = x[(warp_id() * kFloatRows + r) * kFloatRow + i];
        sums[r] = fmaf(value, weights[lane_id() * kFloatRow + i], sums[r]);
        if constexpr (GATED) ups[r] = fmaf(value, up_weights[lane_id() * kFloatRow + i], ups[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kFloatRows; ++r) {
    const int64_t at = row + warp_id() * kFloatRows + r;
    if (at < p.rows && column + lane_id() < p.out_features)
      static_cast<float*>(p.out)[at * p.out_features + column + lane_id()] =
          finished<float>(p, sums[r], ups[r], at, column + lane_id());
  }
}

inline int launch_float32(const LinearParams& p, void* stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out_features, kFloatTile)),
                  static_cast<unsigned>(ceil_div(p.rows, kFloatTile)));
  auto kernel = p.gated ? &multiply_float32<true> : &multiply_float32<false>;
  const int tiles = p.gated ? 3 : 2;
  PAGEMILL_LAUNCH(kernel, grid, kFloatThreads, tiles * kFloatTileSize * 4, stream)(p);
  return launch_status();
}

}  // namespace pagemill::cuda
