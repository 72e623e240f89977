// RMS norm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016), optionally after adding to the residual stream.
//
// One row, one worker. Sums run in float32 over a fixed number of lanes, which is an order that depends
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

template <typename X, typename T, NormVariant VARIANT>
void norm_row(const X* x, const T* weight, T* out, int64_t dim, float eps) {
  Vec scale = splat(1.0f / __builtin_sqrtf(sum_of_squares(x, dim) / float(dim) + eps));
  for (int64_t i = 0; i < dim; i += kLanes) {
    Vec w = load_up_to(weight + i, dim - i), v = load_up_to(x + i, dim - i) * scale;
    if constexpr (VARIANT == NormVariant::llama) v = round_to(v, out);
    if constexpr (VARIANT == NormVariant::gemma) w = w + 1.0f;
    store_up_to(out + i, v * w, dim - i);
  }
}

// term(i, count): elements from i on, of which `count` exist; the lanes past them are zero.
template <typename Term>
float sum_of(int64_t dim, const Term& term) {
  Vec chains[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= dim; i += kChains * kLanes)
    for (int c = 0; c < kChains; ++c) chains[c] = chains[c] + term(i + c * kLanes, kLanes);
  for (; i < dim; i += kLanes) chains[0] = chains[0] + term(i, dim - i);
  return sum_lanes((chains[0] + chains[1]) + (chains[2] + chains[3]));
}

template <typename X, typename T>
void layer_norm_row(const X* x, const T* weight, T* out, int64_t dim, float eps) {
  const T* bias = weight + dim;
  const Vec mean = splat(sum_of(dim, [&](int64_t i, int64_t count) { return load_up_to(x + i, count); }) / float(dim));
  const float squares = sum_of(dim, [&](int64_t i, int64_t count) {
    Vec v = load_up_to(x + i, count) - mean;
    if (count < kLanes) {  // the lanes past the row's end hold -mean
      float lanes[kLanes] = {};
      store_up_to(lanes, v, count);
      v = load(lanes);
    }
    return v * v;
  });
  const Vec scale = splat(1.0f / __builtin_sqrtf(squares / float(dim) + eps));
  for (int64_t i = 0; i < dim; i += kLanes) {
    const int64_t count = dim - i;
    const Vec v = (load_up_to(x + i, count) - mean) * scale;
    store_up_to(out + i, fused(v, load_up_to(weight + i, count), load_up_to(bias + i, count)), count);
  }
}

template <typename T>
void add_row(const T* x, float factor, T* residual, int64_t dim) {
  const Vec factors = splat(factor);
  for (int64_t i = 0; i < dim; i += kLanes) {
    Vec added = load_up_to(x + i, dim - i);
    if (factor != 1.0f) added = round_to(added * factors, x);
    store_up_to(residual + i, added + load_up_to(residual + i, dim - i), dim - i);
  }
}

template <typename X, typename T>
void copy_row(const X* x, T* out, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kLanes) store_up_to(out + i, load_up_to(x + i, dim - i), dim - i);
}

template <typename X, typename T>
void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  const T* weight = reinterpret_cast<const T*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    const X* x =
        reinterpret_cast<const X*>(a.x) + row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
    T* out = reinterpret_cast<T*>(a.out) + row * a.dim;
    if (a.residual != nullptr) {
      X* residual = reinterpret_cast<X*>(a.residual) + row * a.dim;
      add_row(x, a.factor, residual, a.dim);
      x = residual;
    }
    if (weight == nullptr) {
      if (a.out != nullptr) copy_row(x, out, a.dim);
      continue;
    }
    switch (a.variant) {
      case NormVariant::llama: norm_row<X, T, NormVariant::llama>(x, weight, out, a.dim, a.eps); break;
      case NormVariant::gemma: norm_row<X, T, NormVariant::gemma>(x, weight, out, a.dim, a.eps); break;
      case NormVariant::layer: layer_norm_row(x, weight, out, a.dim, a.eps); break;
      case NormVariant::float32: norm_row<X, T, NormVariant::float32>(x, weight, out, a.dim, a.eps); break;
    }
  }
}

}  // namespace

void rms_norm(const NormArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.type == ElementType::f32) {
    norm_rows<float, float>(args, row_begin, row_end);
  } else if (args.is_wide) {
    norm_rows<float, uint16_t>(args, row_begin, row_end);
  } else {
    norm_rows<uint16_t, uint16_t>(args, row_begin, row_end);
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
