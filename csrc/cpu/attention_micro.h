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

// Register budget: so many rows by kMaxSpan groups of 16 columns. A pair of bf16 that is split takes two dependent
// multiply-adds per accumulator, so it needs more of those in flight.
#if defined(__AVX512F__)
constexpr int64_t kFloatRows = 6, kPairRows = 6, kMaxSpan = 4;
#elif defined(__AVX2__)
constexpr int64_t kFloatRows = 4, kPairRows = 6, kMaxSpan = 1;
#elif defined(__aarch64__)
constexpr int64_t kFloatRows = 4, kPairRows = 4, kMaxSpan = 1;
#else
constexpr int64_t kFloatRows = 2, kPairRows = 2, kMaxSpan = 1;
#endif

constexpr int64_t kVecsPerGroup = 16 / kLanes;
constexpr int64_t kAhead = 4;  // tiles that are fetched before they are used: 8 KB of 64 dims in bf16
constexpr int64_t kTableTiles = kSplitTiles + kAhead;  // tile lists end with what is read next
static_assert(kAhead >= kMaxSpan, "a span's successors are in the list");

struct F32 {
  static constexpr int64_t max_rows = kFloatRows;
  static constexpr bool whole_tiles = false;  // rows are computed 16 at a time
  static constexpr int64_t words_per_step = 1;  // words of a query row or of probabilities per step
  static constexpr int64_t steps_per_tile = 16;
  struct Column {
    Vec value;
  };
  static Column column(IntVec words) { return {(Vec)words}; }
  static Vec step(Vec sum, const float* row, Column c) { return fused(splat(row[0]), c.value, sum); }
};

struct Split {
  static constexpr int64_t max_rows = kPairRows;
  static constexpr bool whole_tiles = false;
  static constexpr int64_t words_per_step = 2;
  static constexpr int64_t steps_per_tile = 8;
  struct Column {
    Vec even, odd;
  };
  static Column column(IntVec words) { return {(Vec)(words << 16), (Vec)(words & (int32_t)0xffff0000)}; }
  static Vec step(Vec sum, const float* row, Column c) {
    return fused(splat(row[1]), c.odd, fused(splat(row[0]), c.even, sum));
  }
};

#if defined(PAGEMILL_BF16_DOT)
struct Dot {
  static constexpr int64_t max_rows = kPairRows;
  static constexpr bool whole_tiles = false;
  static constexpr int64_t words_per_step = 1;
  static constexpr int64_t steps_per_tile = 8;
  struct Column {
    IntVec pairs;
  };
  static Column column(IntVec words) { return {words}; }
  static Vec step(Vec sum, const float* row, Column c) {
    int32_t pair;
    __builtin_memcpy(&pair, row, sizeof pair);
    return dot_pairs(sum, IntVec{} + pair, c.pairs);
  }
};
#endif

// Into the second-level cache: it has more misses in flight than the first (Zen 4, blocks in random order from memory:
// 14 GB/s instead of 9), and the loads' way from there is hidden behind arithmetic.
inline void prefetch(const int32_t* address) { __builtin_prefetch(address, 0, 2); }

// scores[r][s * 16 + key] for R rows and S tiles; `next` are the tiles to fetch meanwhile.
template <typename T, int R, int S>
inline void score_tiles(const float* query, int64_t query_stride, const int32_t* const* tiles,
                        const int32_t* const* next, int64_t steps, float* scores) {
  Vec sum[R][S * kVecsPerGroup] = {};
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      prefetch(next[s] + step * 16);
#pragma GCC unroll 4
      for (int v = 0; v < kVecsPerGroup; ++v) {
        const typename T::Column column = T::column(load_words(tiles[s] + step * 16 + v * kLanes));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          Vec& acc = sum[r][s * kVecsPerGroup + v];
          acc = T::step(acc, query + r * query_stride + step * T::words_per_step, column);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < S * kVecsPerGroup; ++v) store(scores + r * 256 + v * kLanes, sum[r][v]);
  }
}

// out[r][0 .. S*16) over tiles [0, num_tiles): probabilities of tile t start at row word t * 16 (or 8 for Dot).
template <typename T, int R, int S>
inline void weigh_tiles(const float* probabilities, const int32_t* const* tiles, const int32_t* const* next,
                        int64_t num_tiles, int64_t value_stride, float* out, int64_t out_stride) {
  Vec sum[R][S * kVecsPerGroup] = {};
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int32_t* words = tiles[tile];
    const int32_t* ahead = next[tile];
    const float* rows = probabilities + tile * T::steps_per_tile * T::words_per_step;
    for (int64_t step = 0; step < T::steps_per_tile; ++step) {
#pragma GCC unroll 4
      for (int s = 0; s < S; ++s) {
        prefetch(ahead + step * value_stride + s * 16);
#pragma GCC unroll 4
        for (int v = 0; v < kVecsPerGroup; ++v) {
          const typename T::Column column =
              T::column(load_words(words + step * value_stride + s * 16 + v * kLanes));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            Vec& acc = sum[r][s * kVecsPerGroup + v];
            acc = T::step(acc, rows + r * 256 + step * T::words_per_step, column);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
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

template <typename T>
struct ScoreCall {
  const float* query;
  int64_t query_stride;
  const int32_t* const* tiles;
  const int32_t* const* next;
  int64_t steps, span;
  float* scores;
  template <int R>
  void operator()() const {
    if (span == kMaxSpan) {
      score_tiles<T, R, kMaxSpan>(query, query_stride, tiles, next, steps, scores);
    } else {
      score_tiles<T, R, 1>(query, query_stride, tiles, next, steps, scores);
    }
  }
};

// Scores of `rows` rows against num_tiles tiles; kAhead more in the list are what follows.
template <typename T>
void score_rows(const float* query, int64_t query_stride, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
           int64_t steps, float* scores) {
  for (int64_t tile = 0; tile < num_tiles;) {
    const int64_t span = num_tiles - tile >= kMaxSpan ? kMaxSpan : 1;
    for (int64_t row = 0; row < rows; row += T::max_rows) {
      const int64_t count = rows - row < T::max_rows ? rows - row : T::max_rows;
      const int32_t* const* next = tiles + tile + (row ? 0 : kAhead);
      with_rows<T::max_rows>(count, ScoreCall<T>{query + row * query_stride, query_stride, tiles + tile, next, steps,
                                                 span, scores + row * 256 + tile * 16});
    }
    tile += span;
  }
}

template <typename T>
struct WeighCall {
  const float* probabilities;
  const int32_t* const* tiles;
  const int32_t* const* next;
  int64_t num_tiles, value_stride, span;
  float* out;
  int64_t out_stride;
  template <int R>
  void operator()() const {
    if (span == kMaxSpan) {
      weigh_tiles<T, R, kMaxSpan>(probabilities, tiles, next, num_tiles, value_stride, out, out_stride);
    } else {
      weigh_tiles<T, R, 1>(probabilities, tiles, next, num_tiles, value_stride, out, out_stride);
    }
  }
};

// Weighted values of `rows` rows; value_stride (words per step) is a multiple of 16. kAhead more tiles follow.
template <typename T>
void weigh_rows(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
           int64_t value_stride, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < rows; row += T::max_rows) {
    const int64_t count = rows - row < T::max_rows ? rows - row : T::max_rows;
    for (int64_t dim = 0; dim < value_stride;) {
      const int64_t span = (value_stride - dim) / 16 >= kMaxSpan ? kMaxSpan : 1;
      const int32_t* shifted[kTableTiles];
      for (int64_t t = 0; t < num_tiles + kAhead; ++t) shifted[t] = tiles[t] + dim;
      const int32_t* const* next = shifted + (row ? 0 : kAhead);
      with_rows<T::max_rows>(count, WeighCall<T>{probabilities + row * 256, shifted, next, num_tiles, value_stride,
                                                 span, out + row * out_stride + dim, out_stride});
      dim += span * 16;
    }
  }
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
