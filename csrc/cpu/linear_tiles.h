// Tiles of the linear layer on vector registers: some rows of x times one packed panel.
//
// Rows of x are prepared in groups of steps: [group][row][step of the group]. So a tile reads two sequential streams,
// the rows of one group lie side by side whatever their strides were, and preparing bfloat16 is copying lines.
#pragma once

#include "cpu/lanes_bf16.h"
#include "cpu/linear_ahead.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int kLine = kPanelColumns * 4;  // bytes of a panel's step: 32 floats or 32 pairs
constexpr int kPanelVecs = kPanelColumns / kLanes;

// Register budget of a tile: its rows, and the vectors of a panel it takes at a time from three rows on.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVecs = 2;  // 24 accumulators, 2 weights, 1 broadcast: 27 of 32 registers
#elif defined(PAGEMILL_NEON)
constexpr int kTileRows = 4, kTileVecs = 4;  // 16 accumulators, 4 weights; all rows' broadcasts are loaded at once: 28 of 32
#else
constexpr int kTileRows = 6, kTileVecs = 2;  // 12 accumulators, 2 weights, 1 broadcast: 15 of 16
#endif

// How values are multiplied. `X`: one prepared step of one row; `kDepth`: values of K in a step; `kGroup`: steps that
// are prepared together. `prepare` takes the values of one row that fall into a
// group, at least one, and pads with zeros.

struct Float32Products {
  using T = float;
  using X = float;
  static constexpr int kDepth = 1;
  static constexpr int64_t kGroup = 16;

  static PAGEMILL_INLINE void prepare(const T* from, int64_t count, X* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    for (int64_t i = count; i < kGroup; ++i) to[i] = 0;
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const X* x, const char* line, Vec (&acc)[ROWS][VECS]) {
    Vec w[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) w[v] = load(reinterpret_cast<const float*>(line) + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      Vec value = splat(x[r * kGroup]);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) acc[r][v] = fused(value, w[v], acc[r][v]);
    }
  }
};

#if defined(PAGEMILL_BF16_DOT)
struct Bfloat16Products {
  using T = uint16_t;
  using X = uint32_t;  // a pair
  static constexpr int kDepth = 2;
  static constexpr int64_t kGroup = 16;

  static PAGEMILL_INLINE void prepare(const T* from, int64_t count, X* to) {
#if defined(__AVX512BF16__)
    const __mmask32 used = count >= 32 ? 0xffffffffu : (1u << count) - 1;
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(used, from));
#else
    __builtin_memset(to, 0, kGroup * sizeof(X));
    __builtin_memcpy(to, from, size_t(count) * sizeof(T));
#endif
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const X* x, const char* line, Vec (&acc)[ROWS][VECS]) {
    IntVec w[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) w[v] = load_words(reinterpret_cast<const int32_t*>(line) + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const IntVec pair = IntVec{} + int32_t(x[r * kGroup]);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) acc[r][v] = dot_pairs(acc[r][v], pair, w[v]);
    }
  }
};
#else
struct Bfloat16Products {
  using T = uint16_t;
  struct X {
    float even, odd;
  };
  static constexpr int kDepth = 2;
  static constexpr int64_t kGroup = 16;

  static PAGEMILL_INLINE void prepare(const T* from, int64_t count, X* to) {
    float* values = &to[0].even;
    for (int64_t i = 0; i < count; ++i) values[i] = bf16_to_float(from[i]);
    for (int64_t i = count; i < kGroup * kDepth; ++i) values[i] = 0;
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const X* x, const char* line, Vec (&acc)[ROWS][VECS]) {
    Vec w[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) w[v] = (Vec)(load_words(reinterpret_cast<const int32_t*>(line) + v * kLanes) << 16);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vec even = splat(x[r * kGroup].even);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) acc[r][v] = fused(even, w[v], acc[r][v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) {
      w[v] = (Vec)(load_words(reinterpret_cast<const int32_t*>(line) + v * kLanes) & int32_t(0xffff0000));
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const Vec odd = splat(x[r * kGroup].odd);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) acc[r][v] = fused(odd, w[v], acc[r][v]);
    }
  }
};
#endif

// One tile: ROWS prepared rows of x times one panel, into sums [ROWS][32].
template <class Products, int ROWS>
void tile(const char* prepared, const char* panel, int64_t steps, Ahead ahead, float* sums) {
  using X = typename Products::X;
  constexpr int kVecs = ROWS <= 2 || kPanelVecs < kTileVecs ? kPanelVecs : kTileVecs;
  constexpr int64_t kGroup = Products::kGroup;
  const int64_t groups = (steps + kGroup - 1) / kGroup;
  const X* rows = reinterpret_cast<const X*>(prepared);
  for (int sweep = 0; sweep < kPanelVecs; sweep += kVecs) {
    Vec acc[ROWS][kVecs] = {};
    const char* line = panel + sweep * (kLanes * 4);
    const char* fetch = ahead.from;
    float* out = sums + sweep * kLanes;
    for (int64_t g = 0; g < groups; ++g) {
      const X* x = rows + g * ROWS * kGroup;
      const X* end = x + (steps - g * kGroup < kGroup ? steps - g * kGroup : kGroup);
      for (; x < end; ++x, line += kLine, fetch += ahead.stride) {
        __builtin_prefetch(fetch, 0, 2);
        __builtin_prefetch(fetch + 64, 0, 2);
        Products::multiply(x, line, acc);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < kVecs; ++v) store(out + r * kPanelColumns + v * kLanes, acc[r][v]);
  }
}

// The operations of the driver in linear.cpp, on vectors.
template <class Products>
struct VectorTiles {
  using T = typename Products::T;
  using X = typename Products::X;
  static constexpr int kMaxRows = kTileRows;
  static constexpr int64_t kRowUnit = 1;
  static constexpr int64_t kFewRows = 4;
  static constexpr int64_t kStepBytes = kLine;

  static int64_t steps(int64_t in_features) { return packed_steps(in_features, sizeof(T) == 2); }

  static int64_t row_bytes(int64_t steps) {
    const int64_t groups = (steps + Products::kGroup - 1) / Products::kGroup;
    return groups * Products::kGroup * int64_t(sizeof(X));
  }

  static void prepare(const T* x, int64_t stride, int rows, int64_t steps, int64_t in_features, char* out) {
    constexpr int64_t kValues = Products::kGroup * Products::kDepth;
    const int64_t groups = (steps + Products::kGroup - 1) / Products::kGroup;
    X* to = reinterpret_cast<X*>(out);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * kValues, left = in_features - first;
      for (int r = 0; r < rows; ++r)
        Products::prepare(x + r * stride + first, left < kValues ? left : kValues, to + (g * rows + r) * Products::kGroup);
    }
  }

  template <int ROWS = kMaxRows>
  static void multiply(int rows, const char* prepared, const char* panel, int64_t steps, Ahead ahead, float* sums) {
    if (rows == ROWS) return tile<Products, ROWS>(prepared, panel, steps, ahead, sums);
    if constexpr (ROWS > 1) multiply<ROWS - 1>(rows, prepared, panel, steps, ahead, sums);
  }
};

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
