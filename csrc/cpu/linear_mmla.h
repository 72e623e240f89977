// Tiles of the linear layer on Arm's bfmmla: two rows of x by two columns of a panel, four values of K each.
//
// bfmmla is defined as two bfdot in sequence, pair by pair of K, in every element (FPCR.EBF is 0 unless somebody sets
// it). So a single row takes bfdot, which wastes nothing on a second one, and has the same bits. An odd row beside
// others is paired with zeros.
#pragma once

#include "cpu/linear_tiles.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

struct MatrixTiles {
  using T = uint16_t;
  using Single = VectorTiles<Bfloat16Products>;
  static constexpr int kMaxRows = 10;
  static constexpr int64_t kRowUnit = 2;
  static constexpr int64_t kFewRows = 4;
  static constexpr int64_t kStepBytes = kLine;
  static constexpr int64_t kDeep = 4;  // values of K per instruction: two steps

  static int64_t steps(int64_t in_features) { return packed_steps(in_features, true); }
  static int64_t row_bytes(int64_t steps) { return steps * 4; }

  // x as [step / 2][rows, rounded up to 2][4]: an operand is 16 bytes in one piece.
  static void prepare(const T* x, int64_t stride, int rows, int64_t steps, int64_t in_features, char* out) {
    if (rows == 1) return Single::prepare(x, stride, rows, steps, in_features, out);
    T* to = reinterpret_cast<T*>(out);
    const int64_t padded = (rows + 1) / 2 * 2;
    for (int64_t k = 0; k < steps * 2; k += kDeep) {
      for (int64_t r = 0; r < padded; ++r, to += kDeep) {
        const int64_t left = r < rows ? in_features - k : 0, count = left < 0 ? 0 : left < kDeep ? left : kDeep;
        for (int64_t i = 0; i < kDeep; ++i) to[i] = i < count ? x[r * stride + k + i] : T(0);
      }
    }
  }

  // 2 * PAIRS rows, 8 columns at a time: 20 accumulators, 4 weights, 5 operands of x: 29 of 32 registers.
  template <int PAIRS>
  static void tile(const char* prepared, const char* panel, int64_t steps, Ahead ahead, float* sums) {
    constexpr int kColumns = 8, kOperands = kColumns / 2;
    for (int64_t column = 0; column < kPanelColumns; column += kColumns) {
      float32x4_t acc[PAIRS][kOperands] = {};
      const char* line = panel + column * 4;
      const char* fetch = ahead.from;
      const uint16_t* x = reinterpret_cast<const uint16_t*>(prepared);
      for (int64_t step = 0; step < steps; step += 2, line += 2 * kLine, x += PAIRS * 2 * kDeep) {
        for (int i = 0; i < 2; ++i, fetch += ahead.stride) {
          __builtin_prefetch(fetch, 0, 2);
          __builtin_prefetch(fetch + 64, 0, 2);
        }
        bfloat16x8_t w[kOperands];
#pragma GCC unroll 2
        for (int v = 0; v < kOperands / 2; ++v) {
          const uint32x4_t even = (uint32x4_t)load_words(reinterpret_cast<const int32_t*>(line) + v * 4);
          const uint32x4_t odd = (uint32x4_t)load_words(reinterpret_cast<const int32_t*>(line + kLine) + v * 4);
          w[2 * v] = (bfloat16x8_t)vzip1q_u32(even, odd);
          w[2 * v + 1] = (bfloat16x8_t)vzip2q_u32(even, odd);
        }
#pragma GCC unroll 5
        for (int p = 0; p < PAIRS; ++p) {
          const bfloat16x8_t rows = (bfloat16x8_t)vld1q_u16(x + p * 2 * kDeep);
#pragma GCC unroll 4
          for (int c = 0; c < kOperands; ++c) acc[p][c] = vbfmmlaq_f32(acc[p][c], rows, w[c]);
        }
      }
      for (int p = 0; p < PAIRS; ++p) {
        for (int c = 0; c < kOperands; ++c) {
          float* to = sums + 2 * p * kPanelColumns + column + 2 * c;
          vst1_f32(to, vget_low_f32(acc[p][c]));
          vst1_f32(to + kPanelColumns, vget_high_f32(acc[p][c]));
        }
      }
    }
  }

  static void multiply(int rows, const char* x, const char* panel, int64_t steps, Ahead ahead, float* sums) {
    if (rows == 1) return Single::multiply(rows, x, panel, steps, ahead, sums);
    switch ((rows + 1) / 2) {
      case 1: return tile<1>(x, panel, steps, ahead, sums);
      case 2: return tile<2>(x, panel, steps, ahead, sums);
      case 3: return tile<3>(x, panel, steps, ahead, sums);
      case 4: return tile<4>(x, panel, steps, ahead, sums);
      case 5: return tile<5>(x, panel, steps, ahead, sums);
    }
  }
};

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
