// The activations by their codes, on one float32.
#pragma once

#include "cuda/portable.cuh"

namespace pagemill::cuda {

enum Kind : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };  // as ActivationKind in cpu/activation.h

inline bool known_activation(int64_t kind) { return kind >= kSilu && kind <= kGeluTanh; }

PAGEMILL_DEVICE float activate(float x, int64_t kind) {
  if (kind == kSilu) return x / (expf(-x) + 1.0f);
  if (kind == kGelu) {
    const float bounded = x < -30.0f ? -30.0f : x;  // keeps an infinity from meeting a zero
    return 0.5f * bounded * erfcf(bounded * -0.707106781f);
  }
  // (1 + tanh u) / 2 = 1 / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016)
  return x / (expf(-x * fmaf(x * x, 0.0713548163f, 1.59576912f)) + 1.0f);
}

}  // namespace pagemill::cuda
