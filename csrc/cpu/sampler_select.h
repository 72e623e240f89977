// Top-k and top-p without a sort: the shortest prefix of the ranking (logit descending, then id ascending) that
// reaches a target, found by a histogram over the logits' range that is refined inside the bin where the target falls.
#pragma once

#include "cpu/sampler_weights.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int kBins = 1024;
constexpr int64_t kFewEnough = 48;  // candidates left: rank them one by one

// Candidates in ascending id order, as parallel arrays.
struct Candidates {
  float* logit;
  float* weight;
  int32_t* id;
  int64_t count;
};

struct Rank {
  float logit;
  int32_t id;
  bool includes(float other_logit, int32_t other_id) const {
    return (other_logit > logit) | ((other_logit == logit) & (other_id <= id));
  }
};

// What a candidate adds towards the target.
struct CountOne {
  int64_t operator()(const Candidates&, int64_t) const { return 1; }
};
struct CountWeight {
  int64_t operator()(const Candidates& c, int64_t i) const { return quantise(c.weight[i]); }
};

// Appends candidate i of `from` if `wanted`. Without a branch, which would be mispredicted: it is always written, and
// the next one overwrites it. So `to` may be `from` itself, or has room for one more.
PAGEMILL_INLINE void append_if(Candidates& to, const Candidates& from, int64_t i, bool wanted) {
  to.logit[to.count] = from.logit[i];
  to.weight[to.count] = from.weight[i];
  to.id[to.count] = from.id[i];
  to.count += wanted;
}

inline void swap(Candidates& c, int64_t i, int64_t j) {
  const float logit = c.logit[i], weight = c.weight[i];
  const int32_t id = c.id[i];
  c.logit[i] = c.logit[j], c.weight[i] = c.weight[j], c.id[i] = c.id[j];
  c.logit[j] = logit, c.weight[j] = weight, c.id[j] = id;
}

inline bool before(const Candidates& c, int64_t i, int64_t j) {
  return c.logit[i] > c.logit[j] || (c.logit[i] == c.logit[j] && c.id[i] < c.id[j]);
}

// Heap sort into ranking order: no recursion, no worst case, and no library code in a kernel file.
inline void rank_all(Candidates& c) {
  auto sink = [&](int64_t at, int64_t end) {
    for (int64_t child = 2 * at + 1; child < end; at = child, child = 2 * at + 1) {
      if (child + 1 < end && before(c, child, child + 1)) ++child;
      if (!before(c, at, child)) return;
      swap(c, at, child);
    }
  };
  for (int64_t i = c.count / 2 - 1; i >= 0; --i) sink(i, c.count);
  for (int64_t end = c.count - 1; end > 0; --end) {
    swap(c, 0, end);
    sink(0, end);
  }
}

struct Bins {
  float top, scale;
  bool usable, equal;
  explicit Bins(const Candidates& c) {
    Vec highs = splat(c.logit[0]), negated_lows = -highs;
    int64_t i = 0;
    for (; i + kLanes <= c.count; i += kLanes) {
      highs = larger(load(c.logit + i), highs);
      negated_lows = larger(-load(c.logit + i), negated_lows);
    }
    for (; i < c.count; ++i) {
      highs = larger(splat(c.logit[i]), highs);
      negated_lows = larger(splat(-c.logit[i]), negated_lows);
    }
    const float high = max_lanes(highs), low = -max_lanes(negated_lows);
    top = high;
    scale = float(kBins - 1) / (high - low);
    equal = high == low;
    usable = scale > 0 && scale < 1e30f;  // not when all are equal, nor when the range overflows
  }
  int operator()(float logit) const {  // monotone, as every rounding in it is
    const float position = (top - logit) * scale;
    return position < float(kBins - 1) ? int(position) : kBins - 1;
  }
};

// The last member of the shortest prefix whose amounts reach `target` (at most the total). `work` has room for all
// of `from`; `from` is not changed.
template <class Amount>
Rank last_of_prefix(const Candidates& from, Candidates work, int64_t target, Amount amount) {
  Candidates active = from;
  bool ranked = false;
  for (;;) {
    const Bins bins(active);
    ranked = bins.equal;  // then the ids, already in order, decide
    if (active.count <= kFewEnough || !bins.usable) break;
    int64_t sums[kBins] = {};
    for (int64_t i = 0; i < active.count; ++i) sums[bins(active.logit[i])] += amount(active, i);
    int chosen = 0;
    while (chosen < kBins - 1 && sums[chosen] < target) target -= sums[chosen++];
    const int64_t before_count = active.count;
    work.count = 0;
    for (int64_t i = 0; i < before_count; ++i) append_if(work, active, i, bins(active.logit[i]) == chosen);
    active = work;
  }
  if (active.logit != work.logit) {
    work.count = 0;
    for (int64_t i = 0; i < active.count; ++i) append_if(work, active, i, true);
  }
  if (!ranked) rank_all(work);
  int64_t last = 0;
  for (int64_t sum = amount(work, 0); sum < target && last + 1 < work.count;) sum += amount(work, ++last);
  return {work.logit[last], work.id[last]};
}

inline void keep(Candidates& c, const Rank& last) {
  const int64_t count = c.count;
  c.count = 0;
  for (int64_t i = 0; i < count; ++i) append_if(c, c, i, last.includes(c.logit[i], c.id[i]));
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
