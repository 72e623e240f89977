// What the sampler adds to the vectors of lanes.h: lanes chosen by a comparison, closed up or set to zero, and the two
// halves of a vector in double width.
#pragma once

#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

typedef float PartFloat __attribute__((vector_size(kLanes * 2)));
typedef double PartDouble __attribute__((vector_size(kLanes * 4)));
typedef int64_t PartInt __attribute__((vector_size(kLanes * 4)));

PAGEMILL_INLINE PartDouble widen(Vec v, int part) {
#if defined(__AVX512F__)
  const __m512d bits = (__m512d)v;
  const __m256d half = part == 0 ? _mm512_castpd512_pd256(bits) : _mm512_extractf64x4_pd(bits, 1);
  return (PartDouble)_mm512_cvtps_pd((__m256)half);
#else
  PartFloat halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  return __builtin_convertvector(halves[part], PartDouble);
#endif
}

PAGEMILL_INLINE float largest(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return max_lanes(v);
#endif
}

PAGEMILL_INLINE int64_t sum_lanes(PartInt v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi64((__m512i)v);
#else
  int64_t total = 0;
  for (int64_t i = 0; i < kLanes / 2; ++i) total += v[i];
  return total;
#endif
}

PAGEMILL_INLINE IntVec lane_numbers() {
  IntVec numbers;
  for (int64_t i = 0; i < kLanes; ++i) numbers[i] = int32_t(i);
  return numbers;
}

// A set of lanes. A comparison with NaN is false.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
PAGEMILL_INLINE Mask above(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }
PAGEMILL_INLINE Mask at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
PAGEMILL_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
PAGEMILL_INLINE Mask is_nan(Vec a, Vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q); }  // either
PAGEMILL_INLINE Mask at_most(IntVec a, int32_t b) { return _mm512_cmple_epi32_mask((__m512i)a, _mm512_set1_epi32(b)); }
PAGEMILL_INLINE bool any(Mask chosen) { return chosen != 0; }
PAGEMILL_INLINE int64_t count(Mask chosen) { return __builtin_popcount(chosen); }
PAGEMILL_INLINE Vec only(Mask chosen, Vec v) { return (Vec)_mm512_maskz_mov_ps(chosen, (__m512)v); }
PAGEMILL_INLINE Vec choose(Mask chosen, Vec a, Vec b) { return (Vec)_mm512_mask_mov_ps((__m512)b, chosen, (__m512)a); }
#else
typedef IntVec Mask;
PAGEMILL_INLINE Mask above(Vec a, Vec b) { return a > b; }
PAGEMILL_INLINE Mask at_least(Vec a, Vec b) { return a >= b; }
PAGEMILL_INLINE Mask equal(Vec a, Vec b) { return a == b; }
PAGEMILL_INLINE Mask is_nan(Vec a, Vec b) { return (a != a) | (b != b); }
PAGEMILL_INLINE Mask at_most(IntVec a, int32_t b) { return a <= b; }
PAGEMILL_INLINE int64_t count(Mask chosen) {
  int32_t sum = 0;
  for (int64_t i = 0; i < kLanes; ++i) sum -= chosen[i];
  return sum;
}
PAGEMILL_INLINE bool any(Mask chosen) {
#if defined(__AVX2__)
  return _mm256_movemask_ps((__m256)chosen) != 0;
#else
  return count(chosen) != 0;
#endif
}
PAGEMILL_INLINE Vec only(Mask chosen, Vec v) { return (Vec)((IntVec)v & chosen); }
PAGEMILL_INLINE Vec choose(Mask chosen, Vec a, Vec b) { return (Vec)(((IntVec)a & chosen) | ((IntVec)b & ~chosen)); }
#endif

// Candidates in ascending id order, as parallel arrays with room for kLanes more than are ever in them.
struct Candidates {
  float* logit;
  float* weight;  // before rounding
  int32_t* id;
  int64_t count;

  // Appends the chosen lanes. What this list itself holds from the place of these lanes on is left alone, so that a
  // list may be thinned out in place.
  PAGEMILL_INLINE void append(Vec logits, Vec weights, IntVec ids, Mask chosen) {
#if defined(__AVX512F__)  // closed up in a register: to memory at once is slow on some processors
    _mm512_storeu_ps(logit + count, _mm512_maskz_compress_ps(chosen, (__m512)logits));
    _mm512_storeu_ps(weight + count, _mm512_maskz_compress_ps(chosen, (__m512)weights));
    _mm512_storeu_si512(id + count, _mm512_maskz_compress_epi32(chosen, (__m512i)ids));
    count += __builtin_popcount(chosen);
#else
    if (!any(chosen)) return;
    for (int64_t i = 0; i < kLanes; ++i) {  // no branch: what is not chosen is overwritten by the next
      logit[count] = logits[i];
      weight[count] = weights[i];
      id[count] = ids[i];
      count += chosen[i] & 1;
    }
#endif
  }

  // So that whole vectors may be read: no comparison chooses what lies behind the end.
  void close() {
    for (int64_t i = 0; i < kLanes; ++i) {
      logit[count + i] = __builtin_nanf("");
      weight[count + i] = 0;
      id[count + i] = 0;
    }
  }
};

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
