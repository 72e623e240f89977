// Rows of x brought to 8 bits per group of 32, in the order in which tiles of the quantised linear layer read them.
//
// Per row this costs about as much as half a panel's product, so it matters where a weight has few panels: scales of
// kLanes groups are computed side by side, and a group's bytes are written as they come out of the vectors.
#pragma once

#include "cpu/lanes_io.h"
#include "cpu/linear_quant.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// A group of a tile's rows: 32 signed bytes of each row; then, row by row, what its integer sum starts from, its scale,
// and the sum of its values.
struct QuantRow {
  static constexpr int64_t kGroupBytes = kQuantGroup + 3 * 4;
};

// The bits of a group's largest magnitude: they order like it, and put infinities and NaN above all.
template <typename T>
PAGEMILL_INLINE uint32_t largest_bits(const T* x) {
  WordVec most = {};
  for (int64_t i = 0; i < kQuantGroup; i += kLanes) {
    const WordVec size = (WordVec)load(x + i) & 0x7fffffffu, more = (WordVec)(size > most);
    most = (size & more) | (most & ~more);
  }
  uint32_t best = 0;
  for (int64_t i = 0; i < kLanes; ++i) best = most[i] > best ? most[i] : best;
  return best;
}

#if defined(__AVX2__)
PAGEMILL_INLINE uint32_t largest_bits(const uint16_t* x) {
  const __m256i sign = _mm256_set1_epi16(int16_t(0x8000));
  const __m256i* half = reinterpret_cast<const __m256i*>(x);
  const __m256i most = _mm256_max_epu16(_mm256_andnot_si256(sign, _mm256_loadu_si256(half)),
                                        _mm256_andnot_si256(sign, _mm256_loadu_si256(half + 1)));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));  // the only one across lanes
  return uint32_t(~_mm_cvtsi128_si32(least)) << 16;
}
#endif

// Adding it rounds a small number to the nearest integer and leaves that in the low bits.
constexpr float kRound = 0x1.8p23f;

// The group's values times `factor` as 32 signed bytes. Returns their sum.
template <typename T>
PAGEMILL_INLINE uint32_t round_group(const T* x, float factor, char* bytes) {
#if defined(__AVX512F__)
  const __m512i low = (__m512i)(load(x) * splat(factor) + splat(kRound));
  const __m512i high = (__m512i)(load(x + 16) * splat(factor) + splat(kRound));
  const __m128i first = _mm512_cvtepi32_epi8(low), second = _mm512_cvtepi32_epi8(high);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), first);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16), second);
  const __m128i top = _mm_set1_epi8(char(0x80)), zero = _mm_setzero_si128();  // sums are of unsigned bytes
  const __m128i sums = _mm_add_epi64(_mm_sad_epu8(_mm_xor_si128(first, top), zero),
                                     _mm_sad_epu8(_mm_xor_si128(second, top), zero));
  return uint32_t(_mm_cvtsi128_si32(_mm_add_epi64(sums, _mm_unpackhi_epi64(sums, sums)))) - 128 * uint32_t(kQuantGroup);
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  WordVec sum = {};
  for (int64_t i = 0; i < kQuantGroup; i += kLanes) {
    const WordVec bits = (WordVec)(load(x + i) * splat(factor) + splat(kRound));
    sum += bits;
    const Bytes narrow = __builtin_convertvector(bits, Bytes);
    __builtin_memcpy(bytes + i, &narrow, sizeof narrow);
  }
  uint32_t total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += sum[i];
  constexpr uint32_t kRoundBits = 0x4b400000u;  // kRound's
  return total - kRoundBits * uint32_t(kQuantGroup);
#endif
}

// The group at `x`, of which `left` values are in the row: with zeros behind them if that is fewer than a group.
template <typename T>
PAGEMILL_INLINE const T* whole_group(const T* x, int64_t left, T (&padded)[kQuantGroup]) {
  if (left >= kQuantGroup) return x;
  for (int64_t i = 0; i < kQuantGroup; ++i) padded[i] = i < left ? x[i] : T{};
  return padded;
}

// Row `row` of the `rows` of a tile. The largest magnitude of a group becomes 127; a group with a value that is not
// finite gets the scale NaN, and with it the whole row of the result. `start_factor`: see quant_start_factor.
template <typename T>
void quantise_row(const T* x, int64_t in_features, int32_t start_factor, int64_t row, int64_t rows, char* out) {
  const int64_t groups = quant_groups(in_features), stride = rows * QuantRow::kGroupBytes;
  T padded[kQuantGroup];
  for (int64_t first = 0; first < groups; first += kLanes) {
    const int64_t count = groups - first < kLanes ? groups - first : kLanes;
    alignas(64) uint32_t largest[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (first + i) * kQuantGroup;
      largest[i] = largest_bits(whole_group(x + at, in_features - at, padded));
    }
    WordVec size;
    __builtin_memcpy(&size, largest, sizeof size);
    const WordVec finite = (WordVec)(size < 0x7f800000u), used = finite & (WordVec)((Vec)size >= splat(1e-30f));
    alignas(64) float factors[kLanes], scales[kLanes], sums[kLanes];
    alignas(64) uint32_t totals[kLanes] = {};
    store(factors, (Vec)((WordVec)(splat(127.0f) / (Vec)size) & used));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (first + i) * kQuantGroup;
      totals[i] = round_group(whole_group(x + at, in_features - at, padded), factors[i],
                              out + (first + i) * stride + row * kQuantGroup);
    }
    WordVec total;
    __builtin_memcpy(&total, totals, sizeof total);
    const Vec scale = (Vec)(((WordVec)((Vec)size * splat(1.0f / 127.0f)) & used) | (~finite & 0x7fc00000u));
    store(scales, scale);
    store(sums, scale * __builtin_convertvector((IntVec)total, Vec));
    total *= uint32_t(start_factor);
    __builtin_memcpy(totals, &total, sizeof total);
    for (int64_t i = 0; i < count; ++i) {
      char* heads = out + (first + i) * stride + rows * kQuantGroup + row * 4;
      __builtin_memcpy(heads, &totals[i], 4);
      __builtin_memcpy(heads + rows * 4, &scales[i], 4);
      __builtin_memcpy(heads + rows * 8, &sums[i], 4);
    }
  }
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
