// Which micro-kernels a level uses for bf16, behind one pair of calls.
#pragma once

#include "cpu/attention_micro.h"
#if defined(__AMX_BF16__) || defined(PAGEMILL_AMX_EMULATED)
#include "cpu/attention_amx.h"
#endif

namespace pagemill::PAGEMILL_LEVEL {
namespace {

#if defined(__AMX_BF16__) || defined(PAGEMILL_AMX_EMULATED)
using Bf16 = Amx;
#elif defined(PAGEMILL_BF16_DOT)
using Bf16 = Dot;
#else
using Bf16 = Split;
#endif

// rows_at_once: how many of a piece's rows make a group; query_at: a group's query rows; score, weigh: of one group.
template <typename T>
struct Products {
  static int64_t rows_at_once(int64_t rows) { return rows_per_group<T>(rows); }
  static const float* query_at(const float* query, int64_t row, int64_t rows, int64_t steps) {
    return query + query_place<T>(row, rows, steps).first;
  }
  static void score(const float* query, int64_t, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                    int64_t steps, float* scores, bool first) {
    score_rows<T>(query, rows, tiles, num_tiles, steps, scores, first);
  }
  static void weigh(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                    int64_t value_stride, float* out, int64_t out_stride, bool first) {
    weigh_rows<T>(probabilities, rows, tiles, num_tiles, value_stride, out, out_stride, first);
  }
};

#if defined(__AMX_BF16__) || defined(PAGEMILL_AMX_EMULATED)
template <>
struct Products<Amx> {
  static int64_t rows_at_once(int64_t rows) { return rows; }
  static const float* query_at(const float* query, int64_t, int64_t, int64_t) { return query; }
  static void score(const float* query, int64_t query_stride, int64_t rows, const int32_t* const* tiles,
                    int64_t num_tiles, int64_t steps, float* scores, bool) {
    score_amx(query, query_stride, rows, tiles, num_tiles, steps, scores);
  }
  static void weigh(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                    int64_t value_stride, float* out, int64_t out_stride, bool) {
    weigh_amx(probabilities, rows, tiles, num_tiles, value_stride, out, out_stride);
  }
};
#endif

// How a group's scores and probabilities lie, in words: a tile's row is 16 scores, then 8 or 16 words of probabilities.
struct Grid {
  int64_t score_row, score_tile, probability_row, probability_tile;
};

template <typename T>
inline Grid grid_of(int64_t rows) {
  constexpr int64_t kWords = T::steps_per_tile * T::words_per_step;
  if (T::whole_tiles) return {kSplitTokens, 16, kSplitTokens, kWords};
  return {16, 16 * rows, kWords, kWords * rows};
}

// Stores the n-th of the `count` vectors of probabilities that a tile's rows have; `before`: the one before.
template <typename T>
inline void put_probabilities(float* tile, const Grid& grid, int n, int count, Vec before, Vec p) {
#if defined(PAGEMILL_BF16_DOT)
  if constexpr (T::words_per_step == 1 && T::steps_per_tile == 8) {
    float* row = tile + n / kVecsPerGroup * grid.probability_row;
    char* to = reinterpret_cast<char*>(row) + n % kVecsPerGroup * kLanes * 2;
    if (T::whole_tiles || (n % 2 == 0 && n + 1 == count)) {
      const HalfVec rounded = narrow(p);
      __builtin_memcpy(to, &rounded, sizeof rounded);
    } else if (n % 2 == 1) {
      store_narrow(to - kLanes * 2, before, p);
    }
    return;
  }
#endif
  (void)count, (void)before;
  store(tile + n / kVecsPerGroup * grid.probability_row + n % kVecsPerGroup * kLanes, p);
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
