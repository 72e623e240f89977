// One row of logits under a block of threads: its ranking (logit descending, then id ascending) as integers, and the
// shortest prefix of it that reaches a target, without a sort.
//
// A member's rank is one 54-bit number, the larger the earlier: the logit's bits in an order that integers share, then
// the complement of the id. A prefix is found digit by digit, from the highest: a histogram of what the members add
// (one each, or their weight), then only the bin where the target falls is looked into. Integer sums do not depend on
// the order of atomics, so neither does anything here.
#pragma once

#include "cuda/numbers.cuh"

namespace pagemill::cuda {

constexpr int kRowThreads = 1024, kRowWarps = kRowThreads / kWarp;
constexpr int kIdBits = 22, kBins = 2048;  // up to 2^22 ids: their weights, at most 2^40 each, sum in 63 bits
constexpr uint32_t kIdMask = (1u << kIdBits) - 1;
constexpr int kListSize = 4096;
constexpr uint64_t kNoRank = 0;  // below that of every member
constexpr float kInfinity = __builtin_inff();

// A block's shared memory while it works on a row.
struct RowShared {
  uint64_t bins[kBins];
  uint64_t warps[kRowWarps];
  uint64_t found[3];        // what one thread tells all
  uint32_t list[kListSize];  // ids
  uint32_t list_count;
};

// -0 and 0 are equal; larger logits are larger numbers. -infinity is 0x007fffff.
PAGEMILL_DEVICE uint32_t ordered_bits(float logit) {
  const uint32_t bits = logit == 0.0f ? 0u : bits_as<uint32_t>(logit);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

PAGEMILL_DEVICE uint64_t rank_of(float logit, int64_t id) {
  return uint64_t{ordered_bits(logit)} << kIdBits | (kIdMask - static_cast<uint32_t>(id));
}

PAGEMILL_DEVICE int64_t id_of_rank(uint64_t rank) { return kIdMask - static_cast<uint32_t>(rank & kIdMask); }

PAGEMILL_DEVICE bool is_member(float logit) { return logit > -kInfinity; }  // a banned id is none, NaN neither

// ---- over the block -----------------------------------------------------------------------------------------------

// Both need no barrier before, and end with one.
PAGEMILL_DEVICE uint64_t block_sum(RowShared& shared, uint64_t value) {
  value = warp_sum(value);
  sync_block();
  if (lane_id() == 0) shared.warps[warp_id()] = value;
  sync_block();
  uint64_t sum = 0;
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) sum += shared.warps[w];
  return sum;
}

PAGEMILL_DEVICE uint64_t block_max(RowShared& shared, uint64_t value) {
  value = warp_max(value);
  sync_block();
  if (lane_id() == 0) shared.warps[warp_id()] = value;
  sync_block();
  uint64_t best = 0;
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) best = shared.warps[w] > best ? shared.warps[w] : best;
  return best;
}

// The sum of `value` over all threads before this one; warps[] holds the warps' totals meanwhile.
PAGEMILL_DEVICE uint64_t block_sum_before(RowShared& shared, uint64_t value) {
  uint64_t sum = value;
#pragma unroll
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const uint64_t other = shuffle_up(sum, delta);
    if (lane_id() >= delta) sum += other;
  }
  sync_block();
  if (lane_id() == kWarp - 1) shared.warps[warp_id()] = sum;
  sync_block();
  uint64_t before = sum - value;
  for (int w = 0; w < warp_id(); ++w) before += shared.warps[w];
  return before;
}

// ---- the row's members --------------------------------------------------------------------------------------------

// What is looked at: the row's ids with a logit of at least `floor`, if listed those in shared.list.
struct Members {
  const float* logits;  // [vocab]
  int64_t vocab;
  float floor;
  bool listed;
};

PAGEMILL_DEVICE Members all_members(const float* logits, int64_t vocab) { return {logits, vocab, -kInfinity, false}; }

// run(id, logit) for every id of the row, each by one thread, in no particular order.
template <typename Run>
PAGEMILL_DEVICE void for_row(const float* logits, int64_t vocab, const Run& run) {
  int64_t start = 0;
  if (reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
    for (int64_t at = int64_t(threadIdx.x) * 4; at + 4 <= vocab; at += kRowThreads * 4) {
      const Bytes16 four = load_16(logits + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) run(at + i, bits_as<float>(four.word[i]));
    }
    start = vocab / 4 * 4;
  }
  for (int64_t id = start + threadIdx.x; id < vocab; id += kRowThreads) run(id, logits[id]);
}

// run(id, logit) for the members: what is banned (-infinity) is none.
template <typename Run>
PAGEMILL_DEVICE void for_members(const RowShared& shared, const Members& members, const Run& run) {
  if (members.listed) {
    for (uint32_t i = threadIdx.x; i < shared.list_count; i += kRowThreads) {
      const int64_t id = shared.list[i];
      run(id, members.logits[id]);
    }
  } else {
    for_row(members.logits, members.vocab, [&](int64_t id, float logit) {
      if (is_member(logit) && logit >= members.floor) run(id, logit);
    });
  }
}

// The members with a logit of at least `floor`, listed if there is room for them. A thread that finds the list full takes
// no more atomics: at one address they wait for each other.
PAGEMILL_DEVICE Members list_from(RowShared& shared, const float* logits, int64_t vocab, float floor) {
  sync_block();
  if (threadIdx.x == 0) shared.list_count = 0;
  sync_block();
  bool is_full = false;
  for_row(logits, vocab, [&](int64_t id, float logit) {
    if (is_full || !is_member(logit) || !(logit >= floor)) return;
    const uint32_t at = atomic_add(&shared.list_count, 1u);
    is_full = at >= kListSize;
    if (!is_full) shared.list[at] = static_cast<uint32_t>(id);
  });
  sync_block();
  return {logits, vocab, floor, shared.list_count <= kListSize};
}

// The k-th largest of the threads' own maxima, which is at most the k-th largest logit. best: rank of this thread's
// largest, or kNoRank. -infinity if fewer than k threads have a member.
PAGEMILL_DEVICE float floor_of_top(uint64_t best, int64_t k) {
  const auto mine = static_cast<uint32_t>(best >> kIdBits);
  uint32_t bound = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t higher = bound | 1u << bit;
    if (sync_block_count(mine >= higher) >= k) bound = higher;
  }
  if (bound <= 0x007fffffu) return -kInfinity;
  return bits_as<float>(bound ^ ((bound >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// ---- the prefix ---------------------------------------------------------------------------------------------------

// The bin, counted from the highest, at which the sum of bins reaches `target`: found[0] its number, found[1] what it has
// to add itself, found[2] all it holds. At most the sum of all.
PAGEMILL_DEVICE void find_bin(RowShared& shared, uint64_t target) {
  constexpr int each = kBins / kRowThreads;
  static_assert(each == 2);
  const int high = kBins - 1 - static_cast<int>(threadIdx.x) * each;
  const uint64_t first = shared.bins[high], second = shared.bins[high - 1];
  const uint64_t before = block_sum_before(shared, first + second);
  if (before < target && target <= before + first + second) {
    const bool in_first = target <= before + first;
    shared.found[0] = static_cast<uint64_t>(in_first ? high : high - 1);
    shared.found[1] = in_first ? target - before : target - before - first;
    shared.found[2] = in_first ? first : second;
  }
  sync_block();
}

// The rank from which on members belong to the shortest prefix of the ranking whose amounts reach `target`, between 1
// and the sum of all. amount(logit) of a member is what it adds. All threads get it.
template <typename Amount>
PAGEMILL_DEVICE uint64_t first_rank_of_prefix(RowShared& shared, const Members& members, uint64_t target,
                                              const Amount& amount) {
  uint64_t known = 0, mask = 0;
#pragma unroll 1
  for (int step = 0; step < 5; ++step) {
    const int shift = step < 2 ? 43 - 11 * step : 44 - 11 * step;  // 43, 32, 22, 11, 0
    const uint32_t digits = step == 2 ? 1023 : 2047;
    for (int i = threadIdx.x; i < kBins; i += kRowThreads) shared.bins[i] = 0;
    sync_block();
    for_members(shared, members, [&](int64_t id, float logit) {
      const uint64_t rank = rank_of(logit, id);
      if ((rank & mask) == known) atomic_add(&shared.bins[rank >> shift & digits], amount(logit));
    });
    sync_block();
    find_bin(shared, target);
    known |= shared.found[0] << shift;
    mask |= uint64_t{digits} << shift;
    target = shared.found[1];
    const bool whole = target == shared.found[2];  // all of the bin belongs to the prefix
    sync_block();
    if (whole) break;
  }
  return known;
}

}  // namespace pagemill::cuda
