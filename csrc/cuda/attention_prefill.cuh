// Prefill: many rows per kv head. The warps of a block take 16 rows each through the same tiles of 64 keys, copied once
// into a ring they share. A split's results are folded, every 256 keys, onto what the splits before it gave, which lies
// in shared memory meanwhile: each thread reads only what it wrote.
#pragma once

#include "cuda/attention_softmax.cuh"

namespace pagemill::cuda {

template <typename C, int D>
struct PrefillShape {
  static constexpr int kWarps = D > 128 ? 2 : 4;
  static constexpr int kSlots = D > 64 ? 3 : 4;
};

template <typename T, typename C, int D>
class PrefillBlock {
 public:
  using Shape = PrefillShape<C, D>;
  using Tiles = Stream<C, D, Shape::kWarps, Shape::kSlots>;
  static constexpr int kThreads = Shape::kWarps * kWarp;
  static constexpr int kRows = Shape::kWarps * 16;
  static constexpr int kFoldedBytes = kRows * D * 4;
  static constexpr int kBytes = Tiles::kRingBytes + kFoldedBytes + Shape::kWarps * Queries<T, C, D>::kSharedBytes;

  // Rows [first_row, first_row + kRows) of a sequence's kv head.
  PAGEMILL_DEVICE static void run(const AttentionParams& params, const Sequence& sequence, int kv_head, int first_row,
                                  unsigned char* shared) {
    unsigned char* const folded = shared + Tiles::kRingBytes;
    const int warp_row = first_row + warp_id() * 16;
    const KeyRange block_keys = sequence.visible_rows(params, first_row, first_row + kRows);
    const Exponent exponent(params, kv_head);
    Gathered<C, D> gathered;
    gathered.clear();
    if (block_keys.end > block_keys.begin) {
      const WarpKeys keys(params, sequence, warp_row);
      Tiles stream(params, sequence, kv_head, block_keys, shared_address(shared), warp_id());
      const int row = warp_row + lane_id() / 4;
      const Row rows[2] = {Row(params, sequence, kv_head, row), Row(params, sequence, kv_head, row + 8)};
      const Queries<T, C, D> queries(params, rows, folded + kFoldedBytes + warp_id() * Queries<T, C, D>::kSharedBytes);
      attend_all(stream, block_keys, queries, keys, exponent, folded, gathered);
    }
    write_rows(params, sequence, kv_head, warp_row, exponent, gathered);
  }

 private:
  PAGEMILL_DEVICE static void attend_all(Tiles& stream, const KeyRange& block_keys, const Queries<T, C, D>& queries,
                                         const WarpKeys& keys, const Exponent& exponent, unsigned char* folded,
                                         Gathered<C, D>& gathered) {
    constexpr int kTilesPerSplit = kSplitKeys / kTileKeys;
    float top[2] = {kNothing, kNothing}, total[2] = {0.0f, 0.0f};  // of the splits before this one
    bool has_folded = false;
    const int end = ceil_div_int(block_keys.end, kTileKeys);
    for (int tile = block_keys.begin / kTileKeys; tile < end; ++tile) {
      attend_tile<T, C, D>(stream, tile, queries, keys, exponent, gathered);
      const bool last = tile + 1 == end;
      if (!last && (tile + 1) % kTilesPerSplit != 0) continue;
      gathered.complete();
      fold_split(has_folded, last, exponent, folded, gathered, top, total);
      has_folded = true;
      if (!last) gathered.clear();
    }
  }

  // Folds the finished split onto the ones before it: into shared memory, or for the last one into `gathered`.
  PAGEMILL_DEVICE static void fold_split(bool has_folded, bool last, const Exponent& exponent, unsigned char* folded,
                                         Gathered<C, D>& gathered, float (&top)[2], float (&total)[2]) {
    const Fold folds[2] = {Fold(top[0], gathered.top[0], exponent), Fold(top[1], gathered.top[1], exponent)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      gathered.top[half] = top[half] = folds[half].top;
      gathered.total[half] = total[half] = folds[half](total[half], gathered.total[half]);
    }
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      unsigned char* const place = folded + (j * kThreads + static_cast<int>(threadIdx.x)) * 16;
      Bytes16 left = {};
      if (has_folded) left = load_16(place);
      Bytes16 result;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gathered.sums[j][i] = folds[i / 2](bits_as<float>(left.word[i]), gathered.sums[j][i]);
        result.word[i] = bits_as<uint32_t>(gathered.sums[j][i]);
      }
      if (!last) store_16(place, result);
    }
  }

  PAGEMILL_DEVICE static void write_rows(const AttentionParams& params, const Sequence& sequence, int kv_head,
                                         int warp_row, const Exponent& exponent, const Gathered<C, D>& gathered) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row row(params, sequence, kv_head, warp_row + half * 8 + lane_id() / 4);
      if (!row.exists()) continue;
      const float factor = last_factor(params, exponent, row.head, kv_head, gathered.top[half], gathered.total[half]);
      T* out = out_row<T>(params, row.token, row.head);
      gathered.each_pair(half, [&](int dim, float first, float second) {
        if (dim >= params.value_dim) return;
        write_pair(out, dim, row.sees_keys() ? first * factor : 0.0f, row.sees_keys() ? second * factor : 0.0f);
      });
    }
  }
};

// Blocks in x number the row tiles of all sequences, with some numbers left over: sequence i's begin at
// floor(rows before it / kRows) + i. The last ones, which see most keys, come first.
template <typename T, typename C, int D>
__global__ void __launch_bounds__(PrefillBlock<T, C, D>::kThreads) prefill_attention(const AttentionParams params) {
  using Work = PrefillBlock<T, C, D>;
  PAGEMILL_SHARED(shared);
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const auto first_tile = [&](int i) { return params.query_start[i] * params.group / Work::kRows + i; };
  int low = 0, high = params.num_seqs - 1;  // the last sequence that begins at or before `tile`
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_tile(middle) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Sequence sequence(params, low);
  const int first_row = (tile - first_tile(low)) * Work::kRows;
  if (first_row >= sequence.rows(params) || sequence.is_decode(params)) return;
  Work::run(params, sequence, static_cast<int>(blockIdx.y), first_row, shared);
}

}  // namespace pagemill::cuda
