// Sampling weights: probabilities as 40-bit integers, the same bits at every level and in engine/sampling/reference.py.
//
// A weight is round(2^40 e^d), d = (logit - max) / temperature. Integer sums are exact in any order, so a total, a
// histogram and a running sum agree to the last bit wherever they are taken: filters and draw have one right answer.
// For the same reason the exponential is spelled out in single multiplications and additions, never fused.
#pragma once

#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kBlock = 128;       // ids that share one maximum and one sum
constexpr float kNegligible = -30.0f;  // 2^40 e^-30 rounds to zero

typedef float PartFloat __attribute__((vector_size(kLanes * 2)));
typedef double PartDouble __attribute__((vector_size(kLanes * 4)));
typedef int64_t PartInt __attribute__((vector_size(kLanes * 4)));

PAGEMILL_INLINE PartDouble widen(Vec v, int part) {
  PartFloat halves[2];
  __builtin_memcpy(halves, &v, sizeof v);
  return __builtin_convertvector(halves[part], PartDouble);
}

// e^d for d <= 0, zero below kNegligible's neighbourhood only after rounding to a weight.
PAGEMILL_INLINE Vec weight_exp(Vec d) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  d = larger(d, splat(kNegligible));
  const Vec shifted = d * 0x1.715476p+0f + kRound;
  const Vec whole = shifted - kRound;
  const IntVec n = (IntVec)shifted - (IntVec)splat(kRound);
  const Vec r = (d - whole * 0x1.63p-1f) - whole * -0x1.bd0106p-13f;
  Vec sum = r * 0x1.a01a02p-13f + 0x1.6c16c2p-10f;
  sum = sum * r + 0x1.111112p-7f;
  sum = sum * r + 0x1.555556p-5f;
  sum = sum * r + 0x1.555556p-3f;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return sum * (Vec)((n + 127) << 23);
}

// Rounded to nearest even: adding 1.5 * 2^52 leaves the integer in the low bits of the double.
constexpr double kShift = 0x1.8p52, kUnit = 0x1p40;

PAGEMILL_INLINE int64_t quantise(float w) {
  const double shifted = double(w) * kUnit + kShift, zero = kShift;
  int64_t bits, base;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  __builtin_memcpy(&base, &zero, sizeof base);
  return bits - base;
}

PAGEMILL_INLINE PartInt quantise(Vec w, int part) {
  const PartDouble base = PartDouble{} + kShift;
  return (PartInt)(widen(w, part) * kUnit + kShift) - (PartInt)base;
}

// How one row turns logits into weights.
struct Scale {
  float max, temperature, min_weight;  // weights below min_weight (float32, before rounding) count as zero

  PAGEMILL_INLINE Vec operator()(Vec logits) const {
    const Vec w = weight_exp((logits - max) / temperature);
    return w >= min_weight ? w : Vec{};
  }
  PAGEMILL_INLINE bool negligible(float logit) const { return (logit - max) / temperature <= kNegligible; }
};

// Exactly kBlock logits; a short block at the end of a row is copied and filled with -inf, which weighs nothing.
PAGEMILL_INLINE const float* whole_block(const float* logits, int64_t count, float* copy) {
  if (count >= kBlock) return logits;
  for (int64_t i = 0; i < kBlock; ++i) copy[i] = i < count ? logits[i] : -__builtin_inff();
  return copy;
}

inline int64_t block_sum(const float* block, const Scale& scale) {
  PartInt sums[2] = {};
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Vec w = scale(load(block + i));
    sums[0] += quantise(w, 0);
    sums[1] += quantise(w, 1);
  }
  const PartInt sum = sums[0] + sums[1];
  int64_t total = 0;
  for (int64_t i = 0; i < kLanes / 2; ++i) total += sum[i];
  return total;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
