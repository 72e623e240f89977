// RMS norm (Zhang and Sennrich 2019), optionally after adding to the residual stream.
//
// One row, one worker. The sum of squares runs in float32 over a fixed number of lanes, which is an order that depends
// on the row's length alone; the last, partial vector is padded with zeros.
#include "cpu/kernels.h"
#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int kChains = 4;  // independent sums, so that one addition need not wait for the last

template <typename T>
float sum_of_squares(const T* x, int64_t dim) {
  Vec chains[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= dim; i += kChains * kLanes)
    for (int c = 0; c < kChains; ++c) {
      Vec v = load(x + i + c * kLanes);
      chains[c] = fused(v, v, chains[c]);
    }
  for (; i < dim; i += kLanes) {
    Vec v = load_up_to(x + i, dim - i);
    chains[0] = fused(v, v, chains[0]);
  }
  return sum_lanes((chains[0] + chains[1]) + (chains[2] + chains[3]));
}

template <typename T, NormVariant VARIANT>
void norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps) {
  Vec scale = splat(1.0f / __builtin_sqrtf(sum_of_squares(x, dim) / float(dim) + eps));
  for (int64_t i = 0; i < dim; i += kLanes) {
    Vec w = load_up_to(weight + i, dim - i), v = load_up_to(x + i, dim - i) * scale;
    if constexpr (VARIANT == NormVariant::llama) v = round_to(v, x);
    if constexpr (VARIANT == NormVariant::gemma) w = w + 1.0f;
    store_up_to(out + i, v * w, dim - i);
  }
}

template <typename T>
void add_row(const T* x, T* residual, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kLanes)
    store_up_to(residual + i, load_up_to(x + i, dim - i) + load_up_to(residual + i, dim - i), dim - i);
}

template <typename T>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const T* weight = reinterpret_cast<const T*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x =
        reinterpret_cast<const T*>(a.x) + row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
    T* out = reinterpret_cast<T*>(a.out) + row * a.dim;
    if (a.residual != nullptr) {
      T* residual = reinterpret_cast<T*>(a.residual) + row * a.dim;
      add_row(x, residual, a.dim);
      x = residual;
    }
    switch (a.variant) {
      case NormVariant::llama: norm_row<T, NormVariant::llama>(x, weight, out, a.dim, a.eps); break;
      case NormVariant::gemma: norm_row<T, NormVariant::gemma>(x, weight, out, a.dim, a.eps); break;
      case NormVariant::float32: norm_row<T, NormVariant::float32>(x, weight, out, a.dim, a.eps); break;
    }
  }
}

}  // namespace

void rms_norm(const NormArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.type == ElementType::bf16) {
    norm_rows<uint16_t>(args, row_begin, row_end);
  } else {
    norm_rows<float>(args, row_begin, row_end);
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
