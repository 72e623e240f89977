// linear: x [rows, in_features] times weight [out_features, in_features] transposed, on the tensor cores (mma.sync), with
// bias, residual or gated activation; float32 sums. Float32 weights have a kernel of their own (linear_float32.cuh).
//
// Tiling: rows go in tiles of 16 (decode), 64 or 128 (prefill), the weight's rows in tiles of 64 or 128; slots of 64 or 32
// elements of K stream through a ring in shared memory (linear_feed.cuh). The weight stays as checkpoints hold it, a row
// per output: a slot takes 128 bytes (64) of each row, whole lines of memory, and ldmatrix wants rows of K as they are.
// Batch invariance: linear_plan.cuh fixes the order of a sum by the weight's shape alone. x is mma's first operand in every
// tile, and a row's place in a tile does not enter its products.
// Split K: where tiles are too few to fill a GPU, every split is a block's, which leaves float32 sums for merge_products;
// else, or where the workspace is too small, a block takes all splits of its tile in turn. Both fold from left to right.
// Floor: up to about 140 rows the weight's bytes, once; above, 2 * rows * out_features * in_features operations. Partial
// sums cost 8 bytes per split, row and output, from L2.
#include "cuda/linear_feed.cuh"
#include "cuda/linear_finish.cuh"
#include "cuda/linear_float32.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kMergeThreads = 256;

template <typename Shape>
using WarpSums = float[Shape::kMmaM][Shape::kMmaN][4];

template <typename Shape>
PAGEMILL_DEVICE void clear(WarpSums<Shape>& sums) {
#pragma unroll
  for (int m = 0; m < Shape::kMmaM; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kMmaN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    }
  }
}

// total += sums, which start anew.
template <typename Shape>
PAGEMILL_DEVICE void fold(WarpSums<Shape>& total, WarpSums<Shape>& sums) {
#pragma unroll
  for (int m = 0; m < Shape::kMmaM; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kMmaN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[m][n][i] = total[m][n][i] + sums[m][n][i];
        sums[m][n][i] = 0.0f;
      }
    }
  }
}

// The first row of out that this thread holds sums of, and the first column; gated: of a pair of products.
template <typename Shape>
PAGEMILL_DEVICE TilePlace place_of_thread(const LinearParams& p, const TilePlace& tile) {
  const int lane = lane_id(), warp_m = warp_id() / Shape::kWarpsN, warp_n = warp_id() % Shape::kWarpsN;
  const int width = p.gated ? 4 : 8;  // columns of a product
  return {tile.row + warp_m * Shape::kMmaM * 16 + lane / 4,
          tile.column + warp_n * Shape::kMmaN * width + 2 * (lane % 4)};
}

template <typename T, typename Shape>
PAGEMILL_DEVICE void write_results(const LinearParams& p, const TilePlace& at, const WarpSums<Shape>& total) {
#pragma unroll
  for (int m = 0; m < Shape::kMmaM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = at.row + m * 16 + half * 8;
#pragma unroll
      for (int n = 0; n < Shape::kMmaN; n += 2) {
        const float first[2] = {total[m][n][2 * half], total[m][n][2 * half + 1]};
        const float second[2] = {total[m][n + 1][2 * half], total[m][n + 1][2 * half + 1]};
        if (p.gated) {
          write_two<T>(p, first, second, row, at.column + n * 4);
        } else {
          write_two<T>(p, first, first, row, at.column + n * 8);
          write_two<T>(p, second, second, row, at.column + n * 8 + 8);
        }
      }
    }
  }
}

// One split's sums, by rows of the weight.
template <typename Shape>
PAGEMILL_DEVICE void write_partial(const LinearParams& p, const TilePlace& at, int64_t split,
                                   const WarpSums<Shape>& sums) {
#pragma unroll
  for (int m = 0; m < Shape::kMmaM; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kMmaN; ++n) {
      const int64_t first = at.column + (p.gated ? n / 2 * 8 : n * 8);
      const int64_t offset = p.gated && n % 2 == 1 ? p.out_features : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = at.row + m * 16 + i / 2 * 8, column = first + i % 2;
        if (row < p.rows && column < p.out_features)
          p.partial[(split * p.rows + row) * p.weight_rows + offset + column] = sums[m][n][i];
      }
    }
  }
}

// gridDim.y: 1, or a block for every split.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) multiply_tile(LinearParams p) {
  PAGEMILL_SHARED(ring);
  const TilePlace tile = TilePlace::of(p, blockIdx.x, Shape{});
  const TilePlace at = place_of_thread<Shape>(p, tile);
  const bool one_split = gridDim.y > 1;
  const int per_split = static_cast<int>(p.splits.length / Shape::kChunk);
  const int all = static_cast<int>(ceil_div(p.in_features, Shape::kChunk));
  const int begin = static_cast<int>(blockIdx.y) * per_split, whole = begin + per_split;
  const int end = one_split && whole < all ? whole : all;
  Feed<T, Shape> feed(p, tile, begin, end, ring);
  WarpSums<Shape> sums, total;
  clear<Shape>(sums);
  clear<Shape>(total);
  for (int chunk = begin, left = per_split; chunk < end; ++chunk) {
    multiply_slot<T, Shape>(feed.next(), sums);
    if (--left > 0 && chunk + 1 < end) continue;
    if (one_split) return write_partial<Shape>(p, at, blockIdx.y, sums);
    fold<Shape>(total, sums);
    left = per_split;
  }
  write_results<T, Shape>(p, at, total);
}

// Folds the splits of two outputs per thread.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_products(LinearParams p) {
  const int64_t pairs = ceil_div(p.out_features, 2);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x;
  const int64_t row = index / pairs, column = index % pairs * 2;
  if (row >= p.rows) return;
  const int second = column + 1 < p.out_features ? 1 : 0;
  const int64_t offset = p.gated ? p.out_features : 0;
  float sums[2] = {0.0f, 0.0f}, ups[2] = {0.0f, 0.0f};
  const float* partial = p.partial + row * p.weight_rows + column;
#pragma unroll 4
  for (int64_t split = 0; split < p.splits.count; ++split) {
    sums[0] = sums[0] + partial[0];
    sums[1] = sums[1] + partial[second];
    if (p.gated) {
      ups[0] = ups[0] + partial[offset];
      ups[1] = ups[1] + partial[offset + second];
    }
    partial += p.rows * p.weight_rows;
  }
  write_two<T>(p, sums, ups, row, column);
}

template <typename T, typename Shape>
int multiply(const LinearParams& p, bool one_split, void* stream) {
  const int64_t tiles = ceil_div(p.rows, Shape::kM) * ceil_div(p.weight_rows, Shape::kN);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(one_split ? p.splits.count : 1));
  auto kernel = &multiply_tile<T, Shape>;
  if (const int error = allow_shared(kernel, Shape::kSharedBytes)) return error;
  PAGEMILL_LAUNCH(kernel, grid, Shape::kThreads, Shape::kSharedBytes, stream)(p);
  if (!one_split) return launch_status();
  auto merge = &merge_products<T>;
  const int64_t pairs = p.rows * ceil_div(p.out_features, 2);
  PAGEMILL_LAUNCH(merge, static_cast<unsigned>(ceil_div(pairs, kMergeThreads)), kMergeThreads, 0, stream)(p);
  return launch_status();
}

bool in_pieces(const void* rows, int64_t stride, int64_t length) {
  return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && stride % 8 == 0 && length % 8 == 0;
}

}  // namespace

// Bytes that pagemill_linear can use; with fewer, or none, the same bits come later. weight_rows: gated, both halves.
PAGEMILL_EXPORT int64_t pagemill_linear_workspace(int64_t rows, int64_t weight_rows, int64_t in_features) {
  if (rows < 1 || weight_rows < 1 || in_features < 1) return 0;
  return partial_bytes(rows, weight_rows, in_features);
}

// x, weight: of `type` (float32, bfloat16 or float16), rows at a stride. bias: of `bias_type`, null or [out_features], gated
// [2 * out_features]. out: float32 or of `type`. gated: weight [2 * out_features, in_features], gate first; out is
// activation(gate) * up. residual: of out's type, not with gated; may be out. workspace: aligned to 16 bytes.
PAGEMILL_EXPORT int pagemill_linear(void* out, const void* x, const void* weight, const void* bias, const void* residual,
                                    void* workspace, int64_t workspace_bytes, int64_t rows, int64_t out_features,
                                    int64_t in_features, int64_t x_stride, int64_t weight_stride, int64_t gated,
                                    int64_t activation, int64_t float32_out, int64_t bias_type, int64_t type,
                                    void* stream) {
  if (out_features < 1 || in_features < 1 || !known_activation(activation)) return kInvalidArgument;
  if (gated != 0 && residual != nullptr) return kInvalidArgument;
  if (bias != nullptr && bias_type != kFloat32 && bias_type != type) return kInvalidArgument;
  if (rows == 0) return 0;
  LinearParams p{};
  p.x = x, p.weight = weight, p.bias = bias, p.residual = residual, p.out = out;
  p.partial = static_cast<float*>(workspace);
  p.rows = rows, p.out_features = out_features, p.in_features = in_features;
  p.weight_rows = gated != 0 ? 2 * out_features : out_features;
  p.x_stride = x_stride, p.weight_stride = weight_stride;
  p.splits = splits_of(p.weight_rows, in_features);
  p.activation = activation;
  p.gated = gated != 0, p.float32_bias = bias_type == kFloat32, p.float32_out = float32_out != 0;
  if (type == kFloat32) return launch_float32(p, stream);
  p.in_pieces = in_pieces(x, x_stride, in_features) && in_pieces(weight, weight_stride, in_features);
  p.two_out = reinterpret_cast<uintptr_t>(out) % 4 == 0 && out_features % 2 == 0;
  const int64_t wanted = partial_bytes(rows, p.weight_rows, in_features);
  const bool one_split = wanted > 0 && workspace != nullptr && workspace_bytes >= wanted;
  return with_half_type(type, [&](auto element) {
    return with_tile(rows, [&](auto tile) { return multiply<decltype(element), decltype(tile)>(p, one_split, stream); });
  });
}

}  // namespace pagemill::cuda
