// Tiles of the quantised linear layer: some rows of x, brought to 8 bits (linear_quant_rows.h), times one packed panel.
#pragma once

#include "cpu/linear_ahead.h"
#include "cpu/linear_quant_dots.h"
#include "cpu/linear_quant_rows.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// float16 in 16 bits as float32; all values but infinities and NaN, which no scale is.
PAGEMILL_INLINE Vec load_half(const char* from) {
  HalfVec half;
  __builtin_memcpy(&half, from, sizeof half);
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps((__m128i)half);
#else
  const WordVec bits = __builtin_convertvector(half, WordVec);
  const Vec magnitude = (Vec)((bits & 0x7fffu) << 13) * splat(0x1p112f);  // moves the exponent's bias
  return (Vec)((WordVec)magnitude | ((bits & 0x8000u) << 16));
#endif
}

// What the sum of a group's values is multiplied by to start its integer sum: it takes back the weights' value that
// means zero and what the dots leave out of every weight.
template <int BITS>
constexpr int32_t quant_start_factor(bool minimums) {
  return GroupDots<BITS>::kShift - (minimums ? 0 : BITS == 8 ? 128 : 8);
}

// ROWS rows (quantised) times one panel, into sums [ROWS][32]: an element is the float32 sum over groups in ascending
// order of scale * scale * (integer sum), plus minimum * (sum of x) where there are minimums.
template <int BITS, bool MINIMUMS, int ROWS>
void quant_tile(const char* x, const char* panel, int64_t groups, Ahead ahead, float* sums) {
  constexpr int kPanel = kPanelColumns / kLanes;
  constexpr int kVecs = kPanel < 2 ? kPanel : 2;
  constexpr QuantFormat kFormat{BITS, MINIMUMS};
  constexpr int64_t kBytes = quant_group_bytes(kFormat);
  using Dots = GroupDots<BITS>;
  for (int sweep = 0; sweep < kPanel; sweep += kVecs) {
    Vec acc[ROWS][kVecs] = {};
    const char* group = panel;
    const char* row = x;
    for (int64_t g = 0; g < groups; ++g, group += kBytes, row += ROWS * QuantRow::kGroupBytes) {
      for (int64_t b = 0; b < ahead.stride; b += 64) __builtin_prefetch(ahead.from + b, 0, 2);
      ahead.from += ahead.stride;
      const int32_t* words = reinterpret_cast<const int32_t*>(row);  // [ROWS][kWords]
      const int32_t* start = words + kWords * ROWS;
      const float* scale = reinterpret_cast<const float*>(start + ROWS);
      typename Dots::Sum dot[ROWS][kVecs];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) dot[r][v] = Dots::from(start[r]);
      Dots::template multiply<ROWS, kVecs>(words, group + quant_head_bytes(kFormat) + sweep * (kLanes * 4), dot);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        const char* head = group + (sweep + v) * (kLanes * 2);
        const Vec weight_scale = load_half(head);
        const Vec minimum = MINIMUMS ? load_half(head + kPanelColumns * 2) : Vec{};
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          acc[r][v] = fused(Dots::value(dot[r][v]) * splat(scale[r]), weight_scale, acc[r][v]);
          if (MINIMUMS) acc[r][v] = fused(splat(scale[ROWS + r]), minimum, acc[r][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) store(sums + r * kPanelColumns + (sweep + v) * kLanes, acc[r][v]);
    ahead.stride = 0;  // the first sweep has fetched it
  }
}

// For linear_driver.h.
template <int BITS, bool MINIMUMS, typename X>
struct QuantTiles {
  using T = X;
#if defined(__AVX512F__)
  static constexpr int kMaxRows = 6;  // 6 x 2 integer and 6 x 2 float accumulators, 2 weights, 1 broadcast: 27 of 32
#else
  static constexpr int kMaxRows = 4;
#endif
  static constexpr int64_t kRowUnit = 1;
  static constexpr int64_t kFewRows = BITS == 8 ? 4 : 2;  // of 4 bits there is more to do per byte
  static constexpr int64_t kStepBytes = quant_group_bytes({BITS, MINIMUMS});

  static int64_t steps(int64_t in_features) { return quant_groups(in_features); }
  static int64_t row_bytes(int64_t groups) { return groups * QuantRow::kGroupBytes; }

  static void prepare(const T* x, int64_t stride, int rows, int64_t, int64_t in_features, char* out) {
    for (int64_t r = 0; r < rows; ++r)
      quantise_row(x + r * stride, in_features, quant_start_factor<BITS>(MINIMUMS), r, rows, out);
  }

  static void multiply(int rows, const char* x, const char* panel, int64_t groups, Ahead ahead, float* sums) {
    switch (rows) {
      case 1: return quant_tile<BITS, MINIMUMS, 1>(x, panel, groups, ahead, sums);
      case 2: return quant_tile<BITS, MINIMUMS, 2>(x, panel, groups, ahead, sums);
      case 3: return quant_tile<BITS, MINIMUMS, 3>(x, panel, groups, ahead, sums);
      case 4: return quant_tile<BITS, MINIMUMS, 4>(x, panel, groups, ahead, sums);
#if defined(__AVX512F__)
      case 5: return quant_tile<BITS, MINIMUMS, 5>(x, panel, groups, ahead, sums);
      case 6: return quant_tile<BITS, MINIMUMS, 6>(x, panel, groups, ahead, sums);
#endif
    }
  }
};

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
