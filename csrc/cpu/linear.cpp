// out = x @ weight.T + bias with weights packed once, made for decode: at one row the weights stream through
// once at memory speed, at many rows every panel is read once per block of rows.
//
// The rule this file keeps (batch invariance): an output element is the sum over k in ascending order into one
// accumulator, in registers from the first k to the last. How many rows there are, which tile a row falls into and who computes it decide
// only which other elements sit in neighbouring registers. linear_tiles.h has the tiles on vectors, linear_amx.h those
// on AMX, linear_pack.cpp makes the panels; this file cuts the work into tiles and finishes the sums.
//
// Layout: panels of 32 output features. A step of K is one line of 32 floats, or of 32 pairs (k, k+1), which is at once
// an operand of a dot product and a row of an AMX B tile. Rows of x are prepared tile by tile into one stream.
#include "cpu/activation_math.h"
#include "cpu/kernels.h"
#include "cpu/linear_tiles.h"
#include "cpu/scratch.h"

#if defined(__AMX_BF16__) || defined(PAGEMILL_AMX_EMULATED)
#define PAGEMILL_LINEAR_AMX
#include "cpu/linear_amx.h"
#endif

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kBlockBytes = 256 << 10;  // prepared rows of x that stay in L2 beside a panel

// What a panel's sums become: [columns] of one row, from `column` on.
struct Finish {
  const LinearArgs& args;
  int64_t column, columns;

  Vec value(const float* sums, int64_t c, const float* bias, int64_t count) const {
    const Vec v = load(sums + c);
    return bias == nullptr ? v : v + load_up_to(bias, count);
  }

  template <typename Out>
  void row(const float* sums, int64_t row) const {
    Out* out = static_cast<Out*>(args.out) + row * args.out_features + column;
    if (args.epilogue == Epilogue::gated) return gated(sums, out);
    const Out* residual = args.epilogue == Epilogue::add
                              ? static_cast<const Out*>(args.residual) + row * args.out_features + column
                              : nullptr;
    for (int64_t c = 0; c < columns; c += kLanes) {
      Vec v = value(sums, c, args.bias == nullptr ? nullptr : args.bias + column + c, columns - c);
      if (residual != nullptr) v = round_to(v, out) + load_up_to(residual + c, columns - c);
      store_up_to(out + c, v, columns - c);
    }
  }

  // Everything rounded where gated_activation(linear(x)) rounds it.
  template <typename Out>
  void gated(const float* sums, Out* out) const {
    const float* bias = args.bias == nullptr ? nullptr : args.bias + column;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const Vec gate = value(sums, c, bias == nullptr ? nullptr : bias + c, columns - c);
      const Vec up = value(sums, kGatedColumns + c, bias == nullptr ? nullptr : bias + args.out_features + c, columns - c);
      const Vec open = activate(args.activation, round_to(gate, out));
      store_up_to(out + c, round_to(open, out) * round_to(up, out), columns - c);
    }
  }
};

// What a tile fetches while it computes. Several tiles per panel: the next panel, half of it by each of the first two.
// One tile: its own panel, a little ahead; with few rows nothing, as the arithmetic is then so short that the processor
// itself keeps the memory busy, and prefetching ones would only be in its way (at one row they cost a third of the
// bandwidth). The last panel fetches past its end, which is harmless.
Ahead look_ahead(const char* panel, int64_t bytes, int64_t rows, int64_t tile, int64_t tiles) {
  constexpr int64_t kFewRows = 4, kNear = 8 << 10;
  if (tiles == 1) return rows <= kFewRows ? Ahead{panel, 0} : Ahead{panel + kNear, kLine};
  if (tile < 2) return {panel + bytes + tile * bytes / 2, kLine / 2};
  return {panel, 0};
}

// The grid of work: blocks of rows (outer) by panels (inner), dealt in pieces that get smaller towards the end, so that
// the threads end together. A piece's place depends on its number alone.
struct Plan {
  int64_t steps, panels, panel_bytes, block_rows, blocks;
  int64_t threads, piece = 0, begin = 0, end = 0;

  Plan(const LinearArgs& a, int64_t row_bytes, int64_t most_rows) {
    steps = packed_steps(a.in_features, a.bf16);
    const bool gated = a.epilogue == Epilogue::gated;
    panels = packed_panels(gated ? 2 * a.out_features : a.out_features, gated);
    panel_bytes = steps * kLine;
    threads = a.threads > 0 ? a.threads : 1;
    const int64_t fit = kBlockBytes / row_bytes / most_rows * most_rows;
    const int64_t share = (a.rows / threads + most_rows) / most_rows * most_rows;
    int64_t most = share < 8 * most_rows ? 8 * most_rows : share;
    if (most > fit) most = fit;
    if (most < most_rows) most = most_rows;
    blocks = (a.rows + most - 1) / most;
    block_rows = (a.rows + blocks - 1) / blocks;
    end = size();
  }

  int64_t size() const {
    const int64_t left = blocks * panels - begin, share = threads == 1 ? left : left / (3 * threads);
    return begin + (share < 1 ? 1 : share);
  }

  // Moves [begin, end) to the piece of a higher number; false: there is none.
  bool advance(int64_t number) {
    for (; piece < number && begin < blocks * panels; ++piece) {
      begin = end;
      end = size();
    }
    return begin < blocks * panels;
  }
};

template <class Tiles>
struct Worker {
  using T = typename Tiles::T;
  static constexpr int64_t kMaxRows = Tiles::kMaxRows;
  const LinearArgs& a;
  const int64_t row_bytes;
  Plan plan;
  char* prepared;
  int64_t held = -1, first = 0, rows = 0, tiles = 0;  // the block of rows that is prepared

  explicit Worker(const LinearArgs& args)
      : a(args),
        row_bytes(Tiles::row_bytes(packed_steps(args.in_features, args.bf16))),
        plan(args, row_bytes, kMaxRows),
        prepared(static_cast<char*>(thread_scratch(size_t((plan.block_rows + 31) / 32 * 32 * row_bytes)))) {}

  int64_t tile_start(int64_t t) const {
    if (Tiles::kEvenTiles) return t * rows / tiles;
    return t * kMaxRows < rows ? t * kMaxRows : rows;
  }

  void hold(int64_t block) {
    if (block == held) return;
    held = block;
    first = block * plan.block_rows;
    rows = a.rows - first < plan.block_rows ? a.rows - first : plan.block_rows;
    tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = tile_start(t);
      Tiles::prepare(static_cast<const T*>(a.x) + (first + at) * a.x_stride, a.x_stride, int(tile_start(t + 1) - at),
                     plan.steps, a.in_features, prepared + at * row_bytes);
    }
  }

  template <typename Out>
  void multiply(int64_t p) {
    alignas(64) float sums[kMaxRows * kPanelColumns];
    const char* panel = static_cast<const char*>(a.packed) + p * plan.panel_bytes;
    const int64_t width = a.epilogue == Epilogue::gated ? kGatedColumns : kPanelColumns, left = a.out_features - p * width;
    const Finish finish{a, p * width, left < width ? left : width};
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = tile_start(t);
      const int count = int(tile_start(t + 1) - at);
      const Ahead ahead = look_ahead(panel, plan.panel_bytes, rows, t, tiles);
      Tiles::multiply(count, prepared + at * row_bytes, panel, plan.steps, ahead, sums);
      for (int r = 0; r < count; ++r) finish.template row<Out>(sums + r * kPanelColumns, first + at + r);
    }
  }

  template <typename Out>
  void run(int64_t* next) {
    while (plan.advance(__atomic_fetch_add(next, 1, __ATOMIC_RELAXED)))
      for (int64_t unit = plan.begin; unit < plan.end; ++unit) {
        hold(unit / plan.panels);
        multiply<Out>(unit % plan.panels);
      }
  }
};

template <class Tiles>
void run_bfloat16(const LinearArgs& a, int64_t* next) {
  Worker<Tiles> worker(a);
  if (a.out_bf16) {
    worker.template run<uint16_t>(next);
  } else {
    worker.template run<float>(next);
  }
}

}  // namespace

void linear(const LinearArgs& a, int64_t* next) {
  if (!a.bf16) return Worker<VectorTiles<Float32Products>>(a).run<float>(next);
#if defined(PAGEMILL_LINEAR_AMX)
  AmxTiles::configure();
  run_bfloat16<AmxTiles>(a, next);
  TILE_RELEASE();
#else
  run_bfloat16<VectorTiles<Bfloat16Products>>(a, next);
#endif
}

}  // namespace pagemill::PAGEMILL_LEVEL
