// exp and the error function on vectors, within a few units in the last place of float32, without tables or branches.
#pragma once

#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// 2^n for n in [-126, 127].
PAGEMILL_INLINE Vec power_of_two(IntVec n) { return (Vec)((n + 127) << 23); }

// x * 2^n, rounded once; n is given twice. Two halves, as n leaves the exponent's range before the result does.
PAGEMILL_INLINE Vec scale_by_power(Vec x, Vec whole, IntVec n) {
#if defined(__AVX512F__)
  (void)n;
  return _mm512_scalef_ps(x, whole);
#else
  (void)whole;
  const IntVec half = n >> 1;
  return x * power_of_two(half) * power_of_two(n - half);
#endif
}

// e^x. Overflows to infinity, underflows through the denormals to zero, keeps NaN.
// Range reduction x = n ln2 + r after Cody and Waite (Software Manual for the Elementary Functions, 1980): ln2 is split
// so that n * kLn2High is exact. On |r| <= ln2 / 2 the Taylor series to r^7 is within 5e-9.
PAGEMILL_INLINE Vec exp(Vec x) {
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  x = larger(splat(-150.0f), smaller(splat(150.0f), x));  // in this order NaN stays
  Vec shifted = fused(x, splat(kLog2e), splat(kRound));
  Vec whole = shifted - kRound;
  IntVec n = (IntVec)shifted - (IntVec)splat(kRound);
  Vec r = fused(whole, splat(-kLn2High), x);
  r = fused(whole, splat(-kLn2Low), r);
  Vec sum = splat(1.0f / 5040);
  sum = fused(sum, r, splat(1.0f / 720));
  sum = fused(sum, r, splat(1.0f / 120));
  sum = fused(sum, r, splat(1.0f / 24));
  sum = fused(sum, r, splat(1.0f / 6));
  sum = fused(sum, r, splat(0.5f));
  sum = fused(sum, r, splat(1.0f));
  sum = fused(sum, r, splat(1.0f));
  return scale_by_power(sum, whole, n);
}

// The standard normal distribution's upper tail at |x|, |x| <= 1e18: erfc(|x| / sqrt 2) / 2.
// erfc(z) e^(z^2) as t * polynomial(t), t = 1 / (1 + 0.3 |x|), the form of Hastings (Approximations for Digital
// Computers, 1955). The coefficients are a relative-error fit of our own over |x| <= 14.5 (3.5e-9, by reweighted least
// squares against mpmath), so the tail keeps its digits until it underflows.
PAGEMILL_INLINE Vec normal_tail(Vec x) {
  constexpr float kCoefficients[10] = {
      0.119686693f,   0.119571812f, 0.110235468f,  0.0783894435f, 0.0961574391f,
      -0.0794246346f, 0.191785932f, -0.228214651f, 0.112436064f,  -0.0206235517f};
  Vec size = (Vec)((IntVec)x & 0x7fffffff);
  Vec t = 1.0f / fused(splat(0.3f), size, splat(1.0f));
  Vec sum = splat(kCoefficients[9]);
#pragma GCC unroll 9
  for (int i = 8; i >= 0; --i) sum = fused(sum, t, splat(kCoefficients[i]));
  Vec square = size * size;
  Vec lost = fused(size, size, -square);  // what rounding the square dropped (zero without a fused instruction)
  return exp(square * -0.5f) * fused(lost, splat(-0.5f), splat(1.0f)) * (sum * t);
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
