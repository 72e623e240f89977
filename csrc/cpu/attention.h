// Attention over the paged cache: what one call takes, and how its work is cut.
//
// A query row is one (token, head). Keys are cut into splits of 256, anchored at absolute position 0. Within a split
// a row's scores, its maximum, its probabilities and its weighted values are computed in one fixed order; the
// splits' results are merged from left to right. Who computes a split, and beside which other rows, changes nothing.
#pragma once

#include "cpu/types.h"

namespace pagemill {

constexpr int64_t kSplitTokens = 256;
constexpr int64_t kSplitTiles = kSplitTokens / kTileTokens;

struct AttentionArgs {
  const char* query;             // [num_tokens, num_query_heads, key_dim]
  char* out;                     // [num_tokens, num_query_heads, value_dim]
  const char* key_cache;         // [num_blocks, num_kv_heads, block_size, key_dim], tiles as in cache.h
  const char* value_cache;       // [num_blocks, num_kv_heads, block_size, value_dim]
  const int32_t* block_tables;   // [num_seqs, max_blocks]
  const int32_t* query_start;    // [num_seqs + 1]
  const int32_t* seq_lens;       // [num_seqs]
  const float* sinks;            // [num_query_heads] or null: a logit that takes part in the sum and has no value
  int64_t table_stride;
  int64_t query_token_stride, query_head_stride;  // elements
  int64_t out_token_stride, out_head_stride;      // elements
  int64_t key_block_stride, value_block_stride;   // elements
  int64_t num_kv_heads, group, block_size, key_dim, value_dim;  // group: query heads per kv head
  int64_t window, chunk;         // 0: none. A query at p sees keys from p - window + 1, and from p / chunk * chunk
  float scale, softcap;          // softcap 0: none
  bool causal;
  ElementType type;              // of query, caches and out
};

// Queries [query_begin, query_end) of one sequence, counted from its first in this batch. Its rows: every query by
// every head of one kv head's group.
struct QueryTile {
  int32_t seq, query_begin, query_end;
};

// One split of one kv head, for the rows of tiles whose block tables agree on that split. More than one tile: the split
// is whole and every row sees all of it.
struct AttentionPiece {
  const QueryTile* tiles;
  int32_t num_tiles, kv_head, split;
  float* partial;  // where the rows' results go: values, then maxima, then sums (partial_rows)
};

// Where one tile's rows of one split lie in what pieces wrote, in floats from the kv head's first.
struct PartialRows {
  int64_t value, maximum, sum;
};

// One tile, one kv head: merges its leftmost splits, which pieces have computed, then computes and merges splits
// [split_begin, split_end), and writes the output rows.
struct AttentionMerge {
  QueryTile tile;
  int32_t kv_head, num_parts;
  const PartialRows* parts;
  float* partials;
  int32_t split_begin, split_end;
};

// One row's result of one split: its largest score (-inf: no key), sum and weighted values.
static inline int64_t padded_value_dim(int64_t value_dim) { return (value_dim + 15) / 16 * 16; }
static inline int64_t partial_floats(int64_t value_dim) { return padded_value_dim(value_dim) + 16; }

// Rows in scratch are padded to whole AMX tiles.
static inline int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

// Row `row` of `rows` in a piece's partial, from its first float.
static inline PartialRows partial_rows(int64_t row, int64_t rows, int64_t value_dim) {
  const int64_t stride = padded_value_dim(value_dim), padded = padded_rows(rows);
  return {row * stride, padded * stride + row, padded * (stride + 1) + row};
}

constexpr int64_t kRowRecordBytes = 64;  // what scratch keeps of a row beside its numbers

static inline int64_t attention_scratch_bytes(int64_t rows, int64_t key_dim, int64_t value_dim) {
  const int64_t padded = padded_rows(rows);
  const int64_t query = padded * ((key_dim + 31) / 32 * 32) * 4, scores = padded * kSplitTokens * 4;
  const int64_t split = padded * partial_floats(value_dim) * 4;
  const int64_t values = kSplitTokens * padded_value_dim(value_dim) * 4;
  return query + scores + 2 * split + values + padded * kRowRecordBytes;
}

// The keys a query at `position` sees: [begin, end), clamped to the sequence; empty when end <= begin.
struct KeyRange {
  int64_t begin, end;
};

static inline KeyRange visible_keys(const AttentionArgs& args, int64_t position, int64_t seq_len) {
  int64_t begin = 0;
  if (args.window > 0 && position - args.window + 1 > begin) begin = position - args.window + 1;
  if (args.chunk > 0 && position > 0 && position / args.chunk * args.chunk > begin) {
    begin = position / args.chunk * args.chunk;
  }
  const int64_t end = args.causal ? position + 1 : seq_len;
  return {begin, end < seq_len ? end : seq_len};
}

}  // namespace pagemill
