// Sampling weights: probabilities as 40-bit integers, the same bits at every level and in engine/sampling/reference.py.
//
// A weight is round(2^40 e^d), d = (logit - max) / temperature. Integer sums are exact in any order, so a total, a
// partial sum and a running sum agree to the last bit wherever they are taken: filters and draw have one right answer.
// For the same reason the exponential is spelled out in single multiplications and additions, never fused.
#pragma once

#include "cpu/sampler_lanes.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kBlock = 128;        // ids that share one maximum and one sum
constexpr float kNegligible = -30.0f;  // 2^40 e^-30 rounds to zero
constexpr float kUnit = 0x1p40f;       // the weight of the most likely id

// 2^40 e^d for d <= 0, not yet rounded to a weight; d below kNegligible counts as that.
PAGEMILL_INLINE Vec weight_exp(Vec d) {
  constexpr float kRound = 12582912.0f + 40.0f;  // 1.5 * 2^23: adding it rounds to an integer; 40 for the unit
  d = larger(d, splat(kNegligible));
  const Vec shifted = d * 0x1.715476p+0f + kRound;
  const Vec whole = shifted - kRound;
  const Vec r = (d - whole * 0x1.63p-1f) - whole * -0x1.bd0106p-13f;
  Vec sum = r * 0x1.a01a02p-13f + 0x1.6c16c2p-10f;
  sum = sum * r + 0x1.111112p-7f;
  sum = sum * r + 0x1.555556p-5f;
  sum = sum * r + 0x1.555556p-3f;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return (Vec)((WordVec)sum + ((WordVec)shifted << 23));  // times 2^(n + 40), which moves the exponent alone
}

// Rounded to nearest even: adding 1.5 * 2^52 leaves the integer in the low bits of the double.
constexpr double kShift = 0x1.8p52;

PAGEMILL_INLINE int64_t quantise(float w) {
  const double shifted = double(w) + kShift, zero = kShift;
  int64_t bits, base;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  __builtin_memcpy(&base, &zero, sizeof base);
  return bits - base;
}

PAGEMILL_INLINE PartInt quantise(Vec w, int part) {
#if defined(__AVX512DQ__)
  const __m256 half = part == 0 ? _mm512_castps512_ps256((__m512)w) : _mm512_extractf32x8_ps((__m512)w, 1);
  return (PartInt)_mm512_cvtps_epi64(half);
#else
  const PartDouble base = PartDouble{} + kShift;
  return (PartInt)(widen(w, part) + kShift) - (PartInt)base;
#endif
}

// A sum of weights, lane by lane.
struct Mass {
  PartInt parts[2] = {};
  PAGEMILL_INLINE void add(Vec w) {
    parts[0] += quantise(w, 0);
    parts[1] += quantise(w, 1);
  }
  PAGEMILL_INLINE int64_t sum() const { return sum_lanes(parts[0] + parts[1]); }
};

// How one row turns logits into weights.
struct Scale {
  float max, temperature;
  float min_weight = 0;       // weights below (before rounding) count as zero
  float least = kNegligible;  // exponents up to this one give zero

  PAGEMILL_INLINE Vec operator()(Vec logits) const {
    const Vec w = weight_exp((logits - max) / temperature);
    return only(at_least(w, splat(min_weight)), w);
  }
  PAGEMILL_INLINE bool negligible(float logit) const { return (logit - max) / temperature <= least; }
};

// Exactly kBlock logits; a short block at the end of a row is copied and filled with -inf, which weighs nothing.
PAGEMILL_INLINE const float* whole_block(const float* logits, int64_t count, float* copy) {
  if (count >= kBlock) return logits;
  for (int64_t i = 0; i < kBlock; ++i) copy[i] = i < count ? logits[i] : -__builtin_inff();
  return copy;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
