// Tiles of the linear layer on vector registers: some rows of x times one packed panel.
#pragma once

#include "cpu/lanes_io.h"
#include "cpu/linear.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int kLine = kPanelColumns * 4;  // bytes of a panel's step: 32 floats or 32 bfloat16 pairs
constexpr int kPanelVecs = kPanelColumns / kLanes;

// How values are multiplied. `X`: one interleaved step of one row; `kDepth`: values of K in a step.

struct Float32Products {
  using T = float;
  using X = float;
  static constexpr int kDepth = 1;
  static PAGEMILL_INLINE X step(const T* row, int64_t k, int64_t) { return row[k]; }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const X* x, const char* line, Vec (&acc)[ROWS][VECS]) {
    Vec w[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) w[v] = load(reinterpret_cast<const float*>(line) + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      Vec value = splat(x[r]);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) acc[r][v] = fused(value, w[v], acc[r][v]);
    }
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16Products {
  using T = uint16_t;
  using X = uint32_t;  // a pair
  static constexpr int kDepth = 2;
  static PAGEMILL_INLINE X step(const T* row, int64_t k, int64_t in_features) {
    return uint32_t(row[k]) | (k + 1 < in_features ? uint32_t(row[k + 1]) << 16 : 0u);
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const X* x, const char* line, Vec (&acc)[ROWS][VECS]) {
    __m512i w[VECS];
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) w[v] = _mm512_loadu_si512(line + v * (kLanes * 4));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      __m512i pair = _mm512_set1_epi32(int32_t(x[r]));
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)pair, (__m512bh)w[v]);
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
  static PAGEMILL_INLINE X step(const T* row, int64_t k, int64_t in_features) {
    return {bf16_to_float(row[k]), k + 1 < in_features ? bf16_to_float(row[k + 1]) : 0.0f};
  }

  template <int ROWS, int VECS>
  static PAGEMILL_INLINE void multiply(const X* x, const char* line, Vec (&acc)[ROWS][VECS]) {
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) {
      IntVec pair = (IntVec)load(reinterpret_cast<const float*>(line) + v * kLanes);
      Vec even = (Vec)(pair << 16), odd = (Vec)(pair & int32_t(0xffff0000));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) acc[r][v] = fused(splat(x[r].even), even, acc[r][v]);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) acc[r][v] = fused(splat(x[r].odd), odd, acc[r][v]);
    }
  }
};
#endif

// What a tile brings towards the caches while it computes: lines from `from`, `stride` bytes a step.
struct Ahead {
  const char* from;
  int64_t stride;
};

// One tile: ROWS rows of x (interleaved) times one panel, into sums [ROWS][32].
template <class Products, int ROWS>
void tile(const typename Products::X* x, const char* panel, int64_t steps, Ahead ahead, float* sums) {
  constexpr int kVecs = ROWS <= 2 || kPanelVecs < 2 ? kPanelVecs : 2;
  for (int sweep = 0; sweep < kPanelVecs; sweep += kVecs) {
    Vec acc[ROWS][kVecs] = {};
    const char* line = panel + sweep * (kLanes * 4);
    const char* fetch = ahead.from;
    for (int64_t step = 0; step < steps; ++step, line += kLine, fetch += ahead.stride) {
      __builtin_prefetch(fetch, 0, 2);
      __builtin_prefetch(fetch + 64, 0, 2);
      Products::multiply(x + step * ROWS, line, acc);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < kVecs; ++v) store(sums + r * kPanelColumns + (sweep + v) * kLanes, acc[r][v]);
  }
}

// The operations of the driver in linear.cpp, on vectors.
template <class Products>
struct VectorTiles {
  using T = typename Products::T;
  using X = typename Products::X;
#if defined(__AVX512F__)
  static constexpr int kMaxRows = 12;  // 12 x 2 accumulators, 2 weights, 1 broadcast: 27 of 32 registers
#else
  static constexpr int kMaxRows = 6;  // 6 x 2 accumulators, 2 weights, 1 broadcast: 15 of 16 registers
#endif
  static constexpr bool kEvenTiles = true;  // a tile costs what its rows cost: better 8 + 8 rows than 12 + 4
  static constexpr int64_t kStepBytes = sizeof(X);

  // x as [step][row], zero past the last value of a row.
  static void interleave(const T* x, int64_t stride, int rows, int64_t steps, int64_t in_features, char* out) {
    X* to = reinterpret_cast<X*>(out);
    const int64_t used = (in_features + Products::kDepth - 1) / Products::kDepth;
    for (int r = 0; r < rows; ++r) {
      const T* row = x + r * stride;
      for (int64_t s = 0; s < used; ++s) to[s * rows + r] = Products::step(row, s * Products::kDepth, in_features);
      for (int64_t s = used; s < steps; ++s) to[s * rows + r] = X{};
    }
  }

  static void multiply(int rows, const char* interleaved, const char* panel, int64_t steps, Ahead ahead, float* sums) {
    const X* x = reinterpret_cast<const X*>(interleaved);
    switch (rows) {
      case 1: return tile<Products, 1>(x, panel, steps, ahead, sums);
      case 2: return tile<Products, 2>(x, panel, steps, ahead, sums);
      case 3: return tile<Products, 3>(x, panel, steps, ahead, sums);
      case 4: return tile<Products, 4>(x, panel, steps, ahead, sums);
      case 5: return tile<Products, 5>(x, panel, steps, ahead, sums);
      case 6: return tile<Products, 6>(x, panel, steps, ahead, sums);
#if defined(__AVX512F__)
      case 7: return tile<Products, 7>(x, panel, steps, ahead, sums);
      case 8: return tile<Products, 8>(x, panel, steps, ahead, sums);
      case 9: return tile<Products, 9>(x, panel, steps, ahead, sums);
      case 10: return tile<Products, 10>(x, panel, steps, ahead, sums);
      case 11: return tile<Products, 11>(x, panel, steps, ahead, sums);
      case 12: return tile<Products, 12>(x, panel, steps, ahead, sums);
#endif
    }
  }
};

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
