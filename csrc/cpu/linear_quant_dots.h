// Integer dot products of one group: ROWS rows of x, quantised to 8 bits, times some columns of a panel.
//
// x comes as words of four signed bytes, [ROWS][8]; weights as the lines of linear_quant.h. The sums are exact at every
// level, so the order inside a group is free. What a level multiplies may lie `kShift` below the stored value; the
// caller makes up for it with the sum of x.
#pragma once

#include "cpu/lanes_io.h"
#include "cpu/linear_quant.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kQuantLine = kPanelColumns * 4;  // bytes
constexpr int kWords = kQuantGroup / 4;            // of x per row and group

#if defined(__AVX512VNNI__)

template <int BITS>
struct GroupDots {
  using Sum = IntVec;
  static constexpr int32_t kShift = 0;
  static PAGEMILL_INLINE Sum from(int32_t start) { return (IntVec)_mm512_set1_epi32(start); }
  static PAGEMILL_INLINE Vec value(Sum sum) { return __builtin_convertvector(sum, Vec); }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void add(const int32_t* x, __m512i const (&w)[VECS], Sum (&sums)[ROWS][VECS]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const __m512i four = _mm512_set1_epi32(x[r * kWords]);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) sums[r][v] = (IntVec)_mm512_dpbusd_epi32((__m512i)sums[r][v], w[v], four);
    }
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const int32_t* x, const char* lines, Sum (&sums)[ROWS][VECS]) {
    const __m512i halves = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int s = 0; s < kWords * BITS / 8; ++s, lines += kQuantLine) {
      __m512i w[VECS], high[VECS];
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) {
        w[v] = _mm512_loadu_si512(lines + v * 64);
        if (BITS == 8) continue;
        high[v] = _mm512_and_si512(_mm512_srli_epi16(w[v], 4), halves);
        w[v] = _mm512_and_si512(w[v], halves);
      }
      add<ROWS, VECS>(x + s, w, sums);
      if (BITS == 4) add<ROWS, VECS>(x + s + 4, high, sums);
    }
  }
};

#elif defined(__AVX2__)

// Bytes times bytes saturate at 16 bits if both use all eight: weights are made signed and their sign is given to x.
template <int BITS>
struct GroupDots {
  using Sum = IntVec;
  static constexpr int32_t kShift = BITS == 8 ? 128 : 0;
  static PAGEMILL_INLINE Sum from(int32_t start) { return (IntVec)_mm256_set1_epi32(start); }
  static PAGEMILL_INLINE Vec value(Sum sum) { return __builtin_convertvector(sum, Vec); }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const int32_t* x, const char* lines, Sum (&sums)[ROWS][VECS]) {
    const __m256i ones = _mm256_set1_epi16(1), halves = _mm256_set1_epi8(15), top = _mm256_set1_epi8(char(0x80));
    __m256i pairs[ROWS][VECS] = {};  // 4 bits: eight products of at most 2 * 15 * 127 fit 16 bits
#pragma GCC unroll 8
    for (int s = 0; s < kWords * BITS / 8; ++s, lines += kQuantLine) {
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines + v * 32));
        if (BITS == 8) {
          const __m256i value = _mm256_xor_si256(w, top), size = _mm256_abs_epi8(value);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            const __m256i four = _mm256_sign_epi8(_mm256_set1_epi32(x[r * kWords + s]), value);
            const __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(size, four), ones);
            sums[r][v] = (IntVec)_mm256_add_epi32((__m256i)sums[r][v], sum);
          }
        } else {
          const __m256i low = _mm256_and_si256(w, halves), high = _mm256_and_si256(_mm256_srli_epi16(w, 4), halves);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            const __m256i a = _mm256_maddubs_epi16(low, _mm256_set1_epi32(x[r * kWords + s]));
            const __m256i b = _mm256_maddubs_epi16(high, _mm256_set1_epi32(x[r * kWords + s + 4]));
            pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_add_epi16(a, b));
          }
        }
      }
    }
    if (BITS == 8) return;
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECS; ++v)
        sums[r][v] = (IntVec)_mm256_add_epi32((__m256i)sums[r][v], _mm256_madd_epi16(pairs[r][v], ones));
  }
};

#elif !defined(PAGEMILL_NEON)  // Arm's are in linear_quant_dots_neon.h

// In float32, which holds every sum of a group exactly.
template <int BITS>
struct GroupDots {
  using Sum = Vec;
  static constexpr int32_t kShift = 0;
  static PAGEMILL_INLINE Sum from(int32_t start) { return splat(static_cast<float>(start)); }
  static PAGEMILL_INLINE Vec value(Sum sum) { return sum; }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const int32_t* x, const char* lines, Sum (&sums)[ROWS][VECS]) {
    for (int s = 0; s < kWords * BITS / 8; ++s, lines += kQuantLine) {
      for (int v = 0; v < VECS; ++v) {
        const IntVec w = load_words(reinterpret_cast<const int32_t*>(lines + v * (kLanes * 4)));
        for (int d = 0; d < 4; ++d) {
          const IntVec byte = (w >> (8 * d)) & 255;
          const Vec low = __builtin_convertvector(BITS == 8 ? byte : byte & 15, Vec);
          for (int r = 0; r < ROWS; ++r) sums[r][v] += low * splat(byte_of(x[r * kWords + s], d));
          if (BITS == 8) continue;
          const Vec high = __builtin_convertvector(byte >> 4, Vec);
          for (int r = 0; r < ROWS; ++r) sums[r][v] += high * splat(byte_of(x[r * kWords + s + 4], d));
        }
      }
    }
  }

  static PAGEMILL_INLINE float byte_of(int32_t word, int d) { return static_cast<float>(static_cast<int8_t>(word >> (8 * d))); }
};

#endif

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL

#if defined(PAGEMILL_NEON)
#include "cpu/linear_quant_dots_neon.h"
#endif
