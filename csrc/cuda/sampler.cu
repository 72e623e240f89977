// One id per row of logits, by docs/randomness.md to the bit: greedy, or the inverse CDF over the ids that top-k, top-p
// and min-p leave. No sort (ranking.cuh); weights are integers, so every sum is exact in any order.
//
// Tiling: a row is one block's, 1024 threads. The first pass over the row takes the largest logit and every thread's own;
// greedy ends there. top-k and top-p bound from below which logits can matter, list those (a few thousand at most, as a
// rule), and look at the row no more. A last pass sums weights over 1024 stretches of ids; the draw falls into one of
// them, which one warp then walks through.
// Floor: the row is read once from memory (4 bytes per id): 68 MB, 16 us at 4.3 TB/s for 132 rows of 128 k ids. A pass
// that weighs every id (one without filters, one more for top-p) is about 40 operations per id for the exponential, the
// division and the rounding: 128 k ids on one multiprocessor's 128 lanes are 40,000 cycles, 23 us. So it is arithmetic.
#include "cuda/philox.cuh"
#include "cuda/ranking.cuh"

namespace pagemill::cuda {
namespace {

constexpr int64_t kMaxVocab = int64_t(1) << kIdBits;
constexpr int kStretches = kRowThreads;

struct SampleArguments {
  const float* logits;  // [rows, vocab], rows `stride` elements apart
  int64_t stride, vocab;
  const int64_t* source;  // [rows]: the logit row of each row; null: its own number
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint8_t* greedy;
  const int64_t* seed_keys;
  const int64_t* positions;
  int64_t* ids;
};

// e^d for d <= 0, spelled out in single operations as the definition does.
PAGEMILL_DEVICE float weight_exp(float d) {
  d = d > -30.0f ? d : -30.0f;
  const float whole = rintf(d * 0x1.715476p+0f);
  const float r = (d - whole * 0x1.63p-1f) - whole * -0x1.bd0106p-13f;
  float sum = r * 0x1.a01a02p-13f + 0x1.6c16c2p-10f;
  sum = sum * r + 0x1.111112p-7f;
  sum = sum * r + 0x1.555556p-5f;
  sum = sum * r + 0x1.555556p-3f;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return sum * bits_as<float>(static_cast<uint32_t>(static_cast<int>(whole) + 127) << 23);
}

// round(2^40 w), half to even: the product is exact, for it moves only the exponent.
PAGEMILL_DEVICE uint64_t quantise(float w) { return static_cast<uint64_t>(rintf(w * 0x1p40f)); }

struct Weights {
  float max, temperature;

  PAGEMILL_DEVICE float value(float logit) const { return weight_exp((logit - max) / temperature); }
  PAGEMILL_DEVICE uint64_t operator()(float logit) const { return quantise(value(logit)); }
};

// Which members may be drawn.
struct Filter {
  uint64_t first_rank;
  float min_weight;
};

PAGEMILL_DEVICE uint64_t kept_weight(const Weights& weights, const Filter& filter, int64_t id, float logit) {
  if (rank_of(logit, id) < filter.first_rank) return 0;
  const float value = weights.value(logit);
  return value >= filter.min_weight ? quantise(value) : 0;
}

// ids [stretch * length, (stretch + 1) * length) are a stretch; whole warps of them.
PAGEMILL_DEVICE int64_t stretch_length(int64_t vocab) { return ceil_div(ceil_div(vocab, kStretches), kWarp) * kWarp; }

// Sums of the weights left in each stretch, in shared.bins.
PAGEMILL_DEVICE void sum_stretches(RowShared& shared, const Members& members, const Weights& weights,
                                   const Filter& filter) {
  const int64_t length = stretch_length(members.vocab);
  for (int i = threadIdx.x; i < kBins; i += kRowThreads) shared.bins[i] = 0;
  sync_block();
  if (members.listed) {
    for_members(shared, members, [&](int64_t id, float logit) {
      atomic_add(&shared.bins[static_cast<uint32_t>(id) / static_cast<uint32_t>(length)], kept_weight(weights, filter, id, logit));
    });
  } else {
    for (int stretch = warp_id(); stretch < kStretches; stretch += kRowWarps) {
      const int64_t first = stretch * length;
      if (first >= members.vocab) break;
      uint64_t sum = 0;
      for (int64_t id = first + lane_id(); id < first + length && id < members.vocab; id += kWarp) {
        const float logit = members.logits[id];
        if (is_member(logit)) sum += kept_weight(weights, filter, id, logit);
      }
      sum = warp_sum(sum);
      if (lane_id() == 0) shared.bins[stretch] = sum;
    }
  }
  sync_block();
}

// The id whose running sum within its stretch first exceeds `place`. One warp.
PAGEMILL_DEVICE int64_t walk_stretch(const Members& members, const Weights& weights, const Filter& filter,
                                     int64_t stretch, uint64_t place) {
  const int64_t length = stretch_length(members.vocab), first = stretch * length;
  for (int64_t at = first; at < first + length; at += kWarp) {
    const int64_t id = at + lane_id();
    const float logit = id < members.vocab ? members.logits[id] : -kInfinity;
    uint64_t sum = is_member(logit) ? kept_weight(weights, filter, id, logit) : 0;
#pragma unroll
    for (int delta = 1; delta < kWarp; delta *= 2) {
      const uint64_t other = shuffle_up(sum, delta);
      if (lane_id() >= delta) sum += other;
    }
    const uint32_t past = ballot(sum > place);
    if (past != 0) return at + count_bits((past & (0u - past)) - 1u);
    place -= shuffle(sum, kWarp - 1);
  }
  return -1;  // not reached: place is below the stretch's sum
}

// Returns the id to the threads of one warp, -1 to the others.
PAGEMILL_DEVICE int64_t draw(RowShared& shared, const Members& members, const Weights& weights, const Filter& filter,
                             uint64_t bits) {
  sum_stretches(shared, members, weights, filter);
  const uint64_t mine = shared.bins[threadIdx.x];
  const uint64_t before = block_sum_before(shared, mine);
  if (threadIdx.x == kRowThreads - 1) shared.found[0] = before + mine;
  sync_block();
  const uint64_t place = place_of(bits, shared.found[0]);
  if (before <= place && place < before + mine) {
    shared.found[1] = threadIdx.x;
    shared.found[2] = place - before;
  }
  sync_block();
  if (warp_id() != 0) return -1;
  return walk_stretch(members, weights, filter, static_cast<int64_t>(shared.found[1]), shared.found[2]);
}

PAGEMILL_DEVICE uint64_t sum_weights(RowShared& shared, const Members& members, const Weights& weights,
                                     uint64_t first_rank) {
  uint64_t sum = 0;
  for_members(shared, members, [&](int64_t id, float logit) {
    if (rank_of(logit, id) >= first_rank) sum += weights(logit);
  });
  return block_sum(shared, sum);
}

// The mass that top-p asks for, in [1, total].
PAGEMILL_DEVICE uint64_t target_mass(float top_p, uint64_t total) {
  const auto target = static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
  return target < 1 ? 1 : target > total ? total : target;
}

// A logit below which no member is in the nucleus: at most `vocab` of them with less than (total - target) / (2 vocab)
// of weight each hold less than the nucleus may leave out. The margins cover the exponential's last bits.
PAGEMILL_DEVICE float floor_of_nucleus(const Weights& weights, int64_t vocab, uint64_t total, uint64_t target) {
  const double cut = static_cast<double>(total - target) / (2.0 * static_cast<double>(vocab)) / 0x1p40;
  if (!(cut > 0)) return -kInfinity;
  const double top = weights.max, width = static_cast<double>(weights.temperature) * (log(cut) - 0.02);
  return static_cast<float>(top + width - 1e-6 * fabs(top));  // beyond float's range: -infinity
}

// Raises a floor above which the nucleus lies: of three levels between it and the largest logit the highest whose members
// still reach the target. Three times, so that the list is little longer than the nucleus; no atomics.
PAGEMILL_DEVICE float raise_floor(RowShared& shared, const float* logits, int64_t vocab, const Weights& weights,
                                  uint64_t target, float low) {
  constexpr int kLevels = 3;  // each is two registers, of which there are no more
  float high = weights.max;
#pragma unroll 1
  for (int round = 0; round < 3 && low > -kInfinity; ++round) {
    const float step = (high - low) / static_cast<float>(kLevels + 1);
    uint64_t sums[kLevels] = {};
    for_members(shared, Members{logits, vocab, low + step, false}, [&](int64_t, float logit) {
      const uint64_t weight = weights(logit);
#pragma unroll
      for (int i = 0; i < kLevels; ++i) sums[i] += logit >= low + step * static_cast<float>(i + 1) ? weight : 0;
    });
    int reached = 0;  // levels that reach the target are the lower ones
#pragma unroll
    for (int i = 0; i < kLevels; ++i) reached += block_sum(shared, sums[i]) >= target;
    high = reached < kLevels ? low + step * static_cast<float>(reached + 1) : high;
    low = reached > 0 ? low + step * static_cast<float>(reached) : low;
  }
  return low;
}

struct Scan {
  uint64_t best;   // rank of the row's largest
  uint64_t mine;   // of this thread's largest
  bool drawable;   // no NaN, no +infinity, something finite
};

PAGEMILL_DEVICE Scan scan_row(RowShared& shared, const float* logits, int64_t vocab) {
  Scan scan{};
  bool bad = false;
  for_row(logits, vocab, [&](int64_t id, float logit) {
    bad |= !(logit < kInfinity);
    if (!is_member(logit)) return;
    const uint64_t rank = rank_of(logit, id);
    scan.mine = rank > scan.mine ? rank : scan.mine;
  });
  const int num_bad = sync_block_count(bad);
  scan.best = block_max(shared, scan.mine);
  scan.drawable = num_bad == 0 && scan.best != kNoRank;
  return scan;
}

__global__ void __launch_bounds__(kRowThreads, 1) sample_rows(SampleArguments a) {
  PAGEMILL_SHARED(bytes);
  RowShared& shared = *reinterpret_cast<RowShared*>(bytes);
  const int64_t row = blockIdx.x;
  const float* logits = a.logits + (a.source == nullptr ? row : a.source[row]) * a.stride;
  const Scan scan = scan_row(shared, logits, a.vocab);
  if (!scan.drawable || a.greedy[row] != 0) {
    if (threadIdx.x == 0) a.ids[row] = scan.drawable ? id_of_rank(scan.best) : -1;
    return;
  }
  const Weights weights{logits[id_of_rank(scan.best)], a.temperature[row]};
  const int64_t top_k = a.top_k[row];
  const float top_p = a.top_p[row];
  Members members = all_members(logits, a.vocab);
  Filter filter{kNoRank, a.min_p[row]};
  if (top_k > 0 && top_k < a.vocab) {
    members = list_from(shared, logits, a.vocab, floor_of_top(scan.mine, top_k));
    uint64_t many = 0;
    for_members(shared, members, [&](int64_t, float) { ++many; });
    many = block_sum(shared, many);
    if (static_cast<uint64_t>(top_k) <= many)  // also when the list is just these: the row has others below the floor
      filter.first_rank = first_rank_of_prefix(shared, members, static_cast<uint64_t>(top_k), [](float) { return uint64_t{1}; });
  }
  if (top_p < 1.0f) {
    const uint64_t total = sum_weights(shared, members, weights, filter.first_rank);
    const uint64_t target = target_mass(top_p, total);
    if (!members.listed) {
      const float low = floor_of_nucleus(weights, a.vocab, total, target);
      members = list_from(shared, logits, a.vocab, raise_floor(shared, logits, a.vocab, weights, target, low));
    }
    const uint64_t within = filter.first_rank;
    const uint64_t nucleus = first_rank_of_prefix(shared, members, target, weights);
    filter.first_rank = nucleus > within ? nucleus : within;
  }
  const uint64_t bits = random_bits(static_cast<uint64_t>(a.seed_keys[row]), static_cast<uint64_t>(a.positions[row]));
  const int64_t id = draw(shared, members, weights, filter, bits);
  if (threadIdx.x == 0) a.ids[row] = id;
}

__global__ void __launch_bounds__(kWarp) philox_words(const uint32_t* counters, const uint32_t* keys,
                                                      const uint64_t* totals, uint32_t* out, uint64_t* places,
                                                      int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  if (i >= count) return;
  Words4 counter;
  for (int w = 0; w < 4; ++w) counter.word[w] = counters[4 * i + w];
  const Words4 words = philox(counter, keys[2 * i], keys[2 * i + 1]);
  for (int w = 0; w < 4; ++w) out[4 * i + w] = words.word[w];
  places[i] = place_of((uint64_t{words.word[0]} << 32 | words.word[1]) >> 11, totals[i]);
}

}  // namespace

// logits: [logit rows, vocab] float32, rows at a stride; source: [rows], the logit row of each row, or null: its own
// number. Per row: temperature > 0, top_k (0 or less: no limit), top_p and
// min_p from 0 to 1, greedy (not 0: the other four are not read), seed_keys, positions. ids: [rows]; -1 where the row
// holds NaN, +infinity or nothing finite.
PAGEMILL_EXPORT int pagemill_sample(const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                                    const int64_t* source, const float* temperature, const int32_t* top_k, const float* top_p,
                                    const float* min_p, const uint8_t* greedy, const int64_t* seed_keys,
                                    const int64_t* positions, int64_t* ids, void* stream) {
  if (vocab < 1 || vocab > kMaxVocab) return kInvalidArgument;
  if (rows == 0) return 0;
  const SampleArguments arguments{logits, stride, vocab,  source,    temperature, top_k,
                                  top_p,  min_p,  greedy, seed_keys, positions,   ids};
  PAGEMILL_LAUNCH(sample_rows, static_cast<unsigned>(rows), kRowThreads, sizeof(RowShared), stream)(arguments);
  return launch_status();
}

// The generator alone, for its test vectors: counters [count, 4], keys [count, 2], out [count, 4], uint32; and where the
// number of the first two words falls in totals: places, [count] uint64 below 2^63.
PAGEMILL_EXPORT int pagemill_philox(const uint32_t* counters, const uint32_t* keys, const uint64_t* totals,
                                    uint32_t* out, uint64_t* places, int64_t count, void* stream) {
  if (count == 0) return 0;
  PAGEMILL_LAUNCH(philox_words, static_cast<unsigned>(ceil_div(count, kWarp)), kWarp, 0, stream)
  (counters, keys, totals, out, places, count);
  return launch_status();
}

}  // namespace pagemill::cuda
