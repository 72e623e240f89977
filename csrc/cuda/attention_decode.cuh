// Decode: few rows per kv head, any number of keys. Each warp takes 16 rows through one split of 256 keys with a ring of
// its own, so bytes are in flight all the time and no warp waits for another. A block's splits are folded in shared
// memory; what does not fit one block goes through the workspace, where merge_splits folds it.
#pragma once

#include "cuda/attention_plan.cuh"
#include "cuda/attention_softmax.cuh"

namespace pagemill::cuda {

template <typename C, int D>
struct DecodeShape {
  static constexpr int kWarps = D > 128 ? 2 : 4;  // so that 99 KiB suffice, which every chip has
  static constexpr int kPieceBytes = kPieceKeys * (D * static_cast<int>(sizeof(C)) + 16);
  static constexpr int kWanted = 22 * 1024 / kPieceBytes;  // slots for about 22 KiB on the way per warp
  static constexpr int kSlots = kWanted < 3 ? 3 : kWanted > 12 ? 12 : kWanted;
};

template <typename T, typename C, int D>
class DecodeBlock {
 public:
  using Shape = DecodeShape<C, D>;
  using Tiles = Stream<C, D, 1, Shape::kSlots>;
  static constexpr int kThreads = Shape::kWarps * kWarp;
  static constexpr int kWarpBytes = Tiles::kRingBytes + Queries<T, C, D>::kSharedBytes;
  static constexpr int kSumsBytes = 16 * D * 4;  // folded values of 16 rows
  static constexpr int kBytes = Shape::kWarps * kWarpBytes + kSumsBytes;  // and the plan's
  static_assert(Tiles::kRingBytes >= 16 * (D + 2) * 4, "a warp leaves its results in its ring");

  PAGEMILL_DEVICE DecodeBlock(const AttentionParams& params, unsigned char* shared)
      : params_(params),
        shared_(shared),
        mine_(shared + warp_id() * kWarpBytes),
        sums_(reinterpret_cast<float*>(shared + Shape::kWarps * kWarpBytes)) {}

  PAGEMILL_DEVICE void run(const DecodeItem& item) const {
    const Sequence sequence(params_, item.sequence);
    const DecodeWork work(params_, sequence, Shape::kWarps);
    const Exponent exponent(params_, item.kv_head);
    if (item.base >= 0) {
      const int split = item.group * Shape::kWarps + warp_id();
      if (split < work.num_splits) keep_split(sequence, work, item, split, exponent);
      return;
    }
    float top = kNothing, total = 0.0f;  // of this thread's row in fold_round
    for (int group = 0; group < work.num_groups; ++group) {
      const int first = group * Shape::kWarps, left = work.num_splits - first;
      const int count = left < Shape::kWarps ? left : Shape::kWarps;
      Gathered<C, D> gathered;
      gathered.clear();
      if (warp_id() < count) attend_split(sequence, work, item, first + warp_id(), exponent, gathered);
      leave_results(gathered);
      sync_block();
      fold_round(group == 0, count, exponent, top, total);
      sync_block();
    }
    write_rows(sequence, item, exponent, top, total);
  }

 private:
  // 16 rows through the keys they see of one split.
  PAGEMILL_DEVICE void attend_split(const Sequence& sequence, const DecodeWork& work, const DecodeItem& item, int split,
                                    const Exponent& exponent, Gathered<C, D>& gathered) const {
    const int first_row = item.row_tile * 16, row = first_row + lane_id() / 4;
    WarpKeys keys(params_, sequence, first_row);
    const int begin = (work.first_split + split) * kSplitKeys, end = begin + kSplitKeys;
    if (keys.any.begin < begin) keys.any.begin = begin;
    if (keys.any.end > end) keys.any.end = end;
    if (keys.any.end <= keys.any.begin) return;
    const Row rows[2] = {Row(params_, sequence, item.kv_head, row), Row(params_, sequence, item.kv_head, row + 8)};
    sync_warp();  // the ring's last readers
    Tiles stream(params_, sequence, item.kv_head, keys.any, shared_address(mine_), 0);
    const Queries<T, C, D> queries(params_, rows, mine_ + Tiles::kRingBytes);
    for (int tile = keys.any.begin / kTileKeys; tile * kTileKeys < keys.any.end; ++tile) {
      attend_tile<T, C, D>(stream, tile, queries, keys, exponent, gathered);
    }
    gathered.complete();
  }

  // One split's results to the workspace.
  PAGEMILL_DEVICE void keep_split(const Sequence& sequence, const DecodeWork& work, const DecodeItem& item, int split,
                                  const Exponent& exponent) const {
    Gathered<C, D> gathered;
    gathered.clear();
    attend_split(sequence, work, item, split, exponent, gathered);
    const int num_rows = sequence.rows(params_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.row_tile * 16 + half * 8 + lane_id() / 4;
      if (row >= num_rows) continue;
      const int64_t place =
          static_cast<int64_t>(item.kv_head) * params_.capacity + item.base + split * num_rows + row;
      float* values = params_.partials + place * params_.value_dim;
      gathered.each_pair(half, [&](int dim, float first, float second) {
        if (dim < params_.value_dim) *reinterpret_cast<FloatPair*>(values + dim) = {first, second};
      });
      if (lane_id() % 4 != 0) continue;
      params_.partial_sums[place] = {gathered.top[half], gathered.total[half]};
    }
  }

  // This warp's results into its ring: values [16, D], largest scores [16], totals [16].
  PAGEMILL_DEVICE void leave_results(const Gathered<C, D>& gathered) const {
    float* values = reinterpret_cast<float*>(mine_);
    sync_warp();  // the ring's last readers
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane_id() / 4;
      gathered.each_pair(half, [&](int dim, float first, float second) {
        values[row * D + dim] = first;
        values[row * D + dim + 1] = second;
      });
      values[16 * D + row] = gathered.top[half];
      values[16 * D + 16 + row] = gathered.total[half];
    }
  }

  static constexpr int kPerRow = kThreads / 16;  // threads of a row

  // The first `count` warps' results onto what earlier rounds gave.
  PAGEMILL_DEVICE void fold_round(bool first_round, int count, const Exponent& exponent, float& top,
                                  float& total) const {
    const int row = static_cast<int>(threadIdx.x) / kPerRow, place = static_cast<int>(threadIdx.x) % kPerRow;
    if (first_round) {
      for (int dim = place; dim < D; dim += kPerRow) sums_[row * D + dim] = 0.0f;
    }
    for (int warp = 0; warp < count; ++warp) {
      const float* values = reinterpret_cast<const float*>(shared_ + warp * kWarpBytes);
      const Fold fold(top, values[16 * D + row], exponent);
      top = fold.top;
      total = fold(total, values[16 * D + 16 + row]);
      for (int dim = place; dim < D; dim += kPerRow) {
        sums_[row * D + dim] = fold(sums_[row * D + dim], values[row * D + dim]);
      }
    }
  }

  PAGEMILL_DEVICE void write_rows(const Sequence& sequence, const DecodeItem& item, const Exponent& exponent, float top,
                                  float total) const {
    const int local = static_cast<int>(threadIdx.x) / kPerRow, place = static_cast<int>(threadIdx.x) % kPerRow;
    const Row row(params_, sequence, item.kv_head, item.row_tile * 16 + local);
    if (row.exists()) {
      const float factor = last_factor(params_, exponent, row.head, item.kv_head, top, total);
      T* out = out_row<T>(params_, row.token, row.head);
      for (int dim = 2 * place; dim < params_.value_dim; dim += 2 * kPerRow) {
        const float first = sums_[local * D + dim], second = sums_[local * D + dim + 1];
        write_pair(out, dim, row.sees_keys() ? first * factor : 0.0f, row.sees_keys() ? second * factor : 0.0f);
      }
    }
    sync_block();  // before the next item
  }

  const AttentionParams& params_;
  unsigned char* shared_;
  unsigned char* mine_;
  float* sums_;
};

// Tokens past the last sequence get zeros.
template <typename T>
PAGEMILL_DEVICE void clear_padding(const AttentionParams& params) {
  const int first = params.num_seqs > 0 ? params.query_start[params.num_seqs] : 0;
  const int pairs = params.value_dim / 2, per_token = params.num_query_heads * pairs;
  for (int token = first + static_cast<int>(blockIdx.x); token < params.num_tokens;
       token += static_cast<int>(gridDim.x)) {
    for (int i = static_cast<int>(threadIdx.x); i < per_token; i += static_cast<int>(blockDim.x)) {
      write_pair(out_row<T>(params, token, i / pairs), i % pairs * 2, 0.0f, 0.0f);
    }
  }
}

template <typename T, typename C, int D>
__global__ void __launch_bounds__(DecodeBlock<T, C, D>::kThreads) decode_attention(const AttentionParams params) {
  PAGEMILL_SHARED(shared);
  clear_padding<T>(params);
  const DecodePlan plan(params, shared + DecodeBlock<T, C, D>::kBytes);
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < params.num_seqs; i += static_cast<int>(blockDim.x)) {
      params.bases[i] = plan.base(i);
    }
  }
  const DecodeBlock<T, C, D> block(params, shared);
  for (int i = static_cast<int>(blockIdx.x); i < plan.num_items(); i += static_cast<int>(gridDim.x)) {
    block.run(plan.item(params, i));
  }
}

}  // namespace pagemill::cuda
