// linear_quant_dots.h for Arm: usdot where there is i8mm, widening products elsewhere.
#pragma once

#include "cpu/linear_quant_dots.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

PAGEMILL_INLINE uint8x16_t load_bytes(const char* from) { return vld1q_u8(reinterpret_cast<const uint8_t*>(from)); }

#if defined(__ARM_FEATURE_MATMUL_INT8)

template <int BITS>
struct GroupDots {
  using Sum = IntVec;
  static constexpr int32_t kShift = 0;
  static PAGEMILL_INLINE Sum from(int32_t start) { return IntVec{} + start; }
  static PAGEMILL_INLINE Vec value(Sum sum) { return __builtin_convertvector(sum, Vec); }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void add(const int32_t* x, uint8x16_t const (&w)[VECS], Sum (&sums)[ROWS][VECS]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(x[r * kWords]));
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sums[r][v] = (IntVec)vusdotq_s32((int32x4_t)sums[r][v], w[v], four);
    }
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const int32_t* x, const char* lines, Sum (&sums)[ROWS][VECS]) {
#pragma GCC unroll 8
    for (int s = 0; s < kWords * BITS / 8; ++s, lines += kQuantLine) {
      uint8x16_t w[VECS], high[VECS];
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) {
        w[v] = load_bytes(lines + v * 16);
        high[v] = vshrq_n_u8(w[v], 4);
        if (BITS == 4) w[v] = vandq_u8(w[v], vdupq_n_u8(15));
      }
      add<ROWS, VECS>(x + s, w, sums);
      if (BITS == 4) add<ROWS, VECS>(x + s + 4, high, sums);
    }
  }
};

#else

// Two products of at most 128 * 127 fit 16 bits, and so do eight of 15 * 127. A column's four features lie side by
// side, so sums of two of them are widened and added in pairs at the end.
template <int BITS>
struct GroupDots {
  using Sum = IntVec;
  static constexpr int32_t kShift = BITS == 8 ? 128 : 0;
  static PAGEMILL_INLINE Sum from(int32_t start) { return IntVec{} + start; }
  static PAGEMILL_INLINE Vec value(Sum sum) { return __builtin_convertvector(sum, Vec); }

  struct Halves {  // of four columns: two and two
    int32x4_t low = {}, high = {};
    PAGEMILL_INLINE void add(int16x8_t two, int16x8_t other) {
      low = vpadalq_s16(low, two);
      high = vpadalq_s16(high, other);
    }
  };

  // Four columns by words x0 and x1, of which `first` and `second` hold the weights.
  static PAGEMILL_INLINE void add(Halves& sums, int8x16_t first, int8x16_t second, int32_t x0, int32_t x1) {
    const int8x8_t a = vreinterpret_s8_s32(vdup_n_s32(x0)), b = vreinterpret_s8_s32(vdup_n_s32(x1));
    sums.add(vmlal_s8(vmull_s8(vget_low_s8(first), a), vget_low_s8(second), b),
             vmlal_s8(vmull_s8(vget_high_s8(first), a), vget_high_s8(second), b));
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const int32_t* x, const char* lines, Sum (&sums)[ROWS][VECS]) {
    Halves halves[ROWS][VECS];
    constexpr int kStep = BITS == 8 ? 2 : 1;  // lines at a time: 8 bits two words of x, 4 bits both halves of a byte
    for (int s = 0; s < kWords * BITS / 8; s += kStep, lines += kStep * kQuantLine) {
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) {
        const uint8x16_t w = load_bytes(lines + v * 16);
        const uint8x16_t first = BITS == 8 ? veorq_u8(w, vdupq_n_u8(0x80)) : vandq_u8(w, vdupq_n_u8(15));
        const uint8x16_t second = BITS == 8 ? veorq_u8(load_bytes(lines + kQuantLine + v * 16), vdupq_n_u8(0x80))
                                            : vshrq_n_u8(w, 4);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
          add(halves[r][v], vreinterpretq_s8_u8(first), vreinterpretq_s8_u8(second), x[r * kWords + s],
              x[r * kWords + s + (BITS == 8 ? 1 : 4)]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sums[r][v] += (IntVec)vpaddq_s32(halves[r][v].low, halves[r][v].high);
  }
};

#endif

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
