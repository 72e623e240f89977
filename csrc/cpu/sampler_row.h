// One row of logits while it is sampled: its blocks of 128 ids, of which whole ones can often be passed over, and the
// candidates taken out of it. A row is one worker's from start to end.
#pragma once

#include "cpu/sampler_select.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr float kInfinity = __builtin_inff();

struct Row {
  const float* logits;
  const float* next;  // the row that this worker will read after this one; may be null
  int64_t vocab, blocks;
  float* block_max;     // [blocks]
  int64_t* block_sums;  // [blocks]
  double* running_sums;  // [blocks]
  float* weights;       // [blocks * kBlock], before rounding
  Candidates candidates, work;
  float max;

  int64_t block_size(int64_t block) const {
    const int64_t left = vocab - block * kBlock;
    return left < kBlock ? left : kBlock;
  }
  const float* block(int64_t b, float* copy) const { return whole_block(logits + b * kBlock, block_size(b), copy); }
  IntVec ids(int64_t first) const { return lane_numbers() + int32_t(first); }
  void fetch_next(int64_t b) const {  // into the second cache, while this row is computed on
    if (next == nullptr) return;
    for (int64_t i = 0; i < kBlock; i += 16) __builtin_prefetch(next + b * kBlock + i, 0, 2);
  }
};

constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr int64_t row_bytes(int64_t vocab) {
  const int64_t blocks = (vocab + kBlock - 1) / kBlock;
  return aligned(blocks * 4) + 2 * aligned(blocks * 8) + blocks * kBlock * 4 + 6 * aligned((vocab + kLanes) * 4);
}

// In `scratch`, row_bytes(vocab) long.
inline Row make_row(int64_t vocab, char* scratch) {
  Row row{};
  row.vocab = vocab;
  row.blocks = (vocab + kBlock - 1) / kBlock;
  auto take = [&](int64_t bytes) {
    char* at = scratch;
    scratch += aligned(bytes);
    return at;
  };
  row.block_max = reinterpret_cast<float*>(take(row.blocks * 4));
  row.block_sums = reinterpret_cast<int64_t*>(take(row.blocks * 8));
  row.running_sums = reinterpret_cast<double*>(take(row.blocks * 8));
  row.weights = reinterpret_cast<float*>(take(row.blocks * kBlock * 4));
  auto take_candidates = [&](Candidates& c) {
    c.logit = reinterpret_cast<float*>(take((vocab + kLanes) * 4));
    c.weight = reinterpret_cast<float*>(take((vocab + kLanes) * 4));
    c.id = reinterpret_cast<int32_t*>(take((vocab + kLanes) * 4));
  };
  take_candidates(row.candidates);
  take_candidates(row.work);
  return row;
}

// Fills block_max and max. False if the row holds NaN.
inline bool scan(Row& row) {
  float copy[kBlock];
  Mask nan{};
  row.max = -kInfinity;
  for (int64_t b = 0; b < row.blocks; ++b) {
    const float* block = row.block(b, copy);
    Vec best[2] = {load(block), load(block + kLanes)};
    nan |= is_nan(best[0], best[1]);
    for (int64_t i = 2 * kLanes; i < kBlock; i += 2 * kLanes) {
      const Vec v[2] = {load(block + i), load(block + i + kLanes)};
      nan |= is_nan(v[0], v[1]);
      for (int half = 0; half < 2; ++half) best[half] = larger(v[half], best[half]);
    }
    row.block_max[b] = largest(larger(best[0], best[1]));
    row.max = row.block_max[b] > row.max ? row.block_max[b] : row.max;
  }
  return !any(nan);
}

inline bool is_finite(float x) { return x < kInfinity && x > -kInfinity; }

inline int64_t first_of_max(const Row& row) {
  int64_t b = 0;
  while (row.block_max[b] != row.max) ++b;
  int64_t id = b * kBlock;
  while (row.logits[id] != row.max) ++id;
  return id;
}

// Collects the finite logits >= floor, in id order, without weights.
inline void gather(Row& row, float floor) {
  Candidates& c = row.candidates;
  if (floor == -kInfinity) floor = -__FLT_MAX__;
  float copy[kBlock];
  c.count = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.block_max[b] < floor) continue;
    const float* block = row.block(b, copy);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec v = load(block + i);
      const Mask chosen = at_least(v, splat(floor));
      if (any(chosen)) c.append(v, Vec{}, row.ids(b * kBlock + i), chosen);
    }
  }
  c.close();
}

inline void weigh(Candidates& c, const Scale& scale) {
  for (int64_t i = 0; i < c.count; i += kLanes) store(c.weight + i, scale(load(c.logit + i)));
  c.close();
}

// The k-th largest of `count` values, which are reordered (Hoare's quickselect on the middle element).
inline float kth_largest(float* values, int64_t count, int64_t k) {
  int64_t low = 0, high = count - 1, wanted = k - 1;
  while (low < high) {
    const float pivot = values[low + (high - low) / 2];
    int64_t i = low, j = high;
    while (i <= j) {
      while (values[i] > pivot) ++i;
      while (values[j] < pivot) --j;
      if (i <= j) {
        const float held = values[i];
        values[i++] = values[j];
        values[j--] = held;
      }
    }
    if (wanted <= j) {
      high = j;
    } else if (wanted >= i) {
      low = i;
    } else {
      break;
    }
  }
  return values[wanted];
}

constexpr Rank kEverything{-kInfinity, 0x7fffffff};

// Fills candidates with the first k of the ranking, in id order and without weights; the last one of them.
// The k-th largest block maximum is at most the k-th largest logit, so a cut there loses nothing.
inline Rank keep_top_k(Row& row, int64_t k) {
  float floor = -kInfinity;
  if (k <= row.blocks) {
    for (int64_t b = 0; b < row.blocks; ++b) row.work.logit[b] = row.block_max[b];
    floor = kth_largest(row.work.logit, row.blocks, k);
  }
  gather(row, floor);
  if (k >= row.candidates.count) return {floor, kEverything.id};
  const Rank last = last_of_prefix<CountOnes>(row.candidates, row.work, k);
  keep(row.candidates, last);
  return last;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
