// What becomes of a finished sum: bias, rounding, then the residual or the gate, each rounded as separate ops would.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/linear_plan.cuh"

namespace pagemill::cuda {

template <typename T>
PAGEMILL_DEVICE float biased(const LinearParams& p, float sum, int64_t weight_row) {
  if (p.bias != nullptr) {
    sum = sum + (p.float32_bias ? static_cast<const float*>(p.bias)[weight_row]
                                : to_float(static_cast<const T*>(p.bias)[weight_row]));
  }
  return p.float32_out ? sum : rounded<T>(sum);
}

// One output; `up` counts where gated.
template <typename T>
PAGEMILL_DEVICE float finished(const LinearParams& p, float sum, float up, int64_t row, int64_t column) {
  const float product = biased<T>(p, sum, column);
  if (p.gated) {
    const float gate = activate(product, p.activation);
    return (p.float32_out ? gate : rounded<T>(gate)) * biased<T>(p, up, p.out_features + column);
  }
  if (p.residual == nullptr) return product;
  const int64_t at = row * p.out_features + column;
  return product + (p.float32_out ? static_cast<const float*>(p.residual)[at]
                                  : to_float(static_cast<const T*>(p.residual)[at]));
}

// Outputs `column` and `column` + 1 of a row, as far as they exist.
template <typename T>
PAGEMILL_DEVICE void write_two(const LinearParams& p, const float (&sums)[2], const float (&ups)[2], int64_t row,
                               int64_t column) {
  if (row >= p.rows || column >= p.out_features) return;
  const int64_t at = row * p.out_features + column;
  const bool both = column + 1 < p.out_features;
  const float first = finished<T>(p, sums[0], ups[0], row, column);
  const float second = both ? finished<T>(p, sums[1], ups[1], row, column + 1) : 0.0f;
  if (p.float32_out) {
    float* out = static_cast<float*>(p.out) + at;
    out[0] = first;
    if (both) out[1] = second;
  } else if (p.two_out && both) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + at) = pack_2<T>(first, second);
  } else {
    T* out = static_cast<T*>(p.out) + at;
    out[0] = round_to<T>(first);
    if (both) out[1] = round_to<T>(second);
  }
}

}  // namespace pagemill::cuda
