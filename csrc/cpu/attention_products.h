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

template <typename T>
struct Products {
  static void score(const float* query, int64_t, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                    int64_t steps, float* scores) {
    score_rows<T>(query, rows, tiles, num_tiles, steps, scores);
  }
  static void weigh(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                    int64_t value_stride, float* out, int64_t out_stride) {
    weigh_rows<T>(probabilities, rows, tiles, num_tiles, value_stride, out, out_stride);
  }
};

#if defined(__AMX_BF16__) || defined(PAGEMILL_AMX_EMULATED)
template <>
struct Products<Amx> {
  static void score(const float* query, int64_t query_stride, int64_t rows, const int32_t* const* tiles,
                    int64_t num_tiles, int64_t steps, float* scores) {
    score_amx(query, query_stride, rows, tiles, num_tiles, steps, scores);
  }
  static void weigh(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                    int64_t value_stride, float* out, int64_t out_stride) {
    weigh_amx(probabilities, rows, tiles, num_tiles, value_stride, out, out_stride);
  }
};
#endif

// Probabilities of columns [column, column + kLanes) of a row that holds its scores: in place, since the bf16 ones
// fill the row from its front half and never pass the scores still to be read.
template <typename T>
inline void put_probabilities(float* row, int64_t column, Vec p) {
#if defined(PAGEMILL_BF16_DOT)
  if constexpr (T::words_per_step == 1 && T::steps_per_tile == 8) {
    const HalfVec rounded = narrow(p);
    __builtin_memcpy(reinterpret_cast<char*>(row) + column * 2, &rounded, sizeof rounded);
    return;
  }
#endif
  store(row + column, p);
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
