// A nucleus of few ids without the exact weights of the others. A sample of the row tells about where it ends, the ids
// above are taken out and weighed exactly, and the others count by an estimate of their sum. What that leaves open is
// between which two masses the one that top-p asks for lies; where both end with the same id, so does the nucleus.
#pragma once

#include "cpu/sampler_estimate.h"
#include "cpu/sampler_nucleus.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kFewIds = 12;          // one of so many: from there on exact weights of all are cheaper
constexpr float kShareBelow = 0.6f;      // of what the nucleus may leave out: what should lie below the guess
constexpr int64_t kLooksAlong = 10;      // of the search for the guess, which halves 30 temperatures

// Ids with a weight that each stands for: the maxima of blocks for themselves, a vector of every few blocks for others.
struct Sketch {
  const float *logits, *weights;
  int64_t num_maxima, end;  // elements; the maxima's vectors are filled up, then come the others
  float others;             // ids that each of the others stands for

  float weight_below(float logit) const {
    Vec sums[2] = {};
    for (int64_t i = 0; i < end; i += kLanes) {
      sums[i / kLanes % 2] += only(above(splat(logit), load(logits + i)), load(weights + i));
    }
    return sum_lanes(sums[0] + sums[1]);
  }
  float num_from(float logit) const {
    float num = 0;
    for (int64_t i = 0; i < end; i += kLanes) {
      num += float(count(at_least(load(logits + i), splat(logit)))) * (i < num_maxima ? 1.0f : others);
    }
    return num;
  }
};

// In row.work.
inline Sketch sketch(Row& row, const Scale& scale) {
  float *const logits = row.work.logit, *const weights = row.work.weight;
  const Vec rate = splat(rate_of(scale)), max = splat(row.max);
  int64_t end = 0, looked = 0;
  for (int64_t b = 0; b < row.blocks; ++b) logits[b] = row.block_max[b];
  for (int64_t i = 0; i < kLanes; ++i) logits[row.blocks + i] = -kInfinity;
  for (; end < row.blocks; end += kLanes) store(weights + end, power(load(logits + end) - max, rate));
  const int64_t num_maxima = end;
  const float others = float(kSampledBlocks * kBlock / kLanes);
  for (int64_t b = 0; (b + 1) * kBlock <= row.vocab; b += kSampledBlocks, ++looked, end += kLanes) {
    const Vec v = load(row.logits + b * kBlock + looked * kLanes % kBlock);
    store(logits + end, v);
    store(weights + end, only(above(splat(row.block_max[b]), v), power(v - max, rate) * others));
  }
  return {logits, weights, num_maxima, end, others};
}

// About where the nucleus ends, a little below; infinity where too many ids are in it.
inline float guess_floor(Row& row, const Scale& scale, float top_p) {
  const Sketch s = sketch(row, scale);
  const float left_out = (1 - top_p) * kShareBelow * s.weight_below(kInfinity);
  float low = row.max - 30 * scale.temperature, high = row.max;
  for (int64_t i = 0; i < kLooksAlong; ++i) {
    const float middle = low + (high - low) / 2;
    (s.weight_below(middle) <= left_out ? low : high) = middle;
  }
  return s.num_from(low) * kFewIds <= float(row.vocab) ? low : kInfinity;
}

// Fills candidates, with weights: the nucleus, in id order, and `last` of its ranking. False where the estimate leaves
// open where it ends, or it would be a large one.
inline bool keep_few(Row& row, const Scale& scale, float top_p, Rank& last) {
  const float floor = guess_floor(row, scale, top_p);
  if (floor == kInfinity) return false;
  const Estimate sums = estimate(row, scale);
  const int64_t least = int64_t(sums.total - sums.error), most = int64_t(sums.total + sums.error) + 1;
  const int64_t target = target_mass(top_p, most);
  Candidates& c = row.candidates;
  gather(row, floor);
  weigh(c, scale);
  if (total_weight(c) < target) {  // guessed too high
    gather(row, least_in_nucleus(row, scale, least, target));
    weigh(c, scale);
    if (total_weight(c) < target) return false;
  }
  last = last_of_prefix<SumWeights>(c, row.work, target);
  keep(c, last);
  return total_weight(c) - quantise(scale(splat(last.logit))[0]) < target_mass(top_p, least);
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
