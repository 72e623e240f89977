// Vectors of float32 at the width of the level being compiled, over the compilers' own vector types (gcc and clang),
// so that +, *, comparisons and blends are plain C++. Intrinsics appear only where a level has an instruction that
// the language cannot name.
//
// Everything sits in the level's namespace; see kernels.h for why.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(PAGEMILL_NEON)
#include <arm_neon.h>
#endif

namespace pagemill::PAGEMILL_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* from) {
  Vec v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline IntVec load_words(const int32_t* from) {
  IntVec v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vec v) { __builtin_memcpy(to, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }

// a * b + c, with one rounding where the level has the instruction and two where it has not.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(PAGEMILL_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
  Vec r;
  for (int64_t i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}

// The larger lane by lane; b where either is NaN.
inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  const IntVec mask = a > b;
  return (Vec)(((IntVec)a & mask) | ((IntVec)b & ~mask));
#endif
}

// The smaller likewise.
inline Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  const IntVec mask = a < b;
  return (Vec)(((IntVec)a & mask) | ((IntVec)b & ~mask));
#endif
}

// The lanes folded in halves: one fixed order.
inline float sum_lanes(Vec v) {
#if defined(__AVX2__)
  __m256 half[kLanes / 8];
  __builtin_memcpy(half, &v, sizeof v);
  const __m256 eight = kLanes == 8 ? half[0] : half[0] + half[kLanes / 8 - 1];
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#elif defined(PAGEMILL_NEON)
  const float32x2_t two = vadd_f32(vget_low_f32((float32x4_t)v), vget_high_f32((float32x4_t)v));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
#else
  float lane[kLanes];
  store(lane, v);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
#endif
}

inline float max_lanes(Vec v) {
  float best = v[0];
  for (int64_t i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

inline float bf16_to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  __builtin_memcpy(&x, &word, sizeof x);
  return x;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  uint32_t word;
  __builtin_memcpy(&word, &x, sizeof word);
  if (x != x) return static_cast<uint16_t>((word >> 16) | 0x40);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
