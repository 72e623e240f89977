// The rows of one piece of work: where they come from and go to, what they see, and where they live meanwhile.
#pragma once

#include "cpu/attention_products.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

struct Row {
  int64_t query, out;  // elements from args.query and args.out
  int32_t begin, end;  // the keys it sees
  int32_t head;
};
static_assert(sizeof(Row) <= kRowRecordBytes, "scratch holds a record per row");

// Results of one split, or of all splits so far. A maximum of -inf: no key was seen, and the rest means nothing.
struct Results {
  float *value, *maximum, *sum;  // value [rows][value_stride]
};

struct Item {
  const AttentionArgs& args;
  int64_t kv_head, num_rows = 0, value_stride, query_stride;  // strides in words
  int64_t seq_len;         // of the first tile's sequence; pieces of several tiles end before it
  const int32_t* table;    // of the first tile's sequence; the others' agree with it on what is read
  int64_t begin, end;      // the keys that any row sees
  Row* rows;
  float* query;            // as gather_query lays it out
  float* scores;           // [rows][256]: scores, then probabilities
  float *split, *merged;   // results
  int32_t* values;         // copies of value tiles

  Item(const AttentionArgs& a, const QueryTile* tiles, int64_t num_tiles, int64_t head, char* memory)
      : args(a), kv_head(head), value_stride(padded_value_dim(a.value_dim)),
        query_stride((a.key_dim + 31) / 32 * 32), seq_len(a.seq_lens[tiles[0].seq]),
        table(a.block_tables + tiles[0].seq * a.table_stride) {
    int64_t total = 0;
    for (int64_t i = 0; i < num_tiles; ++i) total += (tiles[i].query_end - tiles[i].query_begin) * a.group;
    lay_out(memory, padded_rows(total));
    for (int64_t i = 0; i < num_tiles; ++i) add_rows(tiles[i]);
    begin = rows[0].begin;
    end = rows[0].end;
    for (int64_t i = 1; i < num_rows; ++i) {
      begin = rows[i].begin < begin ? rows[i].begin : begin;
      end = rows[i].end > end ? rows[i].end : end;
    }
  }

  Results results(float* memory) const {
    const PartialRows first = partial_rows(0, num_rows, args.value_dim);
    return {memory + first.value, memory + first.maximum, memory + first.sum};
  }

 private:
  void lay_out(char* memory, int64_t padded) {
    query = reinterpret_cast<float*>(memory);
    scores = query + padded * query_stride;
    split = scores + padded * kSplitTokens;
    merged = split + padded * partial_floats(args.value_dim);
    values = reinterpret_cast<int32_t*>(merged + padded * partial_floats(args.value_dim));
    rows = reinterpret_cast<Row*>(values + kSplitTokens * value_stride);
  }

  void add_rows(const QueryTile& tile) {
    const int64_t first_token = args.query_start[tile.seq], length = args.seq_lens[tile.seq];
    const int64_t first_position = length - (args.query_start[tile.seq + 1] - first_token);
    for (int64_t query = tile.query_begin; query < tile.query_end; ++query) {
      const KeyRange range = visible_keys(args, first_position + query, length);
      for (int64_t member = 0; member < args.group; ++member) {
        const int64_t head = kv_head * args.group + member, token = first_token + query;
        rows[num_rows++] = {token * args.query_token_stride + head * args.query_head_stride,
                            token * args.out_token_stride + head * args.out_head_stride,
                            static_cast<int32_t>(range.begin), static_cast<int32_t>(range.end),
                            static_cast<int32_t>(head)};
      }
    }
  }
};

// `count` entries of a query row, from `from` on, as a product takes them: float32, bf16 pairs as they come, or as two floats.
template <typename T>
inline void copy_query(const AttentionArgs& args, int64_t from, int64_t count, float* to) {
  if (args.type == ElementType::f32) {
    __builtin_memcpy(to, reinterpret_cast<const float*>(args.query) + from, size_t(count) * 4);
    return;
  }
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(args.query) + from;
  if (T::words_per_step == 1) {
    __builtin_memcpy(to, bits, size_t(count) * 2);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(bits[i]);
  }
}

// Rows as the products want them: one after another for AMX, otherwise in groups (query_place).
template <typename T>
void gather_query(const Item& item) {
  const AttentionArgs& args = item.args;
  if constexpr (T::whole_tiles) {
    __builtin_memset(item.query, 0, padded_rows(item.num_rows) * item.query_stride * 4);
    for (int64_t row = 0; row < item.num_rows; ++row) {
      copy_query<T>(args, item.rows[row].query, args.key_dim, item.query + row * item.query_stride);
    }
  } else {
    const int64_t depth = args.type == ElementType::f32 ? 1 : 2, group = kStepGroup * depth;
    for (int64_t row = 0; row < item.num_rows; ++row) {
      const QueryPlace place = query_place<T>(row, item.num_rows, args.key_dim / depth);
      float* to = item.query + place.first;
      for (int64_t first = 0; first < args.key_dim; first += group, to += place.stride) {
        const int64_t left = args.key_dim - first;
        copy_query<T>(args, item.rows[row].query + first, left < group ? left : group, to);
      }
    }
  }
}

// Addresses of the tiles [tile_begin, tile_end) of the item's kv head.
inline void find_tiles(const Item& item, const char* cache, int64_t block_stride, int64_t dim, int64_t tile_begin,
                       int64_t tile_end, const int32_t** tiles) {
  const AttentionArgs& args = item.args;
  const int64_t bytes = element_bytes(args.type), tiles_per_block = args.block_size / kTileTokens;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t block = item.table[tile / tiles_per_block];
    const int64_t inside = (item.kv_head * args.block_size + tile % tiles_per_block * kTileTokens) * dim;
    tiles[tile - tile_begin] = reinterpret_cast<const int32_t*>(cache + (block * block_stride + inside) * bytes);
  }
}

// The tiles of one split that hold keys any row sees, [begin, end). Each list goes on with kAhead that are read next:
// values follow keys, and the next split's keys follow values.
struct SplitTiles {
  int64_t begin, end;
  const int32_t* keys[kTableTiles];
  const int32_t* values[kTableTiles];

  SplitTiles(const Item& item, int64_t first_key, int64_t end_key)
      : begin(first_key / kTileTokens), end((end_key + kTileTokens - 1) / kTileTokens) {
    const AttentionArgs& args = item.args;
    const int64_t last = (item.end + kTileTokens - 1) / kTileTokens;
    const int64_t next = last < end + kAhead ? last : end + kAhead;
    find_tiles(item, args.key_cache, args.key_block_stride, args.key_dim, begin, end, keys);
    find_tiles(item, args.value_cache, args.value_block_stride, args.value_dim, begin, end, values);
    find_tiles(item, args.key_cache, args.key_block_stride, args.key_dim, end, next, values + count());
    for (int64_t i = 0; i < kAhead; ++i) {
      keys[count() + i] = values[i < count() ? i : 0];
      if (i >= next - end) values[count() + i] = values[count() - 1];
    }
  }

  int64_t count() const { return end - begin; }
};

// A copy of a value tile with its rows padded to value_stride words and tokens from num_tokens on zeroed.
void copy_values(const int32_t* tile, const Item& item, int64_t num_tokens, int32_t* to) {
  const int64_t pair = item.args.type == ElementType::bf16 ? 2 : 1, dim = item.args.value_dim;
  for (int64_t token = 0; token < kTileTokens; token += pair, tile += dim, to += item.value_stride) {
    const bool half = token + 1 == num_tokens && pair == 2;  // the first of a pair, in the low bits
    const int64_t used = token < num_tokens ? dim : 0;
    if (half) {
      for (int64_t d = 0; d < dim; ++d) to[d] = tile[d] & 0xffff;
    } else {
      __builtin_memcpy(to, tile, size_t(used) * 4);
    }
    __builtin_memset(to + used, 0, size_t(item.value_stride - used) * 4);
  }
}

// Replaces tiles that cannot be weighed as they lie by copies.
void prepare_values(const Item& item, SplitTiles& tiles) {
  const bool pad = item.args.value_dim != item.value_stride;
  for (int64_t i = 0; i < tiles.count(); ++i) {
    const int64_t left = item.seq_len - (tiles.begin + i) * kTileTokens;
    if (!pad && left >= kTileTokens) continue;
    int32_t* copy = item.values + i * kTileTokens * item.value_stride;
    copy_values(tiles.values[i], item, left < kTileTokens ? left : kTileTokens, copy);
    tiles.values[i] = copy;
  }
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
