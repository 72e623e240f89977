// What attention needs beyond lanes.h: a power of two for arguments that are never positive, tanh, a quicker maximum.
#pragma once

#include "cpu/lanes.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// What an exponent of two is cut into: f in [-1/2, 1/2], and the whole rest of it, outside AVX-512 in the low bits.
struct Exponent {
  Vec f, whole;
};

inline Exponent cut_exponent(Vec x) {
#if defined(__AVX512F__)
  const Vec whole = _mm512_roundscale_ps(x, 0);
  return {x - whole, whole};
#else
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
  const Vec shifted = x + magic;
  return {x - (shifted - magic), shifted};
#endif
}

// p * 2^whole; 0 for x = -inf, though f and p are NaN then, and outside AVX-512 for all x below -125.
inline Vec scale_by(Vec p, Vec whole, Vec x) {
#if defined(__AVX512F__)
  (void)x;
  return _mm512_scalef_ps(p, whole);  // Intel SDM, table of VSCALEFPS
#else
  const Vec scaled = (Vec)((IntVec)p + ((IntVec)whole << 23));
  return (Vec)((IntVec)scaled & ~(IntVec)(x < splat(-125.0f)));
#endif
}

// 2^x for x <= 0: NaN for NaN, 0 for -inf. The polynomial of degree 5 is our own fit to 2^f on [-1/2, 1/2] (relative
// error 9e-8).
inline Vec exp2_nonpositive(Vec x) {
  const Exponent e = cut_exponent(x);
  Vec p = fused(splat(0x1.5bba14p-10f), e.f, splat(0x1.3cea88p-7f));
  p = fused(p, e.f, splat(0x1.c6b752p-5f));
  p = fused(p, e.f, splat(0x1.ebf9bcp-3f));
  p = fused(p, e.f, splat(0x1.62e42ap-1f));
  return scale_by(fused(p, e.f, splat(1.0f)), e.whole, x);
}

// The same where keys and values are bfloat16: of degree 4, relative error 2.9e-6, a thousandth of bfloat16's rounding.
inline Vec exp2_roughly(Vec x) {
  const Exponent e = cut_exponent(x);
  Vec p = fused(splat(0x1.3a02b8p-7f), e.f, splat(0x1.c9fc46p-5f));
  p = fused(p, e.f, splat(0x1.ec0378p-3f));
  p = fused(p, e.f, splat(0x1.62e12cp-1f));
  return scale_by(fused(p, e.f, splat(1.0f)), e.whole, x);
}

// The largest lane, none of which may be NaN.
inline float largest_lane(Vec v) {
#if defined(__AVX2__)
  __m256 half[kLanes / 8];
  __builtin_memcpy(half, &v, sizeof v);
  const __m256 eight = _mm256_max_ps(half[0], half[kLanes / 8 - 1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return two[0] > two[1] ? two[0] : two[1];
#elif defined(PAGEMILL_NEON)
  return vmaxvq_f32((float32x4_t)v);
#else
  return max_lanes(v);
#endif
}

// tanh within 2e-7 of itself: its Taylor series to x^11 below 1/2, where the quotient of exponentials would cancel.
inline Vec tanh(Vec x) {
  const Vec size = (Vec)((IntVec)x & 0x7fffffff);
  const Vec e = exp2_nonpositive(size * -2.8853900817779268f);  // exp(-2 |x|)
  const Vec far = (1.0f - e) / (1.0f + e);
  const Vec square = size * size;
  Vec p = fused(splat(-1382.0f / 155925), square, splat(62.0f / 2835));
  p = fused(p, square, splat(-17.0f / 315));
  p = fused(p, square, splat(2.0f / 15));
  p = fused(p, square, splat(-1.0f / 3));
  const Vec near = fused(p * square, size, size);
  const IntVec small = size < 0.5f;
  const IntVec result = ((IntVec)near & small) | ((IntVec)far & ~small);
  return (Vec)(result | ((IntVec)x & INT32_MIN));
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
