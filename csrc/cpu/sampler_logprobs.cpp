// Log probabilities of given ids and of the most likely ones, of one row of logits after the other.
#include "cpu/kernels.h"
#include "cpu/sampler_row.h"
#include "cpu/scratch.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr float kNothing = -40.0f;  // beside 1, the sum of a million e^-40 is lost in float32

// e^d for d from -80 to 0, smaller ones counting as -80; the reduction and series of lanes_math.h's exp.
PAGEMILL_INLINE Vec decayed(Vec d) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  d = larger(d, splat(-80.0f));
  const Vec shifted = fused(d, splat(1.44269504f), splat(kRound));
  const Vec whole = shifted - kRound;
  Vec r = fused(whole, splat(-0.693359375f), d);
  r = fused(whole, splat(2.12194440e-4f), r);
  Vec sum = fused(splat(1.0f / 5040), r, splat(1.0f / 720));
  sum = fused(sum, r, splat(1.0f / 120));
  sum = fused(sum, r, splat(1.0f / 24));
  sum = fused(sum, r, splat(1.0f / 6));
  sum = fused(sum, r, splat(0.5f));
  sum = fused(sum, r, splat(1.0f));
  sum = fused(sum, r, splat(1.0f));
  return (Vec)((WordVec)sum + ((WordVec)shifted << 23));
}

// The logarithm of the sum of e^(logit - max), the sum in float64 and in one order.
double log_total(const Row& row) {
  float copy[kBlock];
  PartDouble sums[2] = {};
  for (int64_t b = 0; b < row.blocks; ++b) {
    row.fetch_next(b);
    if (row.block_max[b] - row.max <= kNothing) continue;
    const float* block = row.block(b, copy);
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec e = decayed(load(block + i) - row.max);
      sums[0] += widen(e, 0);
      sums[1] += widen(e, 1);
    }
  }
  const PartDouble sum = sums[0] + sums[1];
  double total = 0;
  for (int64_t i = 0; i < kLanes / 2; ++i) total += sum[i];
  return __builtin_log(total);
}

// 1 for the most likely id; equal ones share a rank.
int32_t rank_of(const Row& row, float logit) {
  float copy[kBlock];
  int64_t rank = 1;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (row.block_max[b] <= logit) continue;
    const float* block = row.block(b, copy);
    for (int64_t i = 0; i < kBlock; i += kLanes) rank += count(above(load(block + i), splat(logit)));
  }
  return int32_t(rank);
}

void tell_row(Row& row, const LogprobArgs& a, int64_t r) {
  const bool is_sound = scan(row) && is_finite(row.max);
  const double log_sum = is_sound ? log_total(row) : double(__builtin_nanf(""));
  auto logprob = [&](float logit) { return float(double(logit) - double(row.max) - log_sum); };
  const int64_t* ids = a.ids + r * a.num_ids;
  for (int64_t i = 0; i < a.num_ids; ++i) a.logprobs[r * a.num_ids + i] = logprob(row.logits[ids[i]]);
  if (a.ranks != nullptr) a.ranks[r] = rank_of(row, row.logits[ids[0]]);
  if (a.num_top == 0) return;
  Candidates& c = row.candidates;
  c.count = 0;
  if (is_sound) keep_top_k(row, a.num_top);
  rank_all(c);
  for (int64_t i = 0; i < a.num_top; ++i) {
    const bool is_there = i < c.count;
    a.top_ids[r * a.num_top + i] = is_there ? c.id[i] : 0;
    a.top_logprobs[r * a.num_top + i] = is_there ? logprob(c.logit[i]) : is_sound ? -kInfinity : __builtin_nanf("");
  }
}

}  // namespace

void logprobs_of(const LogprobArgs& args, int64_t row_begin, int64_t row_end) {
  Row row = make_row(args.vocab, static_cast<char*>(thread_scratch(size_t(row_bytes(args.vocab)))));
  auto logits_of = [&](int64_t r) { return args.logits + (args.source == nullptr ? r : args.source[r]) * args.stride; };
  for (int64_t r = row_begin; r < row_end; ++r) {
    row.logits = logits_of(r);
    row.next = r + 1 < row_end ? logits_of(r + 1) : nullptr;
    tell_row(row, args, r);
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
