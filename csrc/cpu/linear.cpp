// out = x @ weight.T + bias with weights packed once, made for decode: at one row the weights stream through
// once at memory speed, at many rows every panel is read once per block of rows.
//
// The rule this file keeps (batch invariance): an output element is the sum over k in ascending order into one
// accumulator, in registers from the first k to the last. How many rows there are, which tile a row falls into
// and who computes it decide only which other elements sit in neighbouring registers. linear_tiles.h has the tiles on
// vectors, linear_amx.h those on AMX; this file cuts the work into tiles.
//
// Layout: panels of 32 output features. A step of K is one line of 32 floats, or of 32 bfloat16 pairs (k, k+1),
// which is at once an operand of vdpbf16ps and a row of an AMX B tile. Rows of x are interleaved the same way
// ([step][row]), so the inner loop reads two sequential streams whatever the strides of x are.
#include "cpu/kernels.h"
#include "cpu/linear_tiles.h"
#include "cpu/scratch.h"

#if defined(__AMX_BF16__) || defined(PAGEMILL_AMX_EMULATED)
#define PAGEMILL_LINEAR_AMX
#include "cpu/linear_amx.h"
#endif

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kBlockBytes = 256 << 10;  // interleaved rows of x that stay in L2 beside a panel

template <typename Out>
void finish_row(const float* sums, const float* bias, Out* out, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    Vec value = load(sums + c);
    if (bias != nullptr) value += load_up_to(bias + c, columns - c);
    store_up_to(out + c, value, columns - c);
  }
}

// While a panel is multiplied the next one is fetched, all of it by one tile or half each by the first two, so that the
// memory is busy during the arithmetic of every tile. The last panel fetches past its end, which is harmless.
Ahead look_ahead(const char* panel, int64_t bytes, int64_t tile, int64_t tiles) {
  if (tiles == 1) return {panel + bytes, 128};
  if (tile < 2) return {panel + bytes + tile * bytes / 2, 64};
  return {panel, 0};
}

// The grid of pieces: blocks of rows (outer) by runs of panels (inner).
struct Plan {
  int64_t steps, panels, block_rows, blocks, run, runs;

  Plan(const LinearArgs& a, int64_t step_bytes, int64_t most_rows) {
    steps = packed_steps(a.in_features, a.bf16);
    panels = (a.out_features + kPanelColumns - 1) / kPanelColumns;
    int64_t fit = kBlockBytes / (steps * step_bytes) / most_rows * most_rows;
    int64_t share = (a.rows / (a.threads > 0 ? a.threads : 1) + most_rows) / most_rows * most_rows;
    int64_t most = share < 8 * most_rows ? 8 * most_rows : share;
    if (most > fit) most = fit;
    if (most < most_rows) most = most_rows;
    blocks = (a.rows + most - 1) / most;
    block_rows = (a.rows + blocks - 1) / blocks;
    int64_t pieces = (int64_t(a.threads) * 4 + blocks - 1) / blocks;
    run = a.threads <= 1 ? panels : (panels + pieces - 1) / pieces;
    runs = (panels + run - 1) / run;
  }
};

template <class Tiles, typename Out>
void run_pieces(const LinearArgs& a, int64_t* next) {
  using T = typename Tiles::T;
  constexpr int64_t kMaxRows = Tiles::kMaxRows;
  const Plan plan(a, Tiles::kStepBytes, kMaxRows);
  const int64_t row_bytes = plan.steps * Tiles::kStepBytes, held_rows = (plan.block_rows + 31) / 32 * 32;
  char* interleaved = static_cast<char*>(thread_scratch(size_t(held_rows * row_bytes)));
  const char* packed = static_cast<const char*>(a.packed);
  alignas(64) float sums[kMaxRows * kPanelColumns];
  int64_t held = -1;

  for (;;) {
    int64_t piece = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    if (piece >= plan.blocks * plan.runs) return;
    int64_t block = piece / plan.runs, first = block * plan.block_rows;
    int64_t rows = a.rows - first < plan.block_rows ? a.rows - first : plan.block_rows;
    int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
    auto tile_start = [&](int64_t t) {
      if (Tiles::kEvenTiles) return t * rows / tiles;
      return t * kMaxRows < rows ? t * kMaxRows : rows;
    };
    if (block != held) {
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t at = tile_start(t);
        Tiles::interleave(static_cast<const T*>(a.x) + (first + at) * a.x_stride, a.x_stride,
                         int(tile_start(t + 1) - at), plan.steps, a.in_features, interleaved + at * row_bytes);
      }
      held = block;
    }
    int64_t begin = piece % plan.runs * plan.run;
    int64_t end = begin + plan.run < plan.panels ? begin + plan.run : plan.panels;
    for (int64_t p = begin; p < end; ++p) {
      int64_t column = p * kPanelColumns, left = a.out_features - column;
      int64_t columns = left < kPanelColumns ? left : kPanelColumns;
      const float* bias = a.bias == nullptr ? nullptr : a.bias + column;
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t at = tile_start(t);
        int count = int(tile_start(t + 1) - at);
        const char* panel = packed + p * plan.steps * kLine;
        const Ahead ahead = look_ahead(panel, plan.steps * kLine, t, tiles);
        Tiles::multiply(count, interleaved + at * row_bytes, panel, plan.steps, ahead, sums);
        Out* out = static_cast<Out*>(a.out) + (first + at) * a.out_features + column;
        for (int r = 0; r < count; ++r)
          finish_row(sums + r * kPanelColumns, bias, out + r * a.out_features, columns);
      }
    }
  }
}

template <class Tiles>
void run_bfloat16(const LinearArgs& a, int64_t* next) {
  if (a.out_bf16) {
    run_pieces<Tiles, uint16_t>(a, next);
  } else {
    run_pieces<Tiles, float>(a, next);
  }
}

// By groups of 16 steps: a cache line of every row at a time, into lines that stay in L1 until they are full.
template <typename T, int DEPTH>
void pack_panel(const PackArgs& a, int64_t panel, int64_t steps) {
  constexpr int64_t kGroup = 16;
  const int64_t whole = a.in_features / DEPTH;  // steps with all their values
  T* to = static_cast<T*>(a.packed) + panel * steps * kPanelColumns * DEPTH;
  for (int64_t first = 0; first < steps; first += kGroup) {
    const int64_t end = first + kGroup < steps ? first + kGroup : steps;
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const int64_t n = panel * kPanelColumns + c;
      const T* row = static_cast<const T*>(a.weight) + n * a.stride;
      const int64_t full = n >= a.out_features ? first : whole < end ? whole : end;
      for (int64_t s = first; s < full; ++s)
        __builtin_memcpy(to + (s * kPanelColumns + c) * DEPTH, row + s * DEPTH, sizeof(T) * DEPTH);
      for (int64_t s = full > first ? full : first; s < end; ++s)
        for (int64_t d = 0; d < DEPTH; ++d) {
          const int64_t k = s * DEPTH + d;
          to[(s * kPanelColumns + c) * DEPTH + d] = n < a.out_features && k < a.in_features ? row[k] : T(0);
        }
    }
  }
}

}  // namespace

void pack_linear(const PackArgs& a, int64_t begin, int64_t end) {
  int64_t steps = packed_steps(a.in_features, a.bf16);
  for (int64_t panel = begin; panel < end; ++panel) {
    if (a.bf16) {
      pack_panel<uint16_t, 2>(a, panel, steps);
    } else {
      pack_panel<float, 1>(a, panel, steps);
    }
  }
}

void linear(const LinearArgs& a, int64_t* next) {
  if (!a.bf16) return run_pieces<VectorTiles<Float32Products>, float>(a, next);
#if defined(PAGEMILL_LINEAR_AMX)
  AmxTiles::configure();
  run_bfloat16<AmxTiles>(a, next);
  TILE_RELEASE();
#else
  run_bfloat16<VectorTiles<Bfloat16Products>>(a, next);
#endif
}

}  // namespace pagemill::PAGEMILL_LEVEL
