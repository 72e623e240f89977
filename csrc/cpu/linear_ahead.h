// What a tile of a linear layer brings towards the caches while it computes.
#pragma once

#include "cpu/linear.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// With every step of K `stride` bytes more, from `from` on.
struct Ahead {
  const char* from;
  int64_t stride;
};

// Whether the processor itself keeps the memory busy where there is little arithmetic, so that fetching ahead is only in
// its way: so it is on Zen 4, where that costs a third of the bandwidth at one row. On the levels that only Intel's have it
// saves a third of the time instead (docs/performance.md).
#if defined(__AMX_BF16__) || (defined(__AVX512F__) && !defined(__AVX512BF16__))
constexpr bool kFetchesItself = false;
#else
constexpr bool kFetchesItself = true;
#endif

// Several tiles per panel: the panel whose turn is next, half of it by each of the first two. One tile: its own panel, a
// little ahead; with `few_rows` or fewer nothing if the processor fetches by itself. What lies past the last panel's end
// may be fetched, which is harmless.
inline Ahead look_ahead(const char* panel, const char* next, int64_t bytes, int64_t step_bytes, int64_t few_rows,
                        int64_t rows, int64_t tile, int64_t tiles) {
  constexpr int64_t kNear = 8 << 10;
  if (tiles == 1) return kFetchesItself && rows <= few_rows ? Ahead{panel, 0} : Ahead{panel + kNear, step_bytes};
  if (tile < 2) return {next + tile * bytes / 2, step_bytes / 2};
  return {panel, 0};
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
