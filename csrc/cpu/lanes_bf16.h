// What levels with bfloat16 instructions add to lanes.h: the dot product of pairs, and rounding. PAGEMILL_BF16_DOT says
// whether the level being compiled has them.
//
// The two instructions round the products and sums inside a dot product differently (x86 to nearest, Arm to odd), so
// levels differ in last bits, as they do anyway.
#pragma once

#include "cpu/lanes_io.h"

#if defined(__AVX512BF16__) || (defined(PAGEMILL_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define PAGEMILL_BF16_DOT

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// sum + a.even * b.even + a.odd * b.odd in every lane; the pairs are bfloat16, the even one in the lower half.
PAGEMILL_INLINE Vec dot_pairs(Vec sum, IntVec a, IntVec b) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  return (Vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}

// Rounded to nearest even.
PAGEMILL_INLINE HalfVec narrow(Vec v) {
#if defined(__AVX512BF16__)
  return (HalfVec)_mm512_cvtneps_pbh((__m512)v);
#else
  return (HalfVec)vcvt_bf16_f32((float32x4_t)v);
#endif
}

// Two vectors rounded, one behind the other.
PAGEMILL_INLINE void store_narrow(char* to, Vec low, Vec high) {
#if defined(__AVX512BF16__)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  __builtin_memcpy(to, &both, sizeof both);
#else
  const HalfVec halves[2] = {narrow(low), narrow(high)};
  __builtin_memcpy(to, halves, sizeof halves);
#endif
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
#endif
