// Log probabilities: of given ids, and of the n most likely ones.
//
// Tiling: a row is one block's, 1024 threads: the largest logit, then the sum of exponentials in float64, each thread
// its own ids in order and the block by a butterfly, so that a row's bits depend on its length alone. The n most likely
// are found as by the sampler (ranking.cuh): a floor, a short list, a digit search; then ranked among themselves.
// Floor: the row is read twice (once from L2) and once more for the list; one float64 exponential per id, at 128 k ids
// and 132 rows 17 M, some 10 us of an H200's float64 units.
#include "cuda/ranking.cuh"

namespace pagemill::cuda {
namespace {

constexpr int64_t kMaxVocab = int64_t(1) << kIdBits;
constexpr int64_t kMaxTop = 1024;

struct LogSum {
  double max, log_total;

  PAGEMILL_DEVICE float of(float logit) const { return static_cast<float>(static_cast<double>(logit) - max - log_total); }
};

// mine: rank of this thread's largest logit. NaN in the row makes log_total NaN.
PAGEMILL_DEVICE LogSum log_sum_of(RowShared& shared, const float* logits, int64_t vocab, uint64_t& mine) {
  mine = kNoRank;
  for_row(logits, vocab, [&](int64_t id, float logit) {
    const uint64_t rank = is_member(logit) ? rank_of(logit, id) : kNoRank;
    mine = rank > mine ? rank : mine;
  });
  const uint64_t best = block_max(shared, mine);
  const double max = best == kNoRank ? -static_cast<double>(kInfinity) : static_cast<double>(logits[id_of_rank(best)]);
  double sum = 0;
  for (int64_t id = threadIdx.x; id < vocab; id += kRowThreads) sum += exp(static_cast<double>(logits[id]) - max);
  sum = warp_sum(sum);
  double* sums = reinterpret_cast<double*>(shared.warps);
  sync_block();
  if (lane_id() == 0) sums[warp_id()] = sum;
  sync_block();
  double total = 0;
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) total += sums[w];
  return {max, log(total)};
}

struct LogprobArguments {
  const float* logits;  // [logit rows, vocab], rows `stride` elements apart
  int64_t vocab, stride;
  const int64_t* source;  // [rows]: the logit row of each row; null: its own number
  const int64_t* ids;     // [rows, num_ids]
  int64_t num_ids;
  float* logprobs;        // [rows, num_ids]
  int64_t num_top;        // 0: only the ids are told
  int64_t* top_ids;       // [rows, num_top]
  float* top_logprobs;    // likewise
  int32_t* ranks;         // [rows]: of the first of ids; or null
};

PAGEMILL_DEVICE const float* logits_of(const LogprobArguments& a, int64_t row) {
  return a.logits + (a.source == nullptr ? row : a.source[row]) * a.stride;
}

PAGEMILL_DEVICE void tell_ids(const LogprobArguments& a, int64_t row, const float* logits, const LogSum& sum) {
  for (int64_t i = threadIdx.x; i < a.num_ids; i += kRowThreads)
    a.logprobs[row * a.num_ids + i] = sum.of(logits[a.ids[row * a.num_ids + i]]);
}

__global__ void __launch_bounds__(kRowThreads, 1) logprobs_of_ids(LogprobArguments a) {
  PAGEMILL_SHARED(bytes);
  const int64_t row = blockIdx.x;
  const float* logits = logits_of(a, row);
  uint64_t mine;
  tell_ids(a, row, logits, log_sum_of(*reinterpret_cast<RowShared*>(bytes), logits, a.vocab, mine));
}

// 1 and how many logits are larger, to every thread.
PAGEMILL_DEVICE int32_t rank_among(RowShared& shared, const float* logits, int64_t vocab, float logit) {
  uint64_t larger = 0;
  for_row(logits, vocab, [&](int64_t, float other) { larger += other > logit; });
  return static_cast<int32_t>(block_sum(shared, larger)) + 1;
}

__global__ void __launch_bounds__(kRowThreads, 1) tell_rows(LogprobArguments a) {
  PAGEMILL_SHARED(bytes);
  RowShared& shared = *reinterpret_cast<RowShared*>(bytes);
  const int64_t row = blockIdx.x, count = a.num_top;
  const float* own = logits_of(a, row);
  uint64_t mine;
  const LogSum sum = log_sum_of(shared, own, a.vocab, mine);
  tell_ids(a, row, own, sum);
  if (a.ranks != nullptr) {
    const int32_t rank = rank_among(shared, own, a.vocab, own[a.ids[row * a.num_ids]]);
    if (threadIdx.x == 0) a.ranks[row] = rank;
  }
  if (count == 0) return;
  int64_t* ids = a.top_ids + row * count;
  float* logprobs = a.top_logprobs + row * count;
  const auto thread = static_cast<uint64_t>(threadIdx.x);
  if (!(sum.log_total >= 0)) {  // NaN: the row holds one, or +infinity, or nothing finite
    if (thread < static_cast<uint64_t>(count)) ids[thread] = 0, logprobs[thread] = sum.of(own[0]);
    return;
  }
  const Members members = list_from(shared, own, a.vocab, floor_of_top(mine, count));
  uint64_t many = 0;
  for_members(shared, members, [&](int64_t, float) { ++many; });
  many = block_sum(shared, many);
  const uint64_t wanted = static_cast<uint64_t>(count) < many ? static_cast<uint64_t>(count) : many;
  uint64_t first_rank = kNoRank;
  if (wanted < many)
    first_rank = first_rank_of_prefix(shared, members, wanted, [](float) { return uint64_t{1}; });
  sync_block();
  if (threadIdx.x == 0) shared.found[0] = 0;
  sync_block();
  for_members(shared, members, [&](int64_t id, float logit) {
    const uint64_t rank = rank_of(logit, id);
    if (rank >= first_rank) shared.bins[atomic_add(&shared.found[0], uint64_t{1})] = rank;
  });
  sync_block();
  if (thread < wanted) {
    const uint64_t rank = shared.bins[thread];
    int64_t place = 0;
    for (uint64_t i = 0; i < wanted; ++i) place += shared.bins[i] > rank;
    ids[place] = id_of_rank(rank);
    logprobs[place] = sum.of(own[id_of_rank(rank)]);
  } else if (thread < static_cast<uint64_t>(count)) {
    ids[thread] = 0;
    logprobs[thread] = -kInfinity;
  }
}

}  // namespace

// log_softmax(logits) at ids: logits [rows, vocab] float32 at a stride, ids and logprobs [rows, num_ids].
PAGEMILL_EXPORT int pagemill_logprobs_of(const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                                         const int64_t* ids, int64_t num_ids, float* logprobs, void* stream) {
  if (vocab < 1 || vocab > kMaxVocab) return kInvalidArgument;
  if (rows == 0 || num_ids == 0) return 0;
  const LogprobArguments arguments{logits, vocab, stride, nullptr, ids, num_ids, logprobs, 0, nullptr, nullptr, nullptr};
  PAGEMILL_LAUNCH(logprobs_of_ids, static_cast<unsigned>(rows), kRowThreads, sizeof(RowShared), stream)(arguments);
  return launch_status();
}

// Of each row the log probabilities of ids ([rows, num_ids]), the rank of the first of them (ranks [rows]: 1 and how many
// logits are larger; null: not asked) and the num_top (0 to 1024) most likely ids, larger logits first, of equal ones the
// lower id: top_ids and top_logprobs [rows, num_top]. Banned ids (-infinity) are none; what is missing is 0 and -infinity.
// A row with NaN or +infinity, or with nothing finite, has ids 0 and NaN. source: [rows], the logit row of each row, or
// null: its own number.
PAGEMILL_EXPORT int pagemill_logprobs_topn(const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                                           const int64_t* source, const int64_t* ids, int64_t num_ids, float* logprobs,
                                           int64_t num_top, int64_t* top_ids, float* top_logprobs, int32_t* ranks,
                                           void* stream) {
  if (vocab < 1 || vocab > kMaxVocab || num_top < 0 || num_top > kMaxTop) return kInvalidArgument;
  if (ranks != nullptr && num_ids < 1) return kInvalidArgument;
  if (rows == 0) return 0;
  const LogprobArguments arguments{logits,   vocab,   stride,  source,       ids,  num_ids,
                                   logprobs, num_top, top_ids, top_logprobs, ranks};
  PAGEMILL_LAUNCH(tell_rows, static_cast<unsigned>(rows), kRowThreads, sizeof(RowShared), stream)(arguments);
  return launch_status();
}

}  // namespace pagemill::cuda
