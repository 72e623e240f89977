// Tiles of the linear layer on AMX: up to 32 rows of x times one panel, 2 x 2 tiles of sums.
//
// Rows are always computed 16 at a time, padded with zeros: the time is the weights' as long as there are few rows, and
// an element's sum is the same sequence of tile products whatever the number of rows.
#pragma once

#include "cpu/amx_tile.h"
#include "cpu/linear_tiles.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

struct AmxTiles {
  using T = uint16_t;
  static constexpr int kMaxRows = 32;
  static constexpr int64_t kRowUnit = 32;  // full tiles first: the last one costs what 16 rows cost, or 32
  static constexpr int64_t kFewRows = 4;
  static constexpr int64_t kStepBytes = kLine;
  static constexpr int64_t kDeep = 16;  // steps, pairs of K, per tile

  static int64_t steps(int64_t in_features) { return packed_steps(in_features, true); }
  static int64_t row_bytes(int64_t steps) { return steps * 4; }

  // gcc's tile loads do not tell it that they read memory: what was stored before must not be moved or dropped.
  static PAGEMILL_INLINE void written(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

  // Palette 1, every tile 16 rows of 64 bytes: sums 0-3, rows of x in 4 and 5, weights in 6 and 7.
  static void configure() {
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;
      config[48 + tile] = 16;
    }
    written(config);
    TILE_CONFIGURE(config);
  }

  // x as [step / 16][rows, rounded up to 16][16] pairs, so that an operand is 1 KiB in one piece.
  static void prepare(const T* x, int64_t stride, int rows, int64_t steps, int64_t in_features, char* out) {
    T* to = reinterpret_cast<T*>(out);
    const int64_t padded = (rows + 15) / 16 * 16;
    for (int64_t first = 0; first < steps * 2; first += kDeep * 2) {
      for (int64_t r = 0; r < padded; ++r, to += kDeep * 2) {
        const int64_t left = r < rows ? in_features - first : 0;
        const int64_t count = left < 0 ? 0 : left < kDeep * 2 ? left : kDeep * 2;
        for (int64_t i = 0; i < count; ++i) to[i] = x[r * stride + first + i];
        for (int64_t i = count; i < kDeep * 2; ++i) to[i] = 0;
      }
    }
  }

  static void multiply(int rows, const char* x, const char* panel, int64_t steps, Ahead ahead, float* sums) {
    const bool two = rows > 16;
    written(x);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t step = 0; step < steps; step += kDeep) {
      for (int64_t i = 0; i < kDeep; ++i, ahead.from += ahead.stride) {
        __builtin_prefetch(ahead.from, 0, 2);
        __builtin_prefetch(ahead.from + 64, 0, 2);
      }
      TILE_LOAD(6, panel + step * kLine, kLine);
      TILE_LOAD(7, panel + step * kLine + 64, kLine);
      TILE_LOAD(4, x, 64);
      TILE_DOT_BF16(0, 4, 6);
      TILE_DOT_BF16(1, 4, 7);
      x += 1024;
      if (!two) continue;
      TILE_LOAD(5, x, 64);
      TILE_DOT_BF16(2, 5, 6);
      TILE_DOT_BF16(3, 5, 7);
      x += 1024;
    }
    TILE_STORE(0, sums, kLine);
    TILE_STORE(1, sums + 16, kLine);
    if (!two) return;
    TILE_STORE(2, sums + 16 * kPanelColumns, kLine);
    TILE_STORE(3, sums + 16 * kPanelColumns + 16, kLine);
  }
};

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
