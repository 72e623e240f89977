// Folds what decode blocks left in the workspace: a block per (sequence, query head), a thread per value dim. Sequences
// that fitted one block each are done already.
#pragma once

#include "cuda/attention_plan.cuh"
#include "cuda/attention_softmax.cuh"

namespace pagemill::cuda {

constexpr int kSplitsAtOnce = 16;  // reads under way per thread

// One dim of one row, split by split. `stride`: partial rows from one split to the next.
PAGEMILL_DEVICE float fold_splits(const AttentionParams& params, const Exponent& exponent, int64_t place, int stride,
                                  int num_splits, int dim, float& top, float& total) {
  float sum = 0.0f;
  for (int first = 0; first < num_splits; first += kSplitsAtOnce) {
    FloatPair right[kSplitsAtOnce];
    float value[kSplitsAtOnce];
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      const int64_t from = place + static_cast<int64_t>(first + i) * stride;
      const bool exists = first + i < num_splits;
      right[i] = exists ? params.partial_sums[from] : FloatPair{kNothing, 0.0f};
      value[i] = exists ? params.partials[from * params.value_dim + dim] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      const Fold fold(top, right[i].first, exponent);
      top = fold.top;
      total = fold(total, right[i].second);
      sum = fold(sum, value[i]);
    }
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kMaxHeadSize) merge_splits(const AttentionParams params, int warps) {
  const int index = static_cast<int>(blockIdx.x) / params.num_query_heads;
  const int head = static_cast<int>(blockIdx.x) % params.num_query_heads, kv_head = head / params.group;
  const int base = params.bases[index], dim = static_cast<int>(threadIdx.x);
  if (base < 0 || dim >= params.value_dim) return;
  const Sequence sequence(params, index);
  const DecodeWork work(params, sequence, warps);
  const Exponent exponent(params, kv_head);
  const int num_rows = sequence.rows(params);
  for (int query = 0; query < sequence.num_queries; ++query) {
    const Row row(params, sequence, kv_head, query * params.group + head % params.group);
    const int64_t place = static_cast<int64_t>(kv_head) * params.capacity + base + query * params.group +
                          head % params.group;
    float top = kNothing, total = 0.0f;
    const float sum = fold_splits(params, exponent, place, num_rows, work.num_splits, dim, top, total);
    const float factor = last_factor(params, exponent, head, kv_head, top, total);
    out_row<T>(params, row.token, head)[dim] = round_to<T>(row.sees_keys() ? sum * factor + 0.0f : 0.0f);
  }
}

}  // namespace pagemill::cuda
