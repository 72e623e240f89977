// Attention of one work item: gather the query rows, then per split of 256 keys score all keys, turn a row's scores
// into probabilities in one sweep (no running rescale inside a split), weigh the values, merge. Scores and
// probabilities of a split stay in the first-level caches; K and V are read once per item for all its rows, which is
// what makes grouped heads and prompt chunks cheap.
//
// Columns outside a row's range get probability exactly 0, so a tile that another row of the item needs leaves this
// row's bits alone. Slots past the sequence's end may hold NaN: such keys are overwritten by -inf after scoring, such
// values are zeroed in a copy of the tile before weighing.
#include "cpu/attention_products.h"
#include "cpu/kernels.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
const float kNegativeInfinity = -__builtin_inff();

// What turns a score (or, with a softcap, the tanh of one) into an exponent of two.
inline float exponent_factor(const AttentionArgs& args) {
  return (args.softcap > 0 ? args.softcap : args.scale) * kLog2e;
}

// Where an item's rows live while it is worked on. Rows are 256 words apart in `scores`.
struct Scratch {
  float* query;
  int64_t query_stride;  // words
  float* scores;
  float* split;   // [rows][value] then [rows] maxima then [rows] sums: one split's result
  float* merged;  // likewise: what has been merged so far
  int32_t* values;
};

struct Rows {
  float *value, *maximum, *sum;
};

inline Rows rows_of(float* memory, int64_t rows, int64_t value_stride) {
  const int64_t padded = padded_rows(rows);
  return {memory, memory + padded * value_stride, memory + padded * (value_stride + 1)};
}

struct Item {
  const AttentionArgs& args;
  const AttentionItem& item;
  int64_t rows, seq_len, num_queries, first_token, value_stride;

  Item(const AttentionArgs& a, const AttentionItem& i)
      : args(a), item(i), rows((i.query_end - i.query_begin) * a.group), seq_len(a.seq_lens[i.seq]),
        num_queries(a.query_start[i.seq + 1] - a.query_start[i.seq]), first_token(a.query_start[i.seq]),
        value_stride(padded_value_dim(a.value_dim)) {}

  int64_t query_of(int64_t row) const { return item.query_begin + row / args.group; }
  int64_t head_of(int64_t row) const { return item.kv_head * args.group + row % args.group; }
  KeyRange visible(int64_t query) const {
    return visible_keys(args, seq_len - num_queries + query, seq_len);
  }
};

inline Scratch lay_out(char* memory, const Item& item) {
  const int64_t padded = padded_rows(item.rows), query_stride = (item.args.key_dim + 31) / 32 * 32;
  Scratch s;
  s.query_stride = query_stride;
  s.query = reinterpret_cast<float*>(memory);
  s.scores = s.query + padded * query_stride;
  s.split = s.scores + padded * kSplitTokens;
  s.merged = s.split + padded * partial_floats(item.args.value_dim);
  s.values = reinterpret_cast<int32_t*>(s.merged + padded * partial_floats(item.args.value_dim));
  return s;
}

// Rows as the products want them: float32, or bf16 pairs as they come.
template <typename T>
void gather_query(const Item& item, const Scratch& scratch) {
  const AttentionArgs& args = item.args;
  const int64_t row_bytes = scratch.query_stride * 4;
  if (T::whole_tiles) __builtin_memset(scratch.query, 0, padded_rows(item.rows) * row_bytes);
  for (int64_t row = 0; row < item.rows; ++row) {
    float* to = scratch.query + row * scratch.query_stride;
    const int64_t from = (item.first_token + item.query_of(row)) * args.query_token_stride +
                         item.head_of(row) * args.query_head_stride;
    if (args.type == ElementType::f32) {
      __builtin_memcpy(to, reinterpret_cast<const float*>(args.query) + from, args.key_dim * 4);
      continue;
    }
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(args.query) + from;
    if (T::words_per_step == 1) {
      __builtin_memcpy(to, bits, args.key_dim * 2);
    } else {
      for (int64_t d = 0; d < args.key_dim; ++d) to[d] = bf16_to_float(bits[d]);
    }
  }
}

// Addresses of the tiles [tile_begin, tile_end) of the item's kv head; entries past the end repeat the last one.
void find_tiles(const Item& item, const char* cache, int64_t block_stride, int64_t dim, int64_t tile_begin,
                int64_t tile_end, const int32_t** tiles) {
  const AttentionArgs& args = item.args;
  const int64_t bytes = element_bytes(args.type), tiles_per_block = args.block_size / kTileTokens;
  const int32_t* table = args.block_tables + item.item.seq * args.table_stride;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t block = table[tile / tiles_per_block];
    const int64_t inside = (item.item.kv_head * args.block_size + tile % tiles_per_block * kTileTokens) * dim;
    tiles[tile - tile_begin] = reinterpret_cast<const int32_t*>(cache + (block * block_stride + inside) * bytes);
  }
}

// A copy of a value tile with its rows padded to value_stride words and tokens from num_tokens on zeroed.
void copy_values(const int32_t* tile, const Item& item, int64_t num_tokens, int32_t* to) {
  const int64_t pair = item.args.type == ElementType::bf16 ? 2 : 1, dim = item.args.value_dim;
  for (int64_t step = 0; step < kTileTokens / pair; ++step) {
    int32_t* row = to + step * item.value_stride;
    for (int64_t d = 0; d < item.value_stride; ++d) {
      int32_t word = d < dim && step * pair < num_tokens ? tile[step * dim + d] : 0;
      if (pair == 2 && step * 2 + 1 >= num_tokens) word &= 0xffff;
      row[d] = word;
    }
  }
}

void prepare_values(const Item& item, int64_t tile_begin, int64_t tile_end, const Scratch& scratch,
                    const int32_t** tiles) {
  const bool pad = item.args.value_dim != item.value_stride;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t left = item.seq_len - tile * kTileTokens;
    if (!pad && left >= kTileTokens) continue;
    int32_t* copy = scratch.values + (tile - tile_begin) * kTileTokens * item.value_stride;
    copy_values(tiles[tile - tile_begin], item, left < kTileTokens ? left : kTileTokens, copy);
    tiles[tile - tile_begin] = copy;
  }
}

// Scores [0, columns) of one row become probabilities, in place; those outside [begin, end) become 0.
template <typename T>
void softmax_row(const AttentionArgs& args, float* row, int64_t columns, int64_t begin, int64_t end, float* maximum,
                 float* sum) {
  for (int64_t i = 0; i < begin; ++i) row[i] = kNegativeInfinity;
  for (int64_t i = end; i < columns; ++i) row[i] = kNegativeInfinity;
  if (args.softcap > 0) {
    const Vec inner = splat(args.scale / args.softcap);
    for (int64_t i = begin / kLanes * kLanes; i < end; i += kLanes) {
      const Vec raw = load(row + i);
      const Vec capped = tanh(raw * inner);
      store(row + i, raw == splat(kNegativeInfinity) ? raw : capped);
    }
  }
  Vec high = splat(kNegativeInfinity);
  for (int64_t i = 0; i < columns; i += kLanes) high = larger(load(row + i), high);
  float top = max_lanes(high);
  if (top == kNegativeInfinity) top = __builtin_nanf("");  // a row with keys and no finite score is broken, not empty
  *maximum = top;
  const Vec factor = splat(exponent_factor(args)), shift = splat(top);
  Vec total[16 / kLanes] = {};
  for (int64_t i = 0; i < columns; i += 16) {
    for (int64_t v = 0; v < 16 / kLanes; ++v) {
      const Vec p = exp2_nonpositive((load(row + i + v * kLanes) - shift) * factor);
      total[v] = total[v] + p;
      put_probabilities<T>(row, i + v * kLanes, p);
    }
  }
  for (int64_t v = 1; v < 16 / kLanes; ++v) total[0] = total[0] + total[v];
  *sum = sum_lanes(total[0]);
}

// One split for all rows: maxima, sums and weighted values into `result`; maximum -inf where a row sees no key.
template <typename T>
void attend_split(const Item& item, int64_t split, const Scratch& scratch, const Rows& result) {
  const AttentionArgs& args = item.args;
  const int64_t base = split * kSplitTokens;
  int64_t begin = item.visible(item.item.query_begin).begin, end = item.visible(item.item.query_end - 1).end;
  begin = begin > base ? begin : base;
  end = end < base + kSplitTokens ? end : base + kSplitTokens;
  const int64_t tile_begin = begin / kTileTokens, tile_end = (end + kTileTokens - 1) / kTileTokens;
  const int64_t num_tiles = tile_end - tile_begin, origin = tile_begin * kTileTokens;
  const int32_t* keys[kTableTiles];
  const int32_t* values[kTableTiles];
  find_tiles(item, args.key_cache, args.key_block_stride, args.key_dim, tile_begin, tile_end, keys);
  find_tiles(item, args.value_cache, args.value_block_stride, args.value_dim, tile_begin, tile_end, values);
  for (int64_t i = 0; i < kMaxSpan; ++i) {
    keys[num_tiles + i] = values[i < num_tiles ? i : 0];  // fetched while the last keys are scored
    values[num_tiles + i] = values[num_tiles - 1];
  }
  const int64_t steps = args.type == ElementType::bf16 ? args.key_dim / 2 : args.key_dim;
  Products<T>::score(scratch.query, scratch.query_stride, item.rows, keys, num_tiles, steps, scratch.scores);
  for (int64_t row = 0; row < item.rows; ++row) {
    const KeyRange range = item.visible(item.query_of(row));
    const int64_t from = range.begin > origin ? range.begin - origin : 0;
    const int64_t to = range.end < end ? range.end - origin : end - origin;
    if (to <= from) {
      result.maximum[row] = kNegativeInfinity;
      __builtin_memset(scratch.scores + row * kSplitTokens, 0, num_tiles * kTileTokens * 4);
      continue;
    }
    softmax_row<T>(args, scratch.scores + row * kSplitTokens, num_tiles * kTileTokens, from, to,
                   result.maximum + row, result.sum + row);
  }
  prepare_values(item, tile_begin, tile_end, scratch, values);
  Products<T>::weigh(scratch.scores, item.rows, values, num_tiles, item.value_stride, result.value,
                     item.value_stride);
}

inline float exp2_scalar(float x) { return exp2_nonpositive(splat(x))[0]; }

// Adds one split's rows to what the splits to its left gave.
void merge(int64_t rows, int64_t value_stride, float factor, const Rows& split, const Rows& merged) {
  for (int64_t row = 0; row < rows; ++row) {
    const float right = split.maximum[row], left = merged.maximum[row];
    if (right == kNegativeInfinity) continue;
    const float *from = split.value + row * value_stride;
    float* to = merged.value + row * value_stride;
    if (left == kNegativeInfinity) {
      __builtin_memcpy(to, from, value_stride * 4);
      merged.maximum[row] = right;
      merged.sum[row] = split.sum[row];
      continue;
    }
    const float top = right > left ? right : left;
    const float keep = exp2_scalar((left - top) * factor), add = exp2_scalar((right - top) * factor);
    merged.maximum[row] = top;
    merged.sum[row] = merged.sum[row] * keep + split.sum[row] * add;
    const Vec keeps = splat(keep), adds = splat(add);
    for (int64_t d = 0; d < value_stride; d += kLanes) {
      store(to + d, fused(load(from + d), adds, load(to + d) * keeps));
    }
  }
}

// Divides by the sum (with the sink in it) and writes the output rows; zeros where no key was seen.
void finish(const Item& item, const Rows& merged) {
  const AttentionArgs& args = item.args;
  for (int64_t row = 0; row < item.rows; ++row) {
    float* value = merged.value + row * item.value_stride;
    float factor = 0.0f;
    const bool seen = merged.maximum[row] != kNegativeInfinity;
    if (seen) {
      float sum = merged.sum[row], rescale = 1.0f;
      if (args.sinks != nullptr) {
        const float sink = args.sinks[item.head_of(row)] * kLog2e, left = merged.maximum[row] * exponent_factor(args);
        const float top = sink > left ? sink : left;
        rescale = exp2_scalar(left - top);
        sum = sum * rescale + exp2_scalar(sink - top);
      }
      factor = rescale / sum;
    }
    const int64_t to = (item.first_token + item.query_of(row)) * args.out_token_stride +
                       item.head_of(row) * args.out_head_stride;
    for (int64_t d = 0; d < args.value_dim; ++d) {
      const float x = seen ? value[d] * factor + 0.0f : 0.0f;  // + 0: a zero is positive whoever computed it
      if (args.type == ElementType::f32) {
        reinterpret_cast<float*>(args.out)[to + d] = x;
      } else {
        reinterpret_cast<uint16_t*>(args.out)[to + d] = float_to_bf16(x);
      }
    }
  }
}

template <typename T>
void attend_item(const Item& item, char* memory) {
  const AttentionArgs& args = item.args;
  const Scratch scratch = lay_out(memory, item);
  gather_query<T>(item, scratch);
  if (item.item.partials != nullptr) {
    attend_split<T>(item, item.item.split_begin, scratch, rows_of(item.item.partials, item.rows, item.value_stride));
    return;
  }
  const Rows split = rows_of(scratch.split, item.rows, item.value_stride);
  const Rows merged = rows_of(scratch.merged, item.rows, item.value_stride);
  for (int64_t row = 0; row < item.rows; ++row) merged.maximum[row] = kNegativeInfinity;
  for (int64_t index = item.item.split_begin; index < item.item.split_end; ++index) {
    attend_split<T>(item, index, scratch, split);
    merge(item.rows, item.value_stride, exponent_factor(args), split, merged);
  }
  finish(item, merged);
}

}  // namespace

void attend(const AttentionArgs& args, const AttentionItem& work, char* scratch) {
  const Item item(args, work);
  if (args.type == ElementType::f32) {
    attend_item<F32>(item, scratch);
  } else {
    attend_item<Bf16>(item, scratch);
  }
}

void merge_splits(const AttentionArgs& args, const AttentionItem& work, int64_t partial_stride, char* memory) {
  const Item item(args, work);
  const Rows merged = rows_of(lay_out(memory, item).merged, item.rows, item.value_stride);
  for (int64_t row = 0; row < item.rows; ++row) merged.maximum[row] = kNegativeInfinity;
  for (int64_t index = work.split_begin; index < work.split_end; ++index) {
    float* partial = work.partials + (index - work.split_begin) * partial_stride;
    merge(item.rows, item.value_stride, exponent_factor(args), rows_of(partial, item.rows, item.value_stride), merged);
  }
  finish(item, merged);
}

}  // namespace pagemill::PAGEMILL_LEVEL
