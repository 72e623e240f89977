// out = x @ weight.T + bias with weights packed once, made for decode: at one row the weights stream through
// once at memory speed, at many rows every panel is read once per block of rows.
//
// The rule this file keeps (batch invariance): an output element is the sum over k in ascending order into one
// accumulator, in registers from the first k to the last. How many rows there are, which tile a row falls into
// and who computes it decide only which other elements sit in neighbouring registers.
//
// Layout: panels of 32 output features. A step of K is one line of 32 floats, or of 32 bfloat16 pairs (k, k+1),
// which is at once an operand of vdpbf16ps and a row of an AMX B tile. Rows of x are interleaved the same way
// ([step][row]), so the inner loop reads two sequential streams whatever the strides of x are.
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 12 x 2 accumulators, 2 weights, 1 broadcast: 27 of 32 registers
#else
constexpr int kMaxRows = 6;  // 6 x 2 accumulators, 2 weights, 1 broadcast: 15 of 16 registers
#endif
constexpr int kPanelVecs = kPanelColumns / kLanes;
constexpr int64_t kBlockBytes = 256 << 10;  // interleaved rows of x that stay in L2 beside a panel

// How values are multiplied. `X`: one interleaved step of one row; `kLine`: bytes of a panel's step.

struct Float32 {
  using T = float;
  using X = float;
  static constexpr int kLine = kPanelColumns * 4;
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
struct Bfloat16 {
  using T = uint16_t;
  using X = uint32_t;  // a pair
  static constexpr int kLine = kPanelColumns * 4;
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
struct Bfloat16 {
  using T = uint16_t;
  struct X {
    float even, odd;
  };
  static constexpr int kLine = kPanelColumns * 4;
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
template <class Type, int ROWS>
void tile(const typename Type::X* x, const char* panel, int64_t steps, Ahead ahead, float* sums) {
  constexpr int kVecs = ROWS <= 2 || kPanelVecs < 2 ? kPanelVecs : 2;
  for (int sweep = 0; sweep < kPanelVecs; sweep += kVecs) {
    Vec acc[ROWS][kVecs] = {};
    const char* line = panel + sweep * (kLanes * 4);
    const char* fetch = ahead.from;
    for (int64_t step = 0; step < steps; ++step, line += Type::kLine, fetch += ahead.stride) {
      __builtin_prefetch(fetch, 0, 2);
      __builtin_prefetch(fetch + 64, 0, 2);
      Type::multiply(x + step * ROWS, line, acc);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < kVecs; ++v) store(sums + r * kPanelColumns + (sweep + v) * kLanes, acc[r][v]);
  }
}

template <class Type>
void run_tile(int rows, const typename Type::X* x, const char* panel, int64_t steps, Ahead ahead, float* sums) {
  switch (rows) {
    case 1: return tile<Type, 1>(x, panel, steps, ahead, sums);
    case 2: return tile<Type, 2>(x, panel, steps, ahead, sums);
    case 3: return tile<Type, 3>(x, panel, steps, ahead, sums);
    case 4: return tile<Type, 4>(x, panel, steps, ahead, sums);
    case 5: return tile<Type, 5>(x, panel, steps, ahead, sums);
    case 6: return tile<Type, 6>(x, panel, steps, ahead, sums);
#if defined(__AVX512F__)
    case 7: return tile<Type, 7>(x, panel, steps, ahead, sums);
    case 8: return tile<Type, 8>(x, panel, steps, ahead, sums);
    case 9: return tile<Type, 9>(x, panel, steps, ahead, sums);
    case 10: return tile<Type, 10>(x, panel, steps, ahead, sums);
    case 11: return tile<Type, 11>(x, panel, steps, ahead, sums);
    case 12: return tile<Type, 12>(x, panel, steps, ahead, sums);
#endif
  }
}

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

// The grid of pieces: blocks of rows (outer) by runs of panels (inner). Tiles of a block differ by at most one row.
struct Plan {
  int64_t steps, panels, block_rows, blocks, run, runs;

  Plan(const LinearArgs& a, int64_t row_bytes) {
    steps = packed_steps(a.in_features, a.bf16);
    panels = (a.out_features + kPanelColumns - 1) / kPanelColumns;
    int64_t fit = kBlockBytes / row_bytes / kMaxRows * kMaxRows;
    int64_t share = (a.rows / (a.threads > 0 ? a.threads : 1) + kMaxRows) / kMaxRows * kMaxRows;
    int64_t most = share < 8 * kMaxRows ? 8 * kMaxRows : share;
    if (most > fit) most = fit;
    if (most < kMaxRows) most = kMaxRows;
    blocks = (a.rows + most - 1) / most;
    block_rows = (a.rows + blocks - 1) / blocks;
    int64_t pieces = (int64_t(a.threads) * 4 + blocks - 1) / blocks;
    run = a.threads <= 1 ? panels : (panels + pieces - 1) / pieces;
    runs = (panels + run - 1) / run;
  }
};

template <class Type>
void interleave(const typename Type::T* x, int64_t stride, int rows, int64_t steps, int64_t in_features,
                typename Type::X* to) {
  using X = typename Type::X;
  int64_t used = (in_features + Type::kDepth - 1) / Type::kDepth;
  for (int r = 0; r < rows; ++r) {
    const typename Type::T* row = x + r * stride;
    int64_t whole = in_features / Type::kDepth;
    for (int64_t s = 0; s < whole; ++s) to[s * rows + r] = Type::step(row, s * Type::kDepth, in_features);
    for (int64_t s = whole; s < used; ++s) to[s * rows + r] = Type::step(row, s * Type::kDepth, in_features);
    for (int64_t s = used; s < steps; ++s) to[s * rows + r] = X{};
  }
}

template <class Type, typename Out>
void run_pieces(const LinearArgs& a, int64_t* next) {
  using T = typename Type::T;
  using X = typename Type::X;
  const Plan plan(a, packed_steps(a.in_features, a.bf16) * int64_t(sizeof(X)));
  X* interleaved = static_cast<X*>(thread_scratch(size_t(plan.block_rows * plan.steps) * sizeof(X)));
  const char* packed = static_cast<const char*>(a.packed);
  alignas(64) float sums[kMaxRows * kPanelColumns];
  int64_t held = -1;

  for (;;) {
    int64_t piece = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    if (piece >= plan.blocks * plan.runs) return;
    int64_t block = piece / plan.runs, first = block * plan.block_rows;
    int64_t rows = a.rows - first < plan.block_rows ? a.rows - first : plan.block_rows;
    int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
    auto tile_start = [&](int64_t t) { return t * rows / tiles; };
    if (block != held) {
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t at = tile_start(t);
        interleave<Type>(static_cast<const T*>(a.x) + (first + at) * a.x_stride, a.x_stride,
                         int(tile_start(t + 1) - at), plan.steps, a.in_features, interleaved + at * plan.steps);
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
        const char* panel = packed + p * plan.steps * Type::kLine;
        const Ahead ahead = look_ahead(panel, plan.steps * Type::kLine, t, tiles);
        run_tile<Type>(count, interleaved + at * plan.steps, panel, plan.steps, ahead, sums);
        Out* out = static_cast<Out*>(a.out) + (first + at) * a.out_features + column;
        for (int r = 0; r < count; ++r)
          finish_row(sums + r * kPanelColumns, bias, out + r * a.out_features, columns);
      }
    }
  }
}

template <typename T, int DEPTH>
void pack_panel(const PackArgs& a, int64_t panel, int64_t steps) {
  T* to = static_cast<T*>(a.packed) + panel * steps * kPanelColumns * DEPTH;
  for (int64_t c = 0; c < kPanelColumns; ++c) {
    int64_t n = panel * kPanelColumns + c;
    const T* row = static_cast<const T*>(a.weight) + n * a.stride;
    for (int64_t s = 0; s < steps; ++s)
      for (int64_t d = 0; d < DEPTH; ++d) {
        int64_t k = s * DEPTH + d;
        to[(s * kPanelColumns + c) * DEPTH + d] = n < a.out_features && k < a.in_features ? row[k] : T(0);
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
  if (!a.bf16) return run_pieces<Float32, float>(a, next);
  if (a.out_bf16) return run_pieces<Bfloat16, uint16_t>(a, next);
  return run_pieces<Bfloat16, float>(a, next);
}

}  // namespace pagemill::PAGEMILL_LEVEL
