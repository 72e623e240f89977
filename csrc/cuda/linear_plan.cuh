// What a linear layer's kernels are told, the splits of K that fix the order of every sum, and the tiles.
#pragma once

#include "cuda/numbers.cuh"

namespace pagemill::cuda {

// How long the splits of K are depends on the weight's shape alone, so a sum's order does too: within a split steps of
// 16 from left to right, then split after split. Which blocks compute them, and in what tiles, cannot be seen in it.
constexpr int64_t kSplitUnit = 64;     // splits begin at multiples of it
constexpr int64_t kShortestSplit = 256;
constexpr int64_t kSplitRows = 64;     // rows of the weight that decode gives to a block
constexpr int64_t kWantedBlocks = 528;  // four for each of 132 multiprocessors: a constant, not the device's

struct Splits {
  int64_t length, count;  // elements of K (the last split may be shorter)
};

inline Splits splits_of(int64_t weight_rows, int64_t in_features) {
  const int64_t by_rows = kWantedBlocks / ceil_div(weight_rows, kSplitRows), by_length = in_features / kShortestSplit;
  const int64_t fewer = by_rows < by_length ? by_rows : by_length, wanted = fewer < 1 ? 1 : fewer;
  const int64_t length = ceil_div(ceil_div(in_features, kSplitUnit), wanted) * kSplitUnit;
  return {length, ceil_div(in_features, length)};
}

struct LinearParams {
  const void* x;       // [rows, in_features] of T, rows x_stride elements apart
  const void* weight;  // [weight_rows, in_features] of T, rows weight_stride elements apart
  const void* bias;    // [weight_rows] of T or float32; or null
  const void* residual;  // [rows, out_features] of the result's type, contiguous; or null; may be out
  void* out;             // [rows, out_features] of T or float32, contiguous
  float* partial;        // [splits, rows, weight_rows]: what blocks of one split each leave for merge_products
  int64_t rows, out_features, in_features;
  int64_t weight_rows;   // out_features; gated: twice as many, the gate's first
  int64_t x_stride, weight_stride;
  Splits splits;
  int64_t activation;    // of a gated weight
  bool gated, float32_bias, float32_out;
  bool in_pieces;  // x and weight can be read 16 bytes at a time
  bool two_out;    // two neighbours of out and of the residual can be accessed as one
};

// A block's share: TILE_M rows of x times TILE_N rows of the weight. CHUNK: elements of K per slot of the ring.
template <int TILE_M, int TILE_N, int WARPS_M, int WARPS_N, int CHUNK, int SLOTS, int BLOCKS>
struct Tile {
  static constexpr int kM = TILE_M, kN = TILE_N, kWarpsN = WARPS_N, kChunk = CHUNK, kSlots = SLOTS, kBlocks = BLOCKS;
  static constexpr int kThreads = WARPS_M * WARPS_N * kWarp;
  static constexpr int kMmaM = TILE_M / WARPS_M / 16, kMmaN = TILE_N / WARPS_N / 8;  // products of a warp
  static constexpr int kRowBytes = CHUNK * 2 + 16;  // 16: so 8 rows lie in 8 different bank groups
  static constexpr int kSlotBytes = (TILE_M + TILE_N) * kRowBytes;
  static constexpr int kSharedBytes = SLOTS * kSlotBytes;
  static_assert(kSplitUnit % CHUNK == 0 && kMmaN % 2 == 0 && SLOTS >= 3 && kSharedBytes <= 99 * 1024);
};

using DecodeTile = Tile<16, 64, 1, 4, 64, 4, 4>;     // 45 KiB, four blocks per multiprocessor
using MiddleTile = Tile<64, 128, 2, 4, 64, 3, 2>;    // 81 KiB, two where shared memory allows
using PrefillTile = Tile<128, 128, 2, 4, 32, 4, 1>;  // 80 KiB

// run(Tile{}) for so many rows. No tile gives other bits than another.
template <typename Run>
auto with_tile(int64_t rows, const Run& run) {
  if (rows <= DecodeTile::kM) return run(DecodeTile{});
  if (rows <= MiddleTile::kM) return run(MiddleTile{});
  return run(PrefillTile{});
}

// Bytes of partial sums if every split is a block's: worth it where whole tiles are too few to fill a GPU; else 0.
inline int64_t partial_bytes(int64_t rows, int64_t weight_rows, int64_t in_features) {
  const int64_t splits = splits_of(weight_rows, in_features).count;
  return with_tile(rows, [&](auto tile) {
    using Shape = decltype(tile);
    constexpr int64_t kFew = kWantedBlocks / 4 * Shape::kBlocks / 2;  // half of what would be resident
    const int64_t tiles = ceil_div(rows, Shape::kM) * ceil_div(weight_rows, Shape::kN);
    return splits > 1 && tiles <= kFew ? splits * rows * weight_rows * int64_t{sizeof(float)} : 0;
  });
}

// Which rows of both operands this block multiplies. Blocks that run at about the same time take 8 tiles of rows by
// some tiles of columns, so that both operands come from L2.
struct TilePlace {
  int64_t row, column;  // first of x and of out (gated: gate and up of half as many columns make a tile)

  template <typename Shape>
  static PAGEMILL_DEVICE TilePlace of(const LinearParams& p, int64_t block, Shape) {
    constexpr int64_t kGroup = 8;
    const int64_t columns_of_tile = p.gated ? Shape::kN / 2 : Shape::kN;
    const int64_t row_tiles = ceil_div(p.rows, Shape::kM), column_tiles = ceil_div(p.out_features, columns_of_tile);
    const int64_t group = block / (kGroup * column_tiles), within = block % (kGroup * column_tiles);
    const int64_t left = row_tiles - group * kGroup, height = left < kGroup ? left : kGroup;
    return {(group * kGroup + within % height) * Shape::kM, within / height * columns_of_tile};
  }
};

}  // namespace pagemill::cuda
