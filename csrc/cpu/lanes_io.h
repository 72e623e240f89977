// What the kernels for whole layers add to lanes.h: bfloat16 in and out, partial vectors, an unsigned vector.
#pragma once

#include "cpu/lanes.h"

#define PAGEMILL_INLINE inline __attribute__((always_inline))

namespace pagemill::PAGEMILL_LEVEL {
namespace {

typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

// Rounded to nearest even into the lower half of each lane; a NaN becomes a quiet NaN of the same sign.
PAGEMILL_INLINE WordVec to_bf16_bits(Vec value) {
  WordVec bits = (WordVec)value;
  WordVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  WordVec quiet = (bits >> 16) | 0x40u;
  WordVec is_nan = (WordVec)((bits & 0x7fffffffu) > 0x7f800000u);
  return (quiet & is_nan) | (rounded & ~is_nan);
}

// The same, packed. Where there is an instruction: it makes subnormal numbers zero, so these, which are rare, go the
// long way.
PAGEMILL_INLINE HalfVec to_bf16(Vec value) {
#if defined(__AVX512BF16__)
  constexpr int kSubnormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(value, kSubnormal) == 0, 1)) return (HalfVec)_mm512_cvtneps_pbh(value);
#endif
  return __builtin_convertvector(to_bf16_bits(value), HalfVec);
}

PAGEMILL_INLINE Vec from_bf16(HalfVec half) {
#if defined(__AVX512F__)
  return (Vec)((WordVec)_mm512_cvtepu16_epi32((__m256i)half) << 16);  // gcc 12 makes two halves of the conversion
#else
  return (Vec)(__builtin_convertvector(half, WordVec) << 16);
#endif
}

PAGEMILL_INLINE Vec load(const uint16_t* from) {
  HalfVec half;
  __builtin_memcpy(&half, from, sizeof half);
  return from_bf16(half);
}
PAGEMILL_INLINE void store(uint16_t* to, Vec v) {
  const HalfVec half = to_bf16(v);
  __builtin_memcpy(to, &half, sizeof half);
}

// v as the element type of the pointer would hold it.
PAGEMILL_INLINE Vec round_to(Vec v, const float*) { return v; }
#if defined(__AVX512BF16__)
PAGEMILL_INLINE Vec round_to(Vec v, const uint16_t*) { return from_bf16(to_bf16(v)); }
#else
PAGEMILL_INLINE Vec round_to(Vec v, const uint16_t*) { return (Vec)(to_bf16_bits(v) << 16); }
#endif

// The first `count` lanes (count >= 1); lanes past them are zero (load) or left alone (store). Arithmetic in between is
// the full vector's, so that an element's result does not depend on its position.
template <typename T>
PAGEMILL_INLINE Vec load_up_to(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
  return load(lanes);
}
template <typename T>
PAGEMILL_INLINE void store_up_to(T* to, Vec v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  T lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
