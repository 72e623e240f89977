// The weights of a whole row, and where its top-p nucleus ends. Of a flat distribution that is somewhere among
// thousands of ids of nearly the same weight: a sample of the row tells about where, one pass takes out the few that
// lie near, and only those are compared with each other. The sample never decides: it is checked, and gone without if
// it misled.
#pragma once

#include "cpu/sampler_row.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kSampledBlocks = 4;   // a vector of every fourth block
constexpr int64_t kManyNear = 6000;     // candidates for which a sample is worth it

// Fills block_sums, and weights where their sum is not zero; the total.
template <bool STORE>
int64_t weigh_blocks(Row& row, const Scale scale) {  // by value: no store changes it
  float copy[kBlock];
  float* const weights = row.weights;
  int64_t total = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    row.fetch_next(b);
    row.block_sums[b] = 0;
    if (scale.negligible(row.block_max[b])) continue;
    const float* block = row.block(b, copy);
    Mass mass;
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec w = scale(load(block + i));
      if (STORE) store(weights + b * kBlock + i, w);
      mass.add(w);
    }
    row.block_sums[b] = mass.sum();
    total += row.block_sums[b];
  }
  return total;
}

// The mass that top-p asks for, in [1, total].
inline int64_t target_mass(float top_p, int64_t total) {
  const int64_t target = int64_t(__builtin_ceil(double(top_p) * double(total)));
  return target < 1 ? 1 : target > total ? total : target;
}

// Ids with smaller logits have an exponent below this one. The margins cover what float32 rounds.
inline float logit_below(const Row& row, const Scale& scale, double exponent) {
  const double max = double(row.max);
  const double logit = max + double(scale.temperature) * (exponent - 0.02) - 1e-6 * __builtin_fabs(max);
  return logit < -double(__FLT_MAX__) ? -__FLT_MAX__ : float(logit);
}

// Above `high` all ids are in the nucleus, below `low` none is.
struct Bracket {
  float low, high;
};

// Ids below are not in the nucleus: at most `vocab` of weight below (total - target) / (2 vocab) each, they hold less
// than what the nucleus may leave out.
inline float least_in_nucleus(const Row& row, const Scale& scale, int64_t total, int64_t target) {
  const double cut = double(total - target) / (2.0 * double(row.vocab)) / kUnit;
  return cut > 0 ? logit_below(row, scale, __builtin_log(cut)) : -__FLT_MAX__;
}

// Fills work with a vector of every few blocks; the number of ids looked at.
inline int64_t take_sample(Row& row) {
  Candidates& c = row.work;
  c.count = 0;
  int64_t looked = 0;
  for (int64_t b = 0; (b + 1) * kBlock <= row.vocab; b += kSampledBlocks, looked += kLanes) {
    if (row.block_sums[b] == 0) continue;
    const int64_t at = b * kBlock + b / kSampledBlocks * kLanes % kBlock;
    const Vec v = load(row.logits + at);
    c.append(v, load(row.weights + at), row.ids(at), equal(v, v));
  }
  c.close();
  return looked;
}

// A narrower bracket that holds the nucleus' end unless chance is against it.
inline Bracket narrowed(Row& row, Bracket bracket, int64_t total, int64_t target) {
  const int64_t looked = take_sample(row);
  const Candidates sample = row.work;
  int64_t near = 0;
  for (int64_t i = 0; i < sample.count; i += kLanes) near += count(at_least(load(sample.logit + i), splat(bracket.low)));
  const double part = double(looked) / double(row.vocab);
  if (double(near) < part * kManyNear) return bracket;
  const double seen = double(total_weight(sample)), left_out = double(total - target) * part;
  auto end_at = [&](double mass_left_out) {
    return last_of_prefix<SumWeights>(sample, row.candidates, int64_t(seen - mass_left_out));
  };
  if (left_out < 1 || left_out >= seen) return bracket;
  const Rank guess = end_at(left_out);
  int64_t behind = 0;
  for (int64_t i = 0; i < sample.count; i += kLanes) behind += count(above(splat(guess.logit), load(sample.logit + i)));
  const double error = 2.5 / __builtin_sqrt(double(behind) + 1);
  if (error < 1) {
    const float low = end_at(left_out * (1 - error)).logit;
    bracket.low = low > bracket.low ? low : bracket.low;
  }
  if (left_out * (1 + error) < seen) bracket.high = end_at(left_out * (1 + error)).logit;
  return bracket;
}

// Fills candidates with the ids in the bracket, and block_sums with the weights above it; the sum of these.
inline int64_t take_out(Row& row, const Bracket& bracket) {
  Candidates& c = row.candidates;
  float copy[kBlock];
  int64_t total = 0;
  c.count = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    const bool weighed = row.block_sums[b] != 0;
    row.block_sums[b] = 0;
    if (!weighed || row.block_max[b] < bracket.low) continue;
    const float* block = row.block(b, copy);
    const bool some_above = row.block_max[b] > bracket.high;
    Mass mass;
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec v = load(block + i), w = load(row.weights + b * kBlock + i);
      const Mask higher = above(v, splat(bracket.high));
      if (some_above) mass.add(only(higher, w));
      c.append(v, w, row.ids(b * kBlock + i), (Mask)(at_least(v, splat(bracket.low)) & ~higher));
    }
    if (some_above) row.block_sums[b] = mass.sum();
    total += row.block_sums[b];
  }
  c.close();
  return total;
}

// The last id of the nucleus; block_sums become the weights in it.
inline Rank keep_top_p(Row& row, const Scale& whole, float top_p) {
  const int64_t total = weigh_blocks<true>(row, whole), target = target_mass(top_p, total);
  const Bracket widest{least_in_nucleus(row, whole, total, target), kInfinity};
  int64_t missing = target - take_out(row, narrowed(row, widest, total, target));
  if (missing < 1 || missing > total_weight(row.candidates)) {
    weigh_blocks<true>(row, whole);
    missing = target - take_out(row, widest);
  }
  const Candidates& c = row.candidates;
  const Rank last = last_of_prefix<SumWeights>(c, row.work, missing);
  for (int64_t i = 0; i < c.count; ++i) {
    if (last.includes(c.logit[i], c.id[i])) row.block_sums[c.id[i] / kBlock] += quantise(c.weight[i]);
  }
  return last;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
