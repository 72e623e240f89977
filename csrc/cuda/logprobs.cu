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

__global__ void __launch_bounds__(kRowThreads, 1) logprobs_of_ids(const float* logits, int64_t vocab, int64_t stride,
                                                                  const int64_t* ids, int64_t num_ids, float* logprobs) {
  PAGEMILL_SHARED(bytes);
  const int64_t row = blockIdx.x;
  const float* own = logits + row * stride;
  uint64_t mine;
  const LogSum sum = log_sum_of(*reinterpret_cast<RowShared*>(bytes), own, vocab, mine);
  for (int64_t i = threadIdx.x; i < num_ids; i += kRowThreads)
    logprobs[row * num_ids + i] = sum.of(own[ids[row * num_ids + i]]);
}

__global__ void __launch_bounds__(kRowThreads, 1) top_logprobs(const float* logits, int64_t vocab, int64_t stride,
                                                               int64_t count, int64_t* ids, float* logprobs) {
  PAGEMILL_SHARED(bytes);
  RowShared& shared = *reinterpret_cast<RowShared*>(bytes);
  const int64_t row = blockIdx.x;
  const float* own = logits + row * stride;
  uint64_t mine;
  const LogSum sum = log_sum_of(shared, own, vocab, mine);
  const Members members = list_from(shared, own, vocab, floor_of_top(mine, count));
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
  const auto thread = static_cast<uint64_t>(threadIdx.x);
  if (thread < wanted) {
    const uint64_t rank = shared.bins[thread];
    int64_t place = 0;
    for (uint64_t i = 0; i < wanted; ++i) place += shared.bins[i] > rank;
    ids[row * count + place] = id_of_rank(rank);
    logprobs[row * count + place] = sum.of(own[id_of_rank(rank)]);
  } else if (thread < static_cast<uint64_t>(count)) {
    ids[row * count + static_cast<int64_t>(thread)] = -1;
    logprobs[row * count + static_cast<int64_t>(thread)] = -kInfinity;
  }
}

}  // namespace

// log_softmax(logits) at ids: logits [rows, vocab] float32 at a stride, ids and logprobs [rows, num_ids].
PAGEMILL_EXPORT int pagemill_logprobs_of(const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                                         const int64_t* ids, int64_t num_ids, float* logprobs, void* stream) {
  if (vocab < 1 || vocab > kMaxVocab) return kInvalidArgument;
  if (rows == 0 || num_ids == 0) return 0;
  PAGEMILL_LAUNCH(logprobs_of_ids, static_cast<unsigned>(rows), kRowThreads, sizeof(RowShared), stream)
  (logits, vocab, stride, ids, num_ids, logprobs);
  return launch_status();
}

// The `count` (1 to 1024) most likely ids of each row, larger logits first, of equal ones the lower id: ids and logprobs
// [rows, count]. Banned ids (-infinity) are none; what is missing is -1 and -infinity.
PAGEMILL_EXPORT int pagemill_logprobs_topn(const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                                           int64_t count, int64_t* ids, float* logprobs, void* stream) {
  if (vocab < 1 || vocab > kMaxVocab || count < 1 || count > kMaxTop) return kInvalidArgument;
  if (rows == 0) return 0;
  PAGEMILL_LAUNCH(top_logprobs, static_cast<unsigned>(rows), kRowThreads, sizeof(RowShared), stream)
  (logits, vocab, stride, count, ids, logprobs);
  return launch_status();
}

}  // namespace pagemill::cuda
