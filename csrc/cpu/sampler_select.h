// Top-k and top-p without a sort: the shortest prefix of the ranking (logit descending, then id ascending) that
// reaches a target. Candidates are split at one of their logits, and the part where the target falls is split again.
#pragma once

#include "cpu/sampler_weights.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kFewEnough = 48;  // candidates left: rank them one by one

struct Rank {
  float logit;
  int32_t id;
  PAGEMILL_INLINE Mask includes(Vec logits, IntVec ids) const {
    return (Mask)(above(logits, splat(logit)) | (equal(logits, splat(logit)) & at_most(ids, id)));
  }
  bool includes(float other_logit, int32_t other_id) const {
    return (other_logit > logit) | ((other_logit == logit) & (other_id <= id));
  }
};

// What candidates add towards the target: one each, or their weights.
struct CountOnes {
  int64_t num = 0;
  PAGEMILL_INLINE void add(Vec, Mask chosen) { num += count(chosen); }
  int64_t sum() const { return num; }
  static int64_t of(const Candidates&, int64_t) { return 1; }
};
struct SumWeights {
  Mass mass;
  PAGEMILL_INLINE void add(Vec weights, Mask chosen) { mass.add(only(chosen, weights)); }
  int64_t sum() const { return mass.sum(); }
  static int64_t of(const Candidates& c, int64_t i) { return quantise(c.weight[i]); }
};

// Appends to `to` what `chosen(logits, ids)` names of `from`; `to` may begin where `from` does.
template <class Chosen>
PAGEMILL_INLINE void pick(Candidates& to, const Candidates& from, const Chosen& chosen) {
  to.count = 0;
  for (int64_t i = 0; i < from.count; i += kLanes) {
    const Vec logits = load(from.logit + i);
    const IntVec ids = load_words(from.id + i);
    to.append(logits, load(from.weight + i), ids, chosen(logits, ids));
  }
  to.close();
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

// The median of a few logits from all over the list.
inline float pivot_of(const Candidates& c) {
  constexpr int64_t kLooks = 15;
  float looks[kLooks];
  for (int64_t i = 0; i < kLooks; ++i) {
    const float logit = c.logit[i * (c.count - 1) / (kLooks - 1)];
    int64_t at = i;
    for (; at > 0 && looks[at - 1] < logit; --at) looks[at] = looks[at - 1];
    looks[at] = logit;
  }
  return looks[kLooks / 2];
}

// The last member of the shortest prefix whose amounts reach `target` (at most the total). `work` has room for all
// of `from`; `from` is not changed.
template <class Amount>
Rank last_of_prefix(const Candidates& from, Candidates work, int64_t target) {
  Candidates active = from;
  while (active.count > kFewEnough) {
    const float pivot = pivot_of(active);
    Amount higher, same;
    for (int64_t i = 0; i < active.count; i += kLanes) {
      const Vec logits = load(active.logit + i), weights = load(active.weight + i);
      higher.add(weights, above(logits, splat(pivot)));
      same.add(weights, equal(logits, splat(pivot)));
    }
    int64_t missing = target - higher.sum();
    if (missing <= 0) {
      pick(work, active, [&](Vec logits, IntVec) { return above(logits, splat(pivot)); });
    } else if (missing <= same.sum()) {  // equal ones rank by their ids, in whose order they are
      for (int64_t i = 0;; ++i) {
        if (active.logit[i] == pivot && (missing -= Amount::of(active, i)) <= 0) return {pivot, active.id[i]};
      }
    } else {
      target = missing - same.sum();
      pick(work, active, [&](Vec logits, IntVec) { return above(splat(pivot), logits); });
    }
    active = work;
  }
  if (active.logit != work.logit) {
    pick(work, active, [&](Vec logits, IntVec) { return equal(logits, logits); });
    active = work;
  }
  rank_all(active);
  int64_t last = 0;
  for (int64_t sum = Amount::of(active, 0); sum < target && last + 1 < active.count;) sum += Amount::of(active, ++last);
  return {active.logit[last], active.id[last]};
}

inline void keep(Candidates& c, const Rank& last) {
  const Candidates all = c;
  pick(c, all, [&](Vec logits, IntVec ids) { return last.includes(logits, ids); });
}

inline int64_t total_weight(const Candidates& c) {
  Mass mass;
  for (int64_t i = 0; i < c.count; i += kLanes) mass.add(load(c.weight + i));
  return mass.sum();
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
