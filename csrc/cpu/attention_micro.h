// The two products of attention as register-blocked micro-kernels over tiles of 16 keys.
//
// A cached tile is a grid of 32-bit words: K [steps][16 keys], V [steps][dims]; a word is one float32, or a pair of
// bf16 along the axis that is summed over. A traits class says how a word is multiplied by a query row's entry:
//   F32    one fused multiply-add
//   Split  bf16 without dot-product instructions: shift and mask give two floats, two fused multiply-adds
//   Dot    bf16 by a dot-product instruction (vdpbf16ps, bfdot)
// Every (row, key) score and every (row, dim) output has one accumulator and takes its terms in storage order, so how
// many rows and tiles a call holds does not change a bit.
#pragma once

#include "cpu/attention.h"
#include "cpu/attention_math.h"
#include "cpu/lanes_bf16.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// Register budget: so many rows by a span of groups of 16 columns. Up to kNarrowRows rows take kMaxSpan at a time, so that
// enough sums are in flight; more take half of them: a row's entry that is loaded once serves the whole span, and twelve
// rows by two groups load 14 times for 24 multiplications, six by four 28 times.
// kHeld: vectors of columns that registers hold at a time, for all rows to pass over.
// A pair of bf16 that is split takes two dependent multiply-adds per accumulator, so it needs more of those in flight.
#if defined(__AVX512F__)
constexpr int64_t kFloatRows = 12, kPairRows = 12, kNarrowRows = 6, kMaxSpan = 4, kHeld = 4;
#elif defined(__AVX2__)
constexpr int64_t kFloatRows = 4, kPairRows = 6, kNarrowRows = 6, kMaxSpan = 1, kHeld = 2;
#elif defined(__aarch64__)
constexpr int64_t kFloatRows = 4, kPairRows = 4, kNarrowRows = 4, kMaxSpan = 1, kHeld = 4;
#else
constexpr int64_t kFloatRows = 2, kPairRows = 2, kNarrowRows = 2, kMaxSpan = 1, kHeld = 1;
#endif

constexpr int64_t kVecsPerGroup = 16 / kLanes;
constexpr int64_t kAhead = 4;  // tiles that are fetched before they are used: 8 KB of 64 dims in bf16
constexpr int64_t kTableTiles = kSplitTiles + kAhead;  // tile lists end with what is read next
static_assert(kAhead >= kMaxSpan, "a span's successors are in the list");

struct F32 {
  static constexpr bool is_rough = false;  // how exponentials are computed
  static constexpr int64_t max_rows = kFloatRows;
  static constexpr bool whole_tiles = false;  // rows are computed 16 at a time
  static constexpr int64_t words_per_step = 1;  // words of a query row or of probabilities per step
  static constexpr int64_t steps_per_tile = 16;
  static constexpr int parts = 1;  // floats in a word, which take their turns
  using Column = Vec;
  static Column column(IntVec words, int) { return (Vec)words; }
  using Entry = Vec;
  static Entry entry(const float* row, int) { return splat(row[0]); }
  static Vec step(Vec sum, Entry e, Column c) { return fused(e, c, sum); }
};

struct Split {
  static constexpr bool is_rough = true;  // how exponentials are computed
  static constexpr int64_t max_rows = kPairRows;
  static constexpr bool whole_tiles = false;
  static constexpr int64_t words_per_step = 2;
  static constexpr int64_t steps_per_tile = 8;
  static constexpr int parts = 2;
  using Column = Vec;
  static Column column(IntVec words, int part) { return (Vec)(part == 0 ? words << 16 : words & (int32_t)0xffff0000); }
  using Entry = Vec;
  static Entry entry(const float* row, int part) { return splat(row[part]); }
  static Vec step(Vec sum, Entry e, Column c) { return fused(e, c, sum); }
};

#if defined(PAGEMILL_BF16_DOT)
struct Dot {
  static constexpr bool is_rough = true;  // how exponentials are computed
  static constexpr int64_t max_rows = kPairRows;
  static constexpr bool whole_tiles = false;
  static constexpr int64_t words_per_step = 1;
  static constexpr int64_t steps_per_tile = 8;
  static constexpr int parts = 1;
  using Column = IntVec;
  static Column column(IntVec words, int) { return words; }
  using Entry = IntVec;
  static Entry entry(const float* row, int) {
    int32_t pair;
    __builtin_memcpy(&pair, row, sizeof pair);
    return IntVec{} + pair;
  }
  static Vec step(Vec sum, Entry e, Column c) { return dot_pairs(sum, e, c); }
};
#endif

// Into the second-level cache: it has more misses in flight than the first (Zen 4, blocks in random order from memory:
// 14 GB/s instead of 9), and the loads' way from there is hidden behind arithmetic.
inline void prefetch(const int32_t* address) { __builtin_prefetch(address, 0, 2); }

// One step of R rows by S groups of 16 columns; a row's entry lies row_stride words behind the one before.
template <typename T, int R, int S>
PAGEMILL_INLINE void multiply(const float* entries, int64_t row_stride, const int32_t* const (&columns)[S],
                              Vec (&sum)[R][S * kVecsPerGroup]) {
  constexpr int kVecs = S * kVecsPerGroup, kStep = kVecs < kHeld ? kVecs : kHeld;
#pragma GCC unroll 16
  for (int i = 0; i < kVecs / kStep * T::parts; ++i) {
    const int first = i / T::parts * kStep, part = i % T::parts;
    typename T::Column held[kStep];
#pragma GCC unroll 4
    for (int v = 0; v < kStep; ++v) {
      const int32_t* words = columns[(first + v) / kVecsPerGroup] + (first + v) % kVecsPerGroup * kLanes;
      held[v] = T::column(load_words(words), part);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename T::Entry entry = T::entry(entries + r * row_stride, part);
#pragma GCC unroll 4
      for (int v = 0; v < kStep; ++v) sum[r][first + v] = T::step(sum[r][first + v], entry, held[v]);
    }
  }
}

// Query rows lie in groups of rows that are scored together, [group of steps][row][steps of the group], so that one
// address with constant distances reaches them all.
constexpr int64_t kStepGroup = 16;

// How `rows` rows are cut: into groups of so many, the last one the rest.
template <typename T>
inline int64_t rows_per_group(int64_t rows) {
  const int64_t groups = (rows + T::max_rows - 1) / T::max_rows;
  return groups == 0 ? 1 : (rows + groups - 1) / groups;
}

// Where the step groups of row `row` begin, in words from the first row's, and how far apart they lie.
struct QueryPlace {
  int64_t first, stride;
};

template <typename T>
inline QueryPlace query_place(int64_t row, int64_t rows, int64_t steps) {
  constexpr int64_t kWords = kStepGroup * T::words_per_step;
  const int64_t per_group = rows_per_group<T>(rows), begin = row / per_group * per_group;
  const int64_t count = rows - begin < per_group ? rows - begin : per_group;
  const int64_t row_words = (steps + kStepGroup - 1) / kStepGroup * kWords;
  return {begin * row_words + (row - begin) * kWords, count * kWords};
}

// scores[s][r][key] for R rows and S tiles; `next` are the tiles to fetch meanwhile.
template <typename T, int R, int S>
inline void score_tiles(const float* query, const int32_t* const* tiles, const int32_t* const* next, int64_t steps,
                        float* scores) {
  constexpr int64_t kWords = kStepGroup * T::words_per_step;
  Vec sum[R][S * kVecsPerGroup] = {};
  for (int64_t first = 0; first < steps; first += kStepGroup, query += R * kWords) {
    const int64_t end = steps - first < kStepGroup ? steps : first + kStepGroup;
    const float* entry = query;
    for (int64_t step = first; step < end; ++step, entry += T::words_per_step) {
      const int32_t* columns[S];
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        prefetch(next[s] + step * 16);
        columns[s] = tiles[s] + step * 16;
      }
      multiply<T, R, S>(entry, kWords, columns, sum);
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < S; ++s) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecsPerGroup; ++v) {
        store(scores + (s * R + r) * 16 + v * kLanes, sum[r][s * kVecsPerGroup + v]);
      }
    }
  }
}

// out[r][0 .. S*16) over tiles [0, num_tiles), from probabilities[tile][r][entries of a tile].
template <typename T, int R, int S>
inline void weigh_tiles(const float* probabilities, const int32_t* const* tiles, const int32_t* const* next,
                        int64_t num_tiles, int64_t value_stride, float* out, int64_t out_stride) {
  constexpr int64_t kWords = T::steps_per_tile * T::words_per_step;
  Vec sum[R][S * kVecsPerGroup] = {};
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int32_t* words = tiles[tile];
    const int32_t* ahead = next[tile];
    const float* rows = probabilities + tile * R * kWords;
    for (int64_t step = 0; step < T::steps_per_tile; ++step) {
      const int32_t* columns[S];
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        prefetch(ahead + step * value_stride + s * 16);
        columns[s] = words + step * value_stride + s * 16;
      }
      multiply<T, R, S>(rows + step * T::words_per_step, kWords, columns, sum);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < S * kVecsPerGroup; ++v) store(out + r * out_stride + v * kLanes, sum[r][v]);
  }
}

// Calls use<R>() for the compile-time R equal to `rows`, at most the R it is called with.
template <int R, typename Use>
inline void with_rows(int64_t rows, const Use& use) {
  if (rows == R) {
    use.template operator()<R>();
  } else if constexpr (R > 1) {
    with_rows<R - 1>(rows, use);
  }
}

// The widest span that so many rows take, of so many groups of columns that are left.
inline int64_t span_of(int64_t rows, int64_t left) {
  const int64_t widest = rows > kNarrowRows ? kMaxSpan / 2 : kMaxSpan;
  return left >= widest ? widest : left >= 2 && widest > 2 ? 2 : 1;
}

// Calls use<S>() for the compile-time S equal to `span`, one that span_of may give for R rows.
template <int R, typename Use>
inline void with_span(int64_t span, const Use& use) {
  if constexpr (kMaxSpan >= 4 && R <= kNarrowRows) {
    if (span == 4) return use.template operator()<4>();
  }
  if constexpr (kMaxSpan >= 2) {
    if (span == 2) return use.template operator()<2>();
  }
  use.template operator()<1>();
}

// Scores of one group of rows against num_tiles tiles; kAhead more in the list follow, which the first group fetches.
template <typename T>
void score_rows(const float* query, int64_t rows, const int32_t* const* tiles, int64_t num_tiles, int64_t steps,
                float* scores, bool is_first) {
  with_rows<T::max_rows>(rows, [&]<int R>() {
    for (int64_t tile = 0; tile < num_tiles;) {
      const int64_t span = span_of(R, num_tiles - tile);
      const int32_t* const* next = tiles + tile + (is_first ? kAhead : 0);
      with_span<R>(span, [&]<int S>() {
        score_tiles<T, R, S>(query, tiles + tile, next, steps, scores + tile * R * 16);
      });
      tile += span;
    }
  });
}

// Weighted values of one group of rows; value_stride (words per step) is a multiple of 16. kAhead more tiles follow.
template <typename T>
void weigh_rows(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                int64_t value_stride, float* out, int64_t out_stride, bool is_first) {
  with_rows<T::max_rows>(rows, [&]<int R>() {
    for (int64_t dim = 0; dim < value_stride;) {
      const int64_t span = span_of(R, (value_stride - dim) / 16);
      const int32_t* shifted[kTableTiles];
      for (int64_t t = 0; t < num_tiles + kAhead; ++t) shifted[t] = tiles[t] + dim;
      const int32_t* const* next = shifted + (is_first ? kAhead : 0);
      with_span<R>(span, [&]<int S>() {
        weigh_tiles<T, R, S>(probabilities, shifted, next, num_tiles, value_stride, out + dim, out_stride);
      });
      dim += span * 16;
    }
  });
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
