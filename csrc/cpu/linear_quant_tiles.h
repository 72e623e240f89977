// Tiles of the quantised linear layer: rows of x brought to 8 bits, and some of them times one packed panel.
#pragma once

#include "cpu/linear_quant_dots.h"

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

// A tile's rows side by side, group by group: 8 words of four values, the scale, and what the sum of values adds.
// `zero`: the weights' value that means zero, less what the dots leave out; with minimums the sum itself is wanted too.
struct QuantRow {
  static constexpr int64_t kGroupBytes = kQuantGroup + 3 * 4;
};

// One group of one row: values in [-127, 127] into `words`, the largest magnitude being 127. Returns the scale.
// What is not finite makes the scale NaN, and with it the whole row of the result.
template <typename T>
float quantise_group(const T* x, int64_t count, int32_t (&words)[kWords], int32_t* total) {
  constexpr int kVecs = kQuantGroup / kLanes;
  Vec value[kVecs];
  WordVec largest = {};
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    value[v] = v * kLanes < count ? load_up_to(x + v * kLanes, count - v * kLanes) : Vec{};
    const WordVec magnitude = (WordVec)value[v] & 0x7fffffffu;
    const WordVec more = (WordVec)(magnitude > largest);
    largest = (magnitude & more) | (largest & ~more);
  }
  uint32_t lanes[kLanes], most = 0;
  __builtin_memcpy(lanes, &largest, sizeof lanes);
  for (int64_t i = 0; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  *total = 0;
  float size;
  __builtin_memcpy(&size, &most, sizeof size);
  if (most >= 0x7f800000u || size < 1e-30f) {
    for (int32_t& word : words) word = 0;
    return most >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
  }
  const Vec factor = splat(127.0f / size), round = splat(0x1.8p23f);  // adding it rounds to the nearest integer
  IntVec sum = {};
  int8_t bytes[kQuantGroup];
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    const IntVec integer = (IntVec)(value[v] * factor + round) - 0x4b400000;
    sum += integer;
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Bytes narrow = __builtin_convertvector(integer, Bytes);
    __builtin_memcpy(bytes + v * kLanes, &narrow, sizeof narrow);
  }
  int32_t sums[kLanes];
  __builtin_memcpy(sums, &sum, sizeof sums);
  for (int64_t i = 0; i < kLanes; ++i) *total += sums[i];
  __builtin_memcpy(words, bytes, sizeof bytes);
  return size * (1.0f / 127.0f);
}

// `rows` rows of x as one tile reads them. The start of a group's integer sum takes back the zero value and the shift.
template <typename T>
void quantise_rows(const T* x, int64_t stride, int rows, int64_t in_features, int32_t start_factor, char* out) {
  for (int r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < quant_groups(in_features); ++g) {
      int32_t words[kWords], total;
      const int64_t first = g * kQuantGroup;
      const float scale = quantise_group(x + r * stride + first, in_features - first, words, &total);
      int32_t* to = reinterpret_cast<int32_t*>(out + g * rows * QuantRow::kGroupBytes) + r;
      for (int s = 0; s < kWords; ++s) to[s * rows] = words[s];
      const float sum = scale * static_cast<float>(total);
      to[kWords * rows] = start_factor * total;
      __builtin_memcpy(to + (kWords + 1) * rows, &scale, sizeof scale);
      __builtin_memcpy(to + (kWords + 2) * rows, &sum, sizeof sum);
    }
  }
}

template <int BITS>
constexpr int32_t quant_start_factor(bool minimums) {
  return GroupDots<BITS>::kShift - (minimums ? 0 : BITS == 8 ? 128 : 8);
}

// ROWS rows (quantised) times one panel, into sums [ROWS][32]: an element is the float32 sum over groups in ascending
// order of scale * scale * (integer sum), plus minimum * (sum of x) where there are minimums.
template <int BITS, bool MINIMUMS, int ROWS>
void quant_tile(const char* x, const char* panel, int64_t groups, const char* ahead, float* sums) {
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
      if (sweep == 0 && ahead != nullptr)
        for (int64_t b = 0; b < kBytes; b += 64) __builtin_prefetch(ahead + g * kBytes + b, 0, 2);
      const int32_t* words = reinterpret_cast<const int32_t*>(row);
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
  }
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
