// The two products with AMX tiles: 16 query rows by 16 keys (or 16 dims) per tile. A cached tile is an AMX operand as
// it lies in memory. Rows are computed 16 at a time whatever their number (scratch is padded), so an output element is
// the same sequence of tile products, each over the same terms, in any batch.
#pragma once

#include "cpu/amx_tile.h"
#include "cpu/attention_micro.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

struct Amx : Dot {
  static constexpr bool whole_tiles = true;
};

constexpr int64_t kRowBytes = 256 * 4;  // between rows of scores and probabilities

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t num_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    bytes[tile] = static_cast<uint16_t>(num_bytes);
  }
};

// Sums in tiles 0-3; operands in 4 and 5, those of the last, shorter step over dims in 6 and 7.
inline TileConfig score_config(int64_t tail_pairs) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, 16, 64);
  config.set(4, 16, 64);
  config.set(5, 16, 64);
  config.set(6, 16, tail_pairs > 0 ? tail_pairs * 4 : 64);
  config.set(7, tail_pairs > 0 ? tail_pairs : 16, 64);
  return config;
}

// Sums in tiles 0-3; probabilities of 16 keys in 4, their values in 5.
inline TileConfig weigh_config() {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, 16, 64);
  config.set(4, 16, 32);
  config.set(5, 8, 64);
  return config;
}

inline void prefetch_lines(const int32_t* words, int64_t lines, int64_t stride) {
  for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(words + line * stride, 0, 3);
}

// One cached tile's 16 columns for 16 rows.
inline void score_one(const float* query, int64_t query_stride, const int32_t* tile, const int32_t* next,
                      int64_t pairs, float* scores) {
  TILE_ZERO(0);
  int64_t pair = 0;
  for (; pair + 16 <= pairs; pair += 16) {
    prefetch_lines(next + pair * 16, 16, 16);
    TILE_LOAD(4, query + pair, query_stride * 4);
    TILE_LOAD(5, tile + pair * 16, 64);
    TILE_DOT_BF16(0, 4, 5);
  }
  if (pair < pairs) {
    TILE_LOAD(6, query + pair, query_stride * 4);
    TILE_LOAD(7, tile + pair * 16, 64);
    TILE_DOT_BF16(0, 6, 7);
  }
  TILE_STORE(0, scores, kRowBytes);
}

// Four cached tiles share each load of the query rows.
inline void score_four(const float* query, int64_t query_stride, const int32_t* const* tiles,
                       const int32_t* const* next, int64_t pairs, float* scores) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  int64_t pair = 0;
  for (; pair + 16 <= pairs; pair += 16) {
    for (int s = 0; s < 4; ++s) prefetch_lines(next[s] + pair * 16, 16, 16);
    TILE_LOAD(4, query + pair, query_stride * 4);
    TILE_LOAD(5, tiles[0] + pair * 16, 64);
    TILE_DOT_BF16(0, 4, 5);
    TILE_LOAD(5, tiles[1] + pair * 16, 64);
    TILE_DOT_BF16(1, 4, 5);
    TILE_LOAD(5, tiles[2] + pair * 16, 64);
    TILE_DOT_BF16(2, 4, 5);
    TILE_LOAD(5, tiles[3] + pair * 16, 64);
    TILE_DOT_BF16(3, 4, 5);
  }
  if (pair < pairs) {
    TILE_LOAD(6, query + pair, query_stride * 4);
    TILE_LOAD(7, tiles[0] + pair * 16, 64);
    TILE_DOT_BF16(0, 6, 7);
    TILE_LOAD(7, tiles[1] + pair * 16, 64);
    TILE_DOT_BF16(1, 6, 7);
    TILE_LOAD(7, tiles[2] + pair * 16, 64);
    TILE_DOT_BF16(2, 6, 7);
    TILE_LOAD(7, tiles[3] + pair * 16, 64);
    TILE_DOT_BF16(3, 6, 7);
  }
  TILE_STORE(0, scores, kRowBytes);
  TILE_STORE(1, scores + 16, kRowBytes);
  TILE_STORE(2, scores + 32, kRowBytes);
  TILE_STORE(3, scores + 48, kRowBytes);
}

// As score_rows<Dot>, 16 rows at a time.
void score_amx(const float* query, int64_t query_stride, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
               int64_t pairs, float* scores) {
  const TileConfig config = score_config(pairs % 16);
  TILE_CONFIGURE(&config);
  for (int64_t tile = 0; tile < num_tiles;) {
    const int64_t span = num_tiles - tile >= 4 ? 4 : 1;
    for (int64_t row = 0; row < rows; row += 16) {
      const float* from = query + row * query_stride;
      float* to = scores + row * 256 + tile * 16;
      const int32_t* const* next = tiles + tile + (row ? 0 : span);
      if (span == 4) {
        score_four(from, query_stride, tiles + tile, next, pairs, to);
      } else {
        score_one(from, query_stride, tiles[tile], next[0], pairs, to);
      }
    }
    tile += span;
  }
  TILE_RELEASE();
}

inline void weigh_one(const float* probabilities, const int32_t* const* tiles, int64_t num_tiles, int64_t dim,
                      int64_t value_stride, float* out, int64_t out_stride) {
  TILE_ZERO(0);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    prefetch_lines(tiles[tile + 1] + dim, 8, value_stride);
    TILE_LOAD(4, probabilities + tile * 8, kRowBytes);
    TILE_LOAD(5, tiles[tile] + dim, value_stride * 4);
    TILE_DOT_BF16(0, 4, 5);
  }
  TILE_STORE(0, out, out_stride * 4);
}

inline void weigh_four(const float* probabilities, const int32_t* const* tiles, int64_t num_tiles, int64_t dim,
                       int64_t value_stride, float* out, int64_t out_stride) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int s = 0; s < 4; ++s) prefetch_lines(tiles[tile + 1] + dim + s * 16, 8, value_stride);
    TILE_LOAD(4, probabilities + tile * 8, kRowBytes);
    TILE_LOAD(5, tiles[tile] + dim, value_stride * 4);
    TILE_DOT_BF16(0, 4, 5);
    TILE_LOAD(5, tiles[tile] + dim + 16, value_stride * 4);
    TILE_DOT_BF16(1, 4, 5);
    TILE_LOAD(5, tiles[tile] + dim + 32, value_stride * 4);
    TILE_DOT_BF16(2, 4, 5);
    TILE_LOAD(5, tiles[tile] + dim + 48, value_stride * 4);
    TILE_DOT_BF16(3, 4, 5);
  }
  TILE_STORE(0, out, out_stride * 4);
  TILE_STORE(1, out + 16, out_stride * 4);
  TILE_STORE(2, out + 32, out_stride * 4);
  TILE_STORE(3, out + 48, out_stride * 4);
}

// As weigh_rows<Dot>, 16 rows at a time.
void weigh_amx(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
               int64_t value_stride, float* out, int64_t out_stride) {
  const TileConfig config = weigh_config();
  TILE_CONFIGURE(&config);
  for (int64_t row = 0; row < rows; row += 16) {
    for (int64_t dim = 0; dim < value_stride;) {
      const float* from = probabilities + row * 256;
      float* to = out + row * out_stride + dim;
      if (value_stride - dim >= 64) {
        weigh_four(from, tiles, num_tiles, dim, value_stride, to, out_stride);
        dim += 64;
      } else {
        weigh_one(from, tiles, num_tiles, dim, value_stride, to, out_stride);
        dim += 16;
      }
    }
  }
  TILE_RELEASE();
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
