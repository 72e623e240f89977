// Sums of a row's weights from exponentials of a third of the price, and a bound on how far off they are.
//
// An estimate decides nothing. It says between which bounds an exact sum lies; where all that lies between leads to one
// id, that is the id of docs/randomness.md, and where it does not the exact sums are taken after all.
#pragma once

#include "cpu/sampler_row.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// 2^(a rate) for a <= 0, to about 2^-126 and zero from there on. Polynomials of our own (the least relative error by
// reweighted least squares, 7.5e-8), with their rounding within 2.5e-7 of 2^f for the f they are given.
#if defined(__AVX512DQ__)
PAGEMILL_INLINE Vec power(Vec a, Vec rate) {
  const __m512 t = (__m512)(a * rate);
  const Vec f = (Vec)_mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // [0, 1]
  Vec sum = fused(splat(0x1.ec320ap-10f), f, splat(0x1.26900ep-7f));
  sum = fused(sum, f, splat(0x1.c95446p-5f));
  sum = fused(sum, f, splat(0x1.ebd5a8p-3f));
  sum = fused(sum, f, splat(0x1.62e4f6p-1f));
  sum = fused(sum, f, splat(0x1.fffffep-1f));
  return (Vec)_mm512_scalef_ps((__m512)sum, t);  // times 2^floor(t)
}
#else
PAGEMILL_INLINE Vec power(Vec a, Vec rate) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  a = larger(a, splat(-125.0f) / rate);
  const Vec shifted = fused(a, rate, splat(kRound));
  const Vec f = fused(a, rate, kRound - shifted);  // [-1/2, 1/2]
  Vec sum = fused(splat(0x1.5c08e4p-10f), f, splat(0x1.3d0c52p-7f));
  sum = fused(sum, f, splat(0x1.c6b6e4p-5f));
  sum = fused(sum, f, splat(0x1.ebf918p-3f));
  sum = fused(sum, f, splat(0x1.62e428p-1f));
  sum = fused(sum, f, splat(0x1.000002p+0f));
  return (Vec)((WordVec)sum + ((WordVec)shifted << 23));
}
#endif

// In weights: 2^40 for the most likely id. The exact sum of the row, and that of any blocks from its start on, lies
// within `error` of the estimate.
struct Estimate {
  double total, error;
};

// What the bounds hold for. Beyond, a quotient or its exponential may leave the range of float32's relative errors.
inline bool can_estimate(float temperature) { return temperature > 0x1p-10f && temperature < 0x1p10f; }

inline float rate_of(const Scale& scale) { return float(1.4426950408889634 / double(scale.temperature)); }

// The bound, for a sum of `total` times the largest weight. Relative to its weight an id is off by
//   3 roundings of |d|, in the definition's quotient, in the rate and in their product (the f of a level that does
//     fused products is rounded instead): 3 * 2^-24 |d|,
//   exp32's own error 2e-7, the polynomial's 2.5e-7 and the rounding of f 2e-8: 5e-7,
//   every addition that its term goes through: 2^-24 each,
// and by half a weight, to which the definition rounds. As x ln x is convex, the sum of e^d |d| over n ids is at most
// s ln(n / s) if the sum of e^d is s. What float64 rounds is in the last hundredth.
inline double error_of(double total, int64_t vocab) {
  constexpr double kRounding = 0x1p-24, kAdditions = double(kBlock / kLanes / 2 + 1 + 4);
  const double depth = __builtin_log(double(vocab) / total);
  const double relative = 5e-7 + kRounding * (kAdditions + 3 * (depth > 0 ? depth : 0) + 0.1);
  return 1.01 * (relative * total * double(kUnit) + 0.5 * double(vocab));
}

// Fills running_sums, estimates of all blocks up to each one.
inline Estimate estimate(Row& row, const Scale& scale) {
  const Vec rate = splat(rate_of(scale)), max = splat(row.max);
  const float nothing = -31.0f * scale.temperature;  // below, the definition has zeros
  float copy[kBlock];
  double total = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    row.fetch_next(b);
    if (row.block_max[b] - row.max > nothing) {
      const float* block = row.block(b, copy);
      Vec sums[2] = {};
      for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
        for (int half = 0; half < 2; ++half) sums[half] += power(load(block + i + half * kLanes) - max, rate);
      }
      total += double(sum_lanes(sums[0] + sums[1]));
    }
    row.running_sums[b] = total * kUnit;
  }
  return {total * kUnit, error_of(total, row.vocab)};
}

// The id at bits / 2^53 of the whole row's weights, or -1 where the estimate leaves a choice. The exact weights of the
// block where the place lies say how far it is from the next id's. An error in the sum before a block and one in the sum
// after it move the place within the block in opposite directions, by at most the larger of the two.
inline int64_t draw_from_estimate(const Row& row, const Scale& scale, const Estimate& sums, uint64_t bits) {
  const double place = double(bits) * 0x1p-53 * sums.total;
  int64_t b = 0;
  for (int64_t end = row.blocks - 1; b < end;) {
    const int64_t middle = (b + end) / 2;
    if (row.running_sums[middle] > place) {
      end = middle;
    } else {
      b = middle + 1;
    }
  }
  const double left = place - (b > 0 ? row.running_sums[b - 1] : 0.0);
  const double least = left - sums.error, most = left + sums.error;
  if (!(least >= 0)) return -1;
  float copy[kBlock], weights[kBlock];
  const float* block = row.block(b, copy);
  for (int64_t i = 0; i < kBlock; i += kLanes) store(weights + i, scale(load(block + i)));
  double sum = 0;  // exact: integers below 2^53
  for (int64_t i = 0; i < kBlock; ++i) {
    sum += double(quantise(weights[i]));
    if (sum > least) return sum > most ? b * kBlock + i : -1;
  }
  return -1;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
