// The five AMX instructions attention uses, as macros (tile numbers are part of the instruction's encoding), with two
// bodies: the hardware's, and C++ that does the same on an array, so that the same kernels are tested where there is
// no AMX.
#pragma once

#include <cstdint>

#if !defined(PAGEMILL_AMX_EMULATED)

#include <immintrin.h>

#define TILE_CONFIGURE(config) _tile_loadconfig(config)
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(c) _tile_zero(c)
#define TILE_LOAD(t, address, stride) _tile_loadd(t, address, stride)
#define TILE_STORE(t, address, stride) _tile_stored(t, address, stride)
#define TILE_DOT_BF16(c, a, b) _tile_dpbf16ps(c, a, b)

#else

#include "cpu/lanes.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

struct EmulatedTile {
  int64_t rows = 0, bytes = 0;
  char data[16][64] = {};
};

struct EmulatedTiles {
  EmulatedTile tile[8];

  void configure(const uint8_t* config) {
    for (int t = 0; t < 8; ++t) {
      tile[t] = EmulatedTile();
      tile[t].rows = config[48 + t];
      tile[t].bytes = config[16 + 2 * t];
    }
  }

  void load(int t, const void* from, int64_t stride) {
    tile[t] = {tile[t].rows, tile[t].bytes, {}};
    for (int64_t row = 0; row < tile[t].rows; ++row) {
      __builtin_memcpy(tile[t].data[row], static_cast<const char*>(from) + row * stride, tile[t].bytes);
    }
  }

  void store(int t, void* to, int64_t stride) const {
    for (int64_t row = 0; row < tile[t].rows; ++row) {
      __builtin_memcpy(static_cast<char*>(to) + row * stride, tile[t].data[row], tile[t].bytes);
    }
  }

  // c[m][n] += the products of a's pair k in row m with b's pair n in row k, k ascending.
  void dot_bf16(int c, int a, int b) {
    for (int64_t m = 0; m < tile[c].rows; ++m) {
      const uint16_t* left = reinterpret_cast<const uint16_t*>(tile[a].data[m]);
      float* sum = reinterpret_cast<float*>(tile[c].data[m]);
      for (int64_t k = 0; k < tile[a].bytes / 4; ++k) {
        const uint16_t* right = reinterpret_cast<const uint16_t*>(tile[b].data[k]);
        for (int64_t n = 0; n < tile[c].bytes / 4; ++n) {
          sum[n] += bf16_to_float(left[2 * k]) * bf16_to_float(right[2 * n]);
          sum[n] += bf16_to_float(left[2 * k + 1]) * bf16_to_float(right[2 * n + 1]);
        }
      }
    }
  }
};

inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL

#define TILE_CONFIGURE(config) emulated_tiles().configure(reinterpret_cast<const uint8_t*>(config))
#define TILE_RELEASE() emulated_tiles() = EmulatedTiles()
#define TILE_ZERO(c) __builtin_memset(emulated_tiles().tile[c].data, 0, sizeof emulated_tiles().tile[c].data)
#define TILE_LOAD(t, address, stride) emulated_tiles().load(t, address, stride)
#define TILE_STORE(t, address, stride) emulated_tiles().store(t, address, stride)
#define TILE_DOT_BF16(c, a, b) emulated_tiles().dot_bf16(c, a, b)

#endif
