// The activations on vectors, for the element-wise op and for the linear layer's epilogue: one arithmetic.
//
// All three are x times a number in [0, 1] that is computed to full relative precision, so the long negative tails keep
// their digits.
#pragma once

#include "cpu/activation.h"
#include "cpu/lanes_math.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

template <ActivationKind KIND>
PAGEMILL_INLINE Vec activate(Vec x) {
  if constexpr (KIND == ActivationKind::silu) {
    return x / (exp(-x) + 1.0f);
  } else if constexpr (KIND == ActivationKind::gelu) {
    // beyond 15 the tail is zero; the bound keeps infinity out of the products
    Vec bounded = x > 30.0f ? splat(30.0f) : x;
    bounded = bounded < -30.0f ? splat(-30.0f) : bounded;
    Vec small = bounded * normal_tail(bounded);
    return x > 0.0f ? x - small : small;
  } else {
    // (1 + tanh u) / 2 = 1 / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016)
    constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;  // twice the factors of x and x^3
    return x / (exp(-x * fused(x * x, splat(kCubic), splat(kLinear))) + 1.0f);
  }
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
