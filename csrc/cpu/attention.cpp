// Attention of one piece of work: gather the query rows, then per split of 256 keys and group of rows score all keys,
// turn the scores into probabilities in one sweep (no running rescale inside a split), weigh the values; merge. Scores and
// probabilities of a group stay in the first-level cache, K and V of a split in the second: they come from memory once
// for all rows of the piece, which is what makes grouped heads, prompt chunks and prefixes that sequences share cheap.
//
// Columns outside a row's range get probability exactly 0, so a tile that another row of the item needs leaves this
// row's bits alone. Slots past the sequence's end may hold NaN: such keys are overwritten by -inf after scoring, such
// values are zeroed in a copy of the tile before weighing.
#include "cpu/attention_softmax.h"
#include "cpu/kernels.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// One split for all rows: maxima, sums and weighted values into `result`; maximum -inf where a row sees no key.
template <typename T>
void attend_split(const Item& item, int64_t split, const Results& result) {
  const AttentionArgs& args = item.args;
  const int64_t base = split * kSplitTokens;
  const int64_t begin = item.begin > base ? item.begin : base;
  const int64_t end = item.end < base + kSplitTokens ? item.end : base + kSplitTokens;
  SplitTiles tiles(item, begin, end);
  const int64_t steps = args.type == ElementType::bf16 ? args.key_dim / 2 : args.key_dim;
  prepare_values(item, tiles);
  const int64_t group = Products<T>::rows_at_once(item.num_rows);
  for (int64_t row = 0; row < item.num_rows; row += group) {
    const int64_t rows = item.num_rows - row < group ? item.num_rows - row : group;
    const bool is_first = row == 0;
    const float* query = Products<T>::query_at(item.query, row, item.num_rows, steps);
    float *scores = item.scores + row * kSplitTokens, *value = result.value + row * item.value_stride;
    Products<T>::score(query, item.query_stride, rows, tiles.keys, tiles.count(), steps, scores, is_first);
    softmax<T>(item, scores, row, rows, tiles.begin * kTileTokens, end, tiles.count(), result);
    Products<T>::weigh(scores, rows, tiles.values, tiles.count(), item.value_stride, value, item.value_stride,
                       is_first);
  }
}

template <typename T>
void run_piece(const Item& item, const AttentionPiece& piece) {
  gather_query<T>(item);
  attend_split<T>(item, piece.split, item.results(piece.partial));
}

template <typename T>
void run_merge(const Item& item, const AttentionMerge& work) {
  const Results split = item.results(item.split), merged = item.results(item.merged);
  const float factor = exponent_factor(item.args);
  for (int64_t row = 0; row < item.num_rows; ++row) merged.maximum[row] = kNegativeInfinity;
  for (int64_t i = 0; i < work.num_parts; ++i) {
    const PartialRows& part = work.parts[i];
    merge(item.num_rows, item.value_stride, factor,
          {work.partials + part.value, work.partials + part.maximum, work.partials + part.sum}, merged);
  }
  if (work.split_begin < work.split_end) gather_query<T>(item);
  for (int64_t index = work.split_begin; index < work.split_end; ++index) {
    const bool is_first = work.num_parts == 0 && index == work.split_begin;
    attend_split<T>(item, index, is_first ? merged : split);
    if (!is_first) merge(item.num_rows, item.value_stride, factor, split, merged);
  }
  finish(item, merged);
}

}  // namespace

void attend_piece(const AttentionArgs& args, const AttentionPiece& piece, char* scratch) {
  Item item(args, piece.tiles, piece.num_tiles, piece.kv_head, scratch);
  const int64_t split_end = (piece.split + 1) * kSplitTokens;
  item.end = item.end < split_end ? item.end : split_end;
  if (args.type == ElementType::f32) {
    run_piece<F32>(item, piece);
  } else {
    run_piece<Bf16>(item, piece);
  }
}

void attend_merge(const AttentionArgs& args, const AttentionMerge& merge, char* scratch) {
  const Item item(args, &merge.tile, 1, merge.kv_head, scratch);
  if (args.type == ElementType::f32) {
    run_merge<F32>(item, merge);
  } else {
    run_merge<Bf16>(item, merge);
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
