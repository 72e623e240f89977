// A linear layer's work cut into tiles and dealt to threads, whatever the weights are; and what becomes of the sums.
#pragma once

#include "cpu/activation_math.h"
#include "cpu/linear_ahead.h"
#include "cpu/scratch.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kBlockBytes = 256 << 10;  // prepared rows of x that stay in L2 beside a panel

// What a panel's sums become: [columns] of one row, from `column` on.
struct Finish {
  const LinearArgs& args;
  int64_t column, columns;
  bool is_plain;  // a whole panel of sums, and nothing to be done to them

  Finish(const LinearArgs& arguments, int64_t first, int64_t width)
      : args(arguments), column(first), columns(arguments.out_features - first < width ? arguments.out_features - first : width) {
    is_plain = columns == kPanelColumns && args.bias == nullptr && args.epilogue == Epilogue::none;
  }

  Vec value(const float* sums, int64_t c, const float* bias, int64_t count) const {
    const Vec v = load(sums + c);
    return bias == nullptr ? v : v + load_up_to(bias, count);
  }

  // sums [count, 32] of rows from `first` on.
  template <typename Out>
  void rows(const float* sums, int64_t first, int64_t count) const {
    Out* out = static_cast<Out*>(args.out) + first * args.out_features + column;
    if (is_plain) return plain(sums, out, count);
    if (args.epilogue != Epilogue::gated) return added(sums, out, first, count);
    switch (args.activation) {
      case ActivationKind::silu: return gated<ActivationKind::silu>(sums, out, count);
      case ActivationKind::gelu: return gated<ActivationKind::gelu>(sums, out, count);
      case ActivationKind::gelu_tanh: return gated<ActivationKind::gelu_tanh>(sums, out, count);
    }
  }

 private:
  template <typename Out>
  void plain(const float* sums, Out* out, int64_t count) const {
    for (int64_t r = 0; r < count; ++r, sums += kPanelColumns, out += args.out_features) {
#pragma GCC unroll 8
      for (int64_t c = 0; c < kPanelColumns; c += kLanes) store(out + c, load(sums + c));
    }
  }

  template <typename Out>
  void added(const float* sums, Out* out, int64_t first, int64_t count) const {
    const Out* residual = args.epilogue == Epilogue::add
                              ? static_cast<const Out*>(args.residual) + first * args.out_features + column
                              : nullptr;
    for (int64_t r = 0; r < count; ++r, sums += kPanelColumns, out += args.out_features) {
      for (int64_t c = 0; c < columns; c += kLanes) {
        Vec v = value(sums, c, args.bias == nullptr ? nullptr : args.bias + column + c, columns - c);
        if (residual != nullptr) v = round_to(v, out) + load_up_to(residual + r * args.out_features + c, columns - c);
        store_up_to(out + c, v, columns - c);
      }
    }
  }

  // Everything rounded where gated_activation(linear(x)) rounds it.
  template <ActivationKind KIND, typename Out>
  void gated(const float* sums, Out* out, int64_t count) const {
    const float* bias = args.bias == nullptr ? nullptr : args.bias + column;
    for (int64_t r = 0; r < count; ++r, sums += kPanelColumns, out += args.out_features) {
      for (int64_t c = 0; c < columns; c += kLanes) {
        const Vec gate = value(sums, c, bias == nullptr ? nullptr : bias + c, columns - c);
        const Vec up = value(sums, kGatedColumns + c, bias == nullptr ? nullptr : bias + args.out_features + c, columns - c);
        const Vec open = activate<KIND>(round_to(gate, out));
        store_up_to(out + c, round_to(open, out) * round_to(up, out), columns - c);
      }
    }
  }
};

// The grid of work: blocks of rows (outer) by panels (inner), dealt in pieces that get smaller towards the end, so that
// the threads end together. A piece's place depends on its number alone.
struct Plan {
  int64_t steps, panels, panel_bytes, block_rows, blocks;
  int64_t threads, piece = 0, begin = 0, end = 0;

  Plan(const LinearArgs& a, int64_t num_steps, int64_t step_bytes, int64_t row_bytes, int64_t most_rows) {
    steps = num_steps;
    const bool gated = a.epilogue == Epilogue::gated;
    panels = packed_panels(gated ? 2 * a.out_features : a.out_features, gated);
    panel_bytes = steps * step_bytes;
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

// Tiles: `T`, the type of x; `kMaxRows` rows at most per tile, `kRowUnit` of which cost what one costs: rows are dealt
// evenly in such units, as 8 + 8 are better than 12 + 4 where one row is a unit; `kFewRows`: see look_ahead; `steps` of K in a panel, of `kStepBytes` each;
// `prepare` and `multiply`.
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
        row_bytes(Tiles::row_bytes(Tiles::steps(args.in_features))),
        plan(args, Tiles::steps(args.in_features), Tiles::kStepBytes, row_bytes, kMaxRows),
        prepared(static_cast<char*>(thread_scratch(size_t((plan.block_rows + 31) / 32 * 32 * row_bytes)))) {}

  int64_t tile_start(int64_t t) const {
    const int64_t units = (rows + Tiles::kRowUnit - 1) / Tiles::kRowUnit, at = t * units / tiles * Tiles::kRowUnit;
    return at < rows ? at : rows;
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

  const char* panel_of(int64_t unit) const {
    return static_cast<const char*>(a.packed) + unit % plan.panels * plan.panel_bytes;
  }

  // next: the panel to fetch meanwhile.
  template <typename Out>
  void multiply(int64_t p, const char* next) {
    alignas(64) float sums[kMaxRows * kPanelColumns];
    const char* panel = panel_of(p);
    const int64_t width = a.epilogue == Epilogue::gated ? kGatedColumns : kPanelColumns;
    const Finish finish(a, p * width, width);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = tile_start(t);
      const int count = int(tile_start(t + 1) - at);
      const Ahead ahead = look_ahead(panel, next, plan.panel_bytes, Tiles::kStepBytes, Tiles::kFewRows, rows, t, tiles);
      Tiles::multiply(count, prepared + at * row_bytes, panel, plan.steps, ahead, sums);
      finish.template rows<Out>(sums, first + at, count);
    }
  }

  // A piece is drawn when the last panel of the one before begins, so that its first panel is there when its turn comes
  // (docs/performance.md has what that saves).
  template <typename Out>
  void run(int64_t* next) {
    bool more = plan.advance(__atomic_fetch_add(next, 1, __ATOMIC_RELAXED));
    for (int64_t unit = plan.begin; more;) {
      const int64_t current = unit;
      if (++unit == plan.end) {
        more = plan.advance(__atomic_fetch_add(next, 1, __ATOMIC_RELAXED));
        if (more) unit = plan.begin;
      }
      hold(current / plan.panels);
      multiply<Out>(current % plan.panels, panel_of(unit));
    }
  }
};

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
