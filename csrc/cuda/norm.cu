// RMS norm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), optionally after adding to the residual stream.
//
// Tiling: a row of up to 512 elements is one warp's, a longer one a block's; a thread takes every n-th piece of 16 bytes
// and adds its squares in order, the block adds its threads by a butterfly. So the order depends on the row's length
// alone. The row is read twice (layer norm: three times), from L1 but for the first, and kept nowhere: registers do not
// grow with it.
// Floor: x and the result move once (with a residual: three tensors read or written once more), 2 * sizeof(T) bytes per
// element, 4 for x and a residual of float32; about 5 operations per element, far below the ridge. Everything is
// bandwidth, or launch latency at batch 1.
#include "cuda/rows.cuh"

namespace pagemill::cuda {
namespace {

enum Variant : int64_t { kLlama = 0, kGemma = 1, kFloat32Inside = 2, kLayer = 3 };  // as NormVariant in cpu/norm.h

constexpr int64_t kWarpRow = 512;  // the longest row one warp takes
constexpr int kWarpsPerBlock = 4, kBlockThreads = 256;

struct NormArguments {
  const void* x;
  const void* weight;  // layer: [2, dim], the bias second
  void* residual;
  void* out;
  int64_t rows, inner, outer_stride, inner_stride, dim;
  float eps;
  int64_t variant;
  bool wide;
};

// N elements of a row from `start` on: a piece of 16 bytes, or half of one beside rows of float32.
template <typename T, int N>
PAGEMILL_DEVICE void load_some(const T* row, int64_t start, int64_t length, bool wide, float (&values)[N]) {
  if constexpr (N == kPerLoad<T>) {
    load_piece(row, start, length, wide, values);
  } else {
    static_assert(N * sizeof(T) == 8);
    if (wide) {
      const uint64_t bits = *reinterpret_cast<const uint64_t*>(row + start);
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = to_float(T{static_cast<uint16_t>(bits >> (16 * i))});
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = start + i < length ? to_float(row[start + i]) : 0.0f;
    }
  }
}

template <typename T, int N>
PAGEMILL_DEVICE void store_some(T* row, int64_t start, int64_t length, bool wide, const float (&values)[N]) {
  if constexpr (N == kPerLoad<T>) {
    store_piece(row, start, length, wide, values);
  } else {
    static_assert(N * sizeof(T) == 8);
    if (wide) {
      const uint64_t high = pack_2<T>(values[2], values[3]);
      *reinterpret_cast<uint64_t*>(row + start) = high << 32 | pack_2<T>(values[0], values[1]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (start + i < length) row[start + i] = round_to<T>(values[i]);
    }
  }
}

// The row to normalise: x itself, or the residual after adding x to it; `threads` threads, of which this is `thread`.
template <typename X>
PAGEMILL_DEVICE const X* prepare_row(const NormArguments& a, int64_t row, int thread, int threads) {
  const X* x = static_cast<const X*>(a.x);
  if (a.inner == 1) {  // most rows, and a division less
    x += row * a.outer_stride;
  } else {
    x += row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
  }
  if (a.residual == nullptr) return x;
  constexpr int n = kPerLoad<X>;
  X* residual = static_cast<X*>(a.residual) + row * a.dim;
  for (int64_t start = int64_t(thread) * n; start < a.dim; start += int64_t(threads) * n) {
    float added[n], values[n];
    load_piece(x, start, a.dim, a.wide, added);
    load_piece(static_cast<const X*>(residual), start, a.dim, a.wide, values);
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = added[i] + values[i];
    store_piece(residual, start, a.dim, a.wide, values);
  }
  return residual;  // a thread reads back only what it wrote
}

// term(value) of every element of this thread, added in order.
template <typename X, typename Term>
PAGEMILL_DEVICE float sum_of(const X* row, int64_t dim, bool wide, int thread, int threads, const Term& term) {
  constexpr int n = kPerLoad<X>;
  float sum = 0.0f;
  for (int64_t start = int64_t(thread) * n; start < dim; start += int64_t(threads) * n) {
    float values[n];
    load_piece(row, start, dim, wide, values);
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (start + i < dim) sum = term(values[i], sum);
  }
  return sum;
}

template <typename T>
PAGEMILL_DEVICE float normalised(float x, float scale, float weight, float bias, int64_t variant) {
  const float scaled = x * scale;
  if (variant == kLlama) return rounded<T>(scaled) * weight;
  if (variant == kLayer) return fmaf(scaled, weight, bias);
  return scaled * (variant == kGemma ? weight + 1.0f : weight);
}

// X: of x and the residual; T: of the weight and the result. total(place, number): its sum over the row's threads.
template <typename X, typename T, typename Total>
PAGEMILL_DEVICE void norm_row(const NormArguments& a, int64_t row, int thread, int threads, const Total& total) {
  constexpr int n = kPerLoad<X>;
  const X* from = prepare_row<X>(a, row, thread, threads);
  float mean = 0.0f;
  if (a.variant == kLayer) {
    const float sum = sum_of(from, a.dim, a.wide, thread, threads, [](float x, float s) { return s + x; });
    mean = total(0, sum) / static_cast<float>(a.dim);
  }
  const float squares = total(1, sum_of(from, a.dim, a.wide, thread, threads, [mean](float x, float s) {
                                return fmaf(x - mean, x - mean, s);
                              }));
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(a.dim) + a.eps);
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + row * a.dim;
  for (int64_t start = int64_t(thread) * n; start < a.dim; start += int64_t(threads) * n) {
    float values[n], weights[n], biases[n] = {};
    load_piece(from, start, a.dim, a.wide, values);
    load_some(weight, start, a.dim, a.wide, weights);
    if (a.variant == kLayer) load_some(weight + a.dim, start, a.dim, a.wide, biases);
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = normalised<T>(values[i] - mean, scale, weights[i], biases[i], a.variant);
    store_some(out, start, a.dim, a.wide, values);
  }
}

template <typename X, typename T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) norm_by_warp(NormArguments a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp_id();
  if (row >= a.rows) return;
  norm_row<X, T>(a, row, lane_id(), kWarp, [](int, float number) { return warp_sum(number); });
}

template <typename X, typename T>
__global__ void __launch_bounds__(kBlockThreads) norm_by_block(NormArguments a) {
  PAGEMILL_SHARED(shared);
  norm_row<X, T>(a, blockIdx.x, static_cast<int>(threadIdx.x), kBlockThreads, [shared](int place, float number) {
    float* sums = reinterpret_cast<float*>(shared) + place * (kBlockThreads / kWarp);
    const float mine = warp_sum(number);
    if (lane_id() == 0) sums[warp_id()] = mine;
    sync_block();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kBlockThreads / kWarp; ++w) sum = sum + sums[w];
    return sum;
  });
}

template <typename X, typename T>
int norm(NormArguments a, void* stream) {
  a.wide = aligned_16(a.x) && aligned_16(a.weight) && aligned_16(a.residual) && aligned_16(a.out) &&
           whole_pieces<T>(a.dim) && whole_pieces<X>(a.outer_stride) && whole_pieces<X>(a.inner_stride);
  if (a.dim <= kWarpRow) {
    auto kernel = &norm_by_warp<X, T>;
    PAGEMILL_LAUNCH(kernel, static_cast<unsigned>(ceil_div(a.rows, kWarpsPerBlock)), kWarpsPerBlock * kWarp, 0, stream)(a);
  } else {
    auto kernel = &norm_by_block<X, T>;
    PAGEMILL_LAUNCH(kernel, static_cast<unsigned>(a.rows), kBlockThreads, 2 * kBlockThreads / kWarp * 4, stream)(a);
  }
  return launch_status();
}

}  // namespace

// residual: null, or [rows, dim] contiguous: residual = round(residual + x) is what gets normalised. Row r of x starts
// at (r / inner) * outer_stride + (r % inner) * inner_stride elements; out is contiguous and may be x where the types
// are the same. type: of x and the residual; weight_type: of weight ([dim], layer: [2, dim]) and out, the same, or a
// 16-bit one beside float32.
PAGEMILL_EXPORT int pagemill_rms_norm(const void* x, const void* weight, void* residual, void* out, int64_t rows,
                                      int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t dim, float eps,
                                      int64_t variant, int64_t type, int64_t weight_type, void* stream) {
  if (dim < 1 || inner < 1 || variant < kLlama || variant > kLayer) return kInvalidArgument;
  if (type != weight_type && type != kFloat32) return kInvalidArgument;
  if (rows == 0) return 0;
  const NormArguments arguments{x, weight, residual, out, rows, inner, outer_stride, inner_stride, dim, eps, variant, false};
  return with_type(weight_type, [&](auto element) {
    using T = decltype(element);
    return type == weight_type ? norm<T, T>(arguments, stream) : norm<float, T>(arguments, stream);
  });
}

}  // namespace pagemill::cuda
