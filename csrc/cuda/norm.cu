// RMS norm (Zhang and Sennrich 2019), optionally after adding to the residual stream.
//
// Tiling: a row of up to 512 elements is one warp's, a longer one a block's; a thread takes every n-th piece of 16 bytes
// and adds its squares in order, the block adds its threads by a butterfly. So the order depends on the row's length
// alone. The row is read twice, the second time from L1, and kept nowhere: registers do not grow with it.
// Floor: x and the result move once (with a residual: three tensors read or written once more), 2 * sizeof(T) bytes per
// element; about 5 operations per element, far below the ridge. Everything is bandwidth, or launch latency at batch 1.
#include "cuda/rows.cuh"

namespace pagemill::cuda {
namespace {

enum Variant : int64_t { kLlama = 0, kGemma = 1, kFloat32Inside = 2 };  // as NormVariant in cpu/norm.h

constexpr int64_t kWarpRow = 512;  // the longest row one warp takes
constexpr int kWarpsPerBlock = 4, kBlockThreads = 256;

struct NormArguments {
  const void* x;
  const void* weight;
  void* residual;
  void* out;
  int64_t rows, inner, outer_stride, inner_stride, dim;
  float eps;
  int64_t variant;
  bool wide;
};

template <typename T>
PAGEMILL_DEVICE float normalised(float x, float scale, float weight, int64_t variant) {
  const float scaled = x * scale;
  if (variant == kLlama) return rounded<T>(scaled) * weight;
  return scaled * (variant == kGemma ? weight + 1.0f : weight);
}

// The row to normalise: x itself, or the residual after adding x to it; `threads` threads, of which this is `thread`.
template <typename T>
PAGEMILL_DEVICE const T* prepare_row(const NormArguments& a, int64_t row, int thread, int threads) {
  const T* x = static_cast<const T*>(a.x);
  if (a.inner == 1) {  // most rows, and a division less
    x += row * a.outer_stride;
  } else {
    x += row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
  }
  if (a.residual == nullptr) return x;
  constexpr int n = kPerLoad<T>;
  T* residual = static_cast<T*>(a.residual) + row * a.dim;
  for (int64_t start = int64_t(thread) * n; start < a.dim; start += int64_t(threads) * n) {
    float added[n], values[n];
    load_piece(x, start, a.dim, a.wide, added);
    load_piece(static_cast<const T*>(residual), start, a.dim, a.wide, values);
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = added[i] + values[i];
    store_piece(residual, start, a.dim, a.wide, values);
  }
  return residual;  // a thread reads back only what it wrote
}

template <typename T>
PAGEMILL_DEVICE float square_sum(const T* row, int64_t dim, bool wide, int thread, int threads) {
  constexpr int n = kPerLoad<T>;
  float sum = 0.0f;
  for (int64_t start = int64_t(thread) * n; start < dim; start += int64_t(threads) * n) {
    float values[n];
    load_piece(row, start, dim, wide, values);
#pragma unroll
    for (int i = 0; i < n; ++i) sum = fmaf(values[i], values[i], sum);
  }
  return sum;
}

template <typename T>
PAGEMILL_DEVICE void write_row(const NormArguments& a, int64_t row, const T* from, float sum, int thread, int threads) {
  constexpr int n = kPerLoad<T>;
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(a.dim) + a.eps);
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + row * a.dim;
  for (int64_t start = int64_t(thread) * n; start < a.dim; start += int64_t(threads) * n) {
    float values[n], weights[n];
    load_piece(from, start, a.dim, a.wide, values);
    load_piece(weight, start, a.dim, a.wide, weights);
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = normalised<T>(values[i], scale, weights[i], a.variant);
    store_piece(out, start, a.dim, a.wide, values);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) norm_by_warp(NormArguments a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp_id();
  if (row >= a.rows) return;
  const T* from = prepare_row<T>(a, row, lane_id(), kWarp);
  const float sum = warp_sum(square_sum(from, a.dim, a.wide, lane_id(), kWarp));
  write_row<T>(a, row, from, sum, lane_id(), kWarp);
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads) norm_by_block(NormArguments a) {
  PAGEMILL_SHARED(shared);
  float* sums = reinterpret_cast<float*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const T* from = prepare_row<T>(a, blockIdx.x, thread, kBlockThreads);
  const float mine = warp_sum(square_sum(from, a.dim, a.wide, thread, kBlockThreads));
  if (lane_id() == 0) sums[warp_id()] = mine;
  sync_block();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kBlockThreads / kWarp; ++w) sum = sum + sums[w];
  write_row<T>(a, blockIdx.x, from, sum, thread, kBlockThreads);
}

template <typename T>
int norm(NormArguments a, void* stream) {
  a.wide = aligned_16(a.x) && aligned_16(a.weight) && aligned_16(a.residual) && aligned_16(a.out) &&
           whole_pieces<T>(a.dim) && whole_pieces<T>(a.outer_stride) && whole_pieces<T>(a.inner_stride);
  if (a.dim <= kWarpRow) {
    auto kernel = &norm_by_warp<T>;
    PAGEMILL_LAUNCH(kernel, static_cast<unsigned>(ceil_div(a.rows, kWarpsPerBlock)), kWarpsPerBlock * kWarp, 0, stream)(a);
  } else {
    auto kernel = &norm_by_block<T>;
    PAGEMILL_LAUNCH(kernel, static_cast<unsigned>(a.rows), kBlockThreads, kBlockThreads / kWarp * 4, stream)(a);
  }
  return launch_status();
}

}  // namespace

// residual: null, or [rows, dim] contiguous: residual = round(residual + x) is what gets normalised. Row r of x starts
// at (r / inner) * outer_stride + (r % inner) * inner_stride elements; out is contiguous and may be x. type: of all.
PAGEMILL_EXPORT int pagemill_rms_norm(const void* x, const void* weight, void* residual, void* out, int64_t rows,
                                      int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim, float eps,
                                      int64_t variant, int64_t type, void* stream) {
  if (dim < 1 || inner < 1 || variant < kLlama || variant > kFloat32Inside) return kInvalidArgument;
  if (rows == 0) return 0;
  const NormArguments arguments{x, weight, residual, out, rows, inner, outer_stride, inner_stride, dim, eps, variant, false};
  return with_type(type, [&](auto element) { return norm<decltype(element)>(arguments, stream); });
}

}  // namespace pagemill::cuda
