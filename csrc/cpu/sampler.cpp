// One token per row of logits: greedy, or the inverse CDF over the ids that top-k, top-p and min-p leave.
//
// A row is one worker's from start to end. The first pass takes the maximum of every block of 128 ids; what follows
// skips blocks that cannot matter, so a peaked distribution costs little more than reading it once.
#include "cpu/kernels.h"
#include "cpu/lanes_math.h"
#include "cpu/philox.h"
#include "cpu/sampler_select.h"
#include "cpu/scratch.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr float kInfinity = __builtin_inff();

struct Row {
  const float* logits;
  int64_t vocab, blocks;
  float* block_max;     // [blocks]
  int64_t* block_sums;  // [blocks]
  Candidates candidates, work;
  float max;

  int64_t block_size(int64_t block) const {
    const int64_t left = vocab - block * kBlock;
    return left < kBlock ? left : kBlock;
  }
};

size_t scratch_bytes(int64_t vocab, int64_t blocks) {
  return size_t(blocks * 16 + (vocab + 1) * 6 * 4);
}

Row make_row(int64_t vocab, char* scratch) {
  Row row{};
  row.vocab = vocab;
  row.blocks = (vocab + kBlock - 1) / kBlock;
  auto take = [&](int64_t bytes) {
    char* at = scratch;
    scratch += bytes;
    return at;
  };
  row.block_sums = reinterpret_cast<int64_t*>(take(row.blocks * 8));
  row.block_max = reinterpret_cast<float*>(take(row.blocks * 8));
  auto take_candidates = [&](Candidates& c) {
    c.logit = reinterpret_cast<float*>(take((vocab + 1) * 4));
    c.weight = reinterpret_cast<float*>(take((vocab + 1) * 4));
    c.id = reinterpret_cast<int32_t*>(take((vocab + 1) * 4));
  };
  take_candidates(row.candidates);
  take_candidates(row.work);
  return row;
}

// Fills block_max and max. False if the row has NaN, +inf or nothing finite.
bool scan(Row& row) {
  float copy[kBlock];
  IntVec nan{};
  row.max = -kInfinity;
  for (int64_t b = 0; b < row.blocks; ++b) {
    const float* block = whole_block(row.logits + b * kBlock, row.block_size(b), copy);
    Vec best = load(block);
    nan |= best != best;
    for (int64_t i = kLanes; i < kBlock; i += kLanes) {
      const Vec v = load(block + i);
      nan |= v != v;
      best = larger(v, best);
    }
    row.block_max[b] = max_lanes(best);
    row.max = row.block_max[b] > row.max ? row.block_max[b] : row.max;
  }
  int32_t any = 0;
  for (int64_t i = 0; i < kLanes; ++i) any |= nan[i];
  return any == 0 && row.max < kInfinity && row.max > -kInfinity;
}

int64_t first_of_max(const Row& row) {
  int64_t b = 0;
  while (row.block_max[b] != row.max) ++b;
  int64_t id = b * kBlock;
  while (row.logits[id] != row.max) ++id;
  return id;
}

// Fills block_sums; the total weight of the row.
int64_t sum_blocks(Row& row, const Scale& scale) {
  float copy[kBlock];
  int64_t total = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    row.block_sums[b] = 0;
    if (scale.negligible(row.block_max[b])) continue;
    row.block_sums[b] = block_sum(whole_block(row.logits + b * kBlock, row.block_size(b), copy), scale);
    total += row.block_sums[b];
  }
  return total;
}

// floor(bits * total / 2^53): the draw's place in [0, total).
int64_t place(uint64_t bits, int64_t total) {
  return int64_t((unsigned __int128)bits * (unsigned __int128)(uint64_t)total >> 53);
}

int64_t draw_from_row(Row& row, const Scale& scale, uint64_t bits) {
  int64_t left = place(bits, sum_blocks(row, scale));
  int64_t b = 0;
  while (row.block_sums[b] <= left) left -= row.block_sums[b++];
  float copy[kBlock], weights[kBlock];
  const float* block = whole_block(row.logits + b * kBlock, row.block_size(b), copy);
  for (int64_t i = 0; i < kBlock; i += kLanes) store(weights + i, scale(load(block + i)));
  int64_t i = 0;
  for (int64_t w = quantise(weights[0]); w <= left; w = quantise(weights[++i])) left -= w;
  return b * kBlock + i;
}

int64_t draw_from_candidates(const Candidates& c, uint64_t bits) {
  int64_t total = 0;
  for (int64_t i = 0; i < c.count; ++i) total += quantise(c.weight[i]);
  int64_t left = place(bits, total), i = 0;
  for (int64_t w = quantise(c.weight[0]); w <= left; w = quantise(c.weight[++i])) left -= w;
  return c.id[i];
}

// Collects the finite logits >= floor, in id order, without weights.
void gather(Row& row, float floor) {
  Candidates& c = row.candidates;
  if (floor == -kInfinity) floor = -__FLT_MAX__;
  int64_t count = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.block_max[b] < floor) continue;
    const int64_t first = b * kBlock, end = first + row.block_size(b);
    for (int64_t id = first; id < end; ++id) {  // no branch: the write past the last kept one is overwritten
      c.logit[count] = row.logits[id];
      c.id[count] = int32_t(id);
      count += row.logits[id] >= floor;
    }
  }
  c.count = count;
}

void weigh(Candidates& c, const Scale& scale) {
  for (int64_t i = 0; i < c.count; i += kLanes)
    store_up_to(c.weight + i, scale(load_up_to(c.logit + i, c.count - i)), c.count - i);
}

// The k-th largest of `count` values, which are reordered (Hoare's quickselect on the middle element).
float kth_largest(float* values, int64_t count, int64_t k) {
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

// The k-th largest block maximum is at most the k-th largest logit, so a cut there loses nothing.
void keep_top_k(Row& row, int64_t k) {
  float floor = -kInfinity;
  if (k <= row.blocks) {
    for (int64_t b = 0; b < row.blocks; ++b) row.work.logit[b] = row.block_max[b];
    floor = kth_largest(row.work.logit, row.blocks, k);
  }
  gather(row, floor);
  if (k < row.candidates.count) keep(row.candidates, last_of_prefix(row.candidates, row.work, k, CountOne{}));
}

// The mass that top-p asks for, in [1, total].
int64_t target_mass(float top_p, int64_t total) {
  const int64_t target = int64_t(__builtin_ceil(double(top_p) * double(total)));
  return target < 1 ? 1 : target > total ? total : target;
}

// Candidates that may be in the nucleus: the others, at most `vocab` of weight below (total - target) / (2 vocab) each,
// hold less than what the nucleus may leave out. The margins cover the exponential's last bits.
void gather_nucleus(Row& row, const Scale& scale, int64_t total, int64_t target) {
  const double cut = double(total - target) / (2.0 * double(row.vocab)) / kUnit;
  double floor = -kInfinity;
  if (cut > 0) {
    floor = double(row.max) + double(scale.temperature) * (__builtin_log(cut) - 0.02);
    floor -= 1e-6 * __builtin_fabs(double(row.max));
  }
  gather(row, floor < -double(__FLT_MAX__) ? -kInfinity : float(floor));
}

void keep_top_p(Row& row, int64_t target) {
  keep(row.candidates, last_of_prefix(row.candidates, row.work, target, CountWeight{}));
}

int64_t sample_row(Row& row, const SampleArgs& a, int64_t r) {
  if (!scan(row)) return -1;
  if (a.greedy[r]) return first_of_max(row);
  const uint64_t bits = random_bits(uint64_t(a.seed_keys[r]), uint64_t(a.positions[r]));
  const Scale whole{row.max, a.temperature[r], 0.0f}, cut{row.max, a.temperature[r], a.min_p[r]};
  const bool has_k = a.top_k[r] > 0 && a.top_k[r] < row.vocab, has_p = a.top_p[r] < 1.0f;
  if (!has_k && !has_p) return draw_from_row(row, cut, bits);
  Candidates& c = row.candidates;
  if (has_k) {
    keep_top_k(row, a.top_k[r]);
    if (has_p) {
      weigh(c, whole);
      int64_t total = 0;
      for (int64_t i = 0; i < c.count; ++i) total += quantise(c.weight[i]);
      keep_top_p(row, target_mass(a.top_p[r], total));
    }
  } else {
    const int64_t total = sum_blocks(row, whole), target = target_mass(a.top_p[r], total);
    gather_nucleus(row, whole, total, target);
    weigh(c, whole);
    keep_top_p(row, target);
  }
  weigh(c, cut);
  return draw_from_candidates(c, bits);
}

// log softmax(logits) of each id, the sum of exponentials in float64 and taken once.
void logprobs(const float* logits, int64_t vocab, const int64_t* ids, int64_t num_ids, float* out) {
  float copy[kBlock];
  Vec best = splat(-kInfinity);
  IntVec nan{};
  for (int64_t at = 0; at < vocab; at += kBlock) {
    const float* block = whole_block(logits + at, vocab - at, copy);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec v = load(block + i);
      nan |= v != v;
      best = larger(v, best);
    }
  }
  const float max = max_lanes(best);
  PartDouble sums[2] = {};
  for (int64_t at = 0; at < vocab; at += kBlock) {
    const float* block = whole_block(logits + at, vocab - at, copy);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec e = exp(load(block + i) - max);
      sums[0] += widen(e, 0);
      sums[1] += widen(e, 1);
    }
  }
  const PartDouble sum = sums[0] + sums[1];
  double total = 0;
  for (int64_t i = 0; i < kLanes / 2; ++i) total += sum[i];
  const double log_total = __builtin_log(total);
  for (int64_t i = 0; i < num_ids; ++i) out[i] = float(double(logits[ids[i]]) - double(max) - log_total);
}

}  // namespace

void sample(const SampleArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t blocks = (args.vocab + kBlock - 1) / kBlock;
  Row row = make_row(args.vocab, static_cast<char*>(thread_scratch(scratch_bytes(args.vocab, blocks))));
  for (int64_t r = row_begin; r < row_end; ++r) {
    row.logits = args.logits + r * args.stride;
    args.ids[r] = sample_row(row, args, r);
  }
}

void logprobs_of(const LogprobArgs& args, int64_t row_begin, int64_t row_end) {
  for (int64_t r = row_begin; r < row_end; ++r)
    logprobs(args.logits + r * args.stride, args.vocab, args.ids + r * args.num_ids, args.num_ids,
             args.logprobs + r * args.num_ids);
}

}  // namespace pagemill::PAGEMILL_LEVEL
