// Vectors of float32 at the width of the ISA level being compiled.
//
// `vf` and `vi` are compiler vectors (GCC and Clang's vector_size), so + - * / & | << and comparisons are
// operators and a comparison yields all-ones lanes. Intrinsics appear only where no operator exists and only at
// levels above portable. Everything lives in the level's own namespace: an inline function shared between
// levels would be merged by the linker into whichever copy it met first, with that copy's instructions.
//
// The build passes -ffp-contract=off: a product and a sum are fused exactly where fma() is written.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef PAGEMILL_LEVEL
#error "compile with -DPAGEMILL_LEVEL=<level>"
#endif

#define PAGEMILL_INLINE inline __attribute__((always_inline))

namespace pagemill::PAGEMILL_LEVEL {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif
constexpr int kLanes = kVecBytes / 4;

typedef float vf __attribute__((vector_size(kVecBytes)));
typedef int32_t vi __attribute__((vector_size(kVecBytes)));
typedef uint32_t vu __attribute__((vector_size(kVecBytes)));

PAGEMILL_INLINE vf broadcast(float value) { return value - vf{}; }
PAGEMILL_INLINE vi broadcast_int(int32_t value) { return value - vi{}; }

PAGEMILL_INLINE vf load(const float* from) {
  vf v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
PAGEMILL_INLINE void store(float* to, vf v) { __builtin_memcpy(to, &v, sizeof v); }

// a * b + c, rounded once where the level has the instruction.
PAGEMILL_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
  return vf{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
            __builtin_fmaf(a[3], b[3], c[3])};
#else
  return a * b + c;
#endif
}

PAGEMILL_INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
PAGEMILL_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
PAGEMILL_INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
PAGEMILL_INLINE vf abs(vf a) { return (vf)((vi)a & broadcast_int(0x7fffffff)); }

// bfloat16 is the upper half of a float32.
PAGEMILL_INLINE float from_bf16(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

// Round to nearest even; a NaN becomes a quiet NaN of the same sign.
PAGEMILL_INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t quiet = (bits >> 16) | 0x40u;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// The same rounding, lane by lane; the 16 result bits are the lower half of each lane.
PAGEMILL_INLINE vu to_bf16_bits(vf value) {
  vu bits = (vu)value;
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vu quiet = (bits >> 16) | 0x40u;
  vu is_nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
  return (quiet & is_nan) | (rounded & ~is_nan);
}

typedef uint16_t vh __attribute__((vector_size(kVecBytes / 2)));

PAGEMILL_INLINE vf load(const uint16_t* from) {
  vh half;
  __builtin_memcpy(&half, from, sizeof half);
  return (vf)(__builtin_convertvector(half, vu) << 16);
}
PAGEMILL_INLINE void store(uint16_t* to, vf v) {
  vh half = __builtin_convertvector(to_bf16_bits(v), vh);
  __builtin_memcpy(to, &half, sizeof half);
}

// The first `count` lanes (1 <= count < kLanes); the others are `fill` (load) or left alone (store). The
// arithmetic between them is the full vector's, so an element's result does not depend on its position.
template <typename T>
PAGEMILL_INLINE vf load_part(const T* from, int64_t count, T fill = T(0)) {
  T lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? from[i] : fill;
  return load(lanes);
}
template <typename T>
PAGEMILL_INLINE void store_part(T* to, vf v, int64_t count) {
  T lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

}  // namespace pagemill::PAGEMILL_LEVEL
