// out = x @ weight.T + bias with weights of 8 or 4 bits in groups of 32: at few rows the weights stream through at
// memory speed, a half or a quarter of bfloat16's bytes; at many rows a byte product does twice the work of a
// bfloat16 one.
//
// Rows of x are brought to 8 bits per group of 32 with a scale of their own, so that the products are integers and a
// group's sum is exact at every level. Batch invariance is then the order of the groups: ascending, into one float32
// accumulator, whatever the number of rows (linear_quant_tiles.h). This file cuts the work into tiles.
#include "cpu/kernels.h"
#include "cpu/linear_quant_tiles.h"
#include "cpu/scratch.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kQuantRows = 6;  // 6 x 2 integer and 6 x 2 float accumulators, 2 weights, 1 broadcast: 27 of 32 registers
#else
constexpr int kQuantRows = 4;
#endif
constexpr int64_t kQuantBlockBytes = 256 << 10;  // quantised rows of x that stay in L2 beside a panel

// The grid of pieces: blocks of rows (outer) by runs of panels (inner).
struct QuantPlan {
  int64_t groups, panels, panel_bytes, row_bytes, block_rows, blocks, run, runs;

  explicit QuantPlan(const LinearQuantArgs& a) {
    groups = quant_groups(a.in_features);
    panels = (a.out_features + kPanelColumns - 1) / kPanelColumns;
    panel_bytes = groups * quant_group_bytes(a.format);
    row_bytes = groups * QuantRow::kGroupBytes;
    const int64_t threads = a.threads > 0 ? a.threads : 1;
    int64_t most = kQuantBlockBytes / row_bytes / kQuantRows * kQuantRows;
    const int64_t share = (a.rows + threads - 1) / threads;
    if (most > share && share >= 8 * kQuantRows) most = share;
    if (most < kQuantRows) most = kQuantRows;
    blocks = (a.rows + most - 1) / most;
    block_rows = (a.rows + blocks - 1) / blocks;
    const int64_t pieces = (threads * 4 + blocks - 1) / blocks;
    run = threads == 1 ? panels : (panels + pieces - 1) / pieces;
    runs = (panels + run - 1) / run;
  }
};

template <int BITS, bool MINIMUMS>
void quant_multiply(int rows, const char* x, const char* panel, int64_t groups, const char* ahead, float* sums) {
  switch (rows) {
    case 1: return quant_tile<BITS, MINIMUMS, 1>(x, panel, groups, ahead, sums);
    case 2: return quant_tile<BITS, MINIMUMS, 2>(x, panel, groups, ahead, sums);
    case 3: return quant_tile<BITS, MINIMUMS, 3>(x, panel, groups, ahead, sums);
    case 4: return quant_tile<BITS, MINIMUMS, 4>(x, panel, groups, ahead, sums);
#if defined(__AVX512F__)
    case 5: return quant_tile<BITS, MINIMUMS, 5>(x, panel, groups, ahead, sums);
    case 6: return quant_tile<BITS, MINIMUMS, 6>(x, panel, groups, ahead, sums);
#endif
  }
}

template <typename Out>
void finish_quant_row(const float* sums, const float* bias, Out* out, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    Vec value = load(sums + c);
    if (bias != nullptr) value += load_up_to(bias + c, columns - c);
    store_up_to(out + c, value, columns - c);
  }
}

template <int BITS, bool MINIMUMS, typename T, typename Out>
void run_quant(const LinearQuantArgs& a, int64_t* next) {
  const QuantPlan plan(a);
  char* held_rows = static_cast<char*>(thread_scratch(size_t(plan.block_rows * plan.row_bytes)));
  alignas(64) float sums[kQuantRows * kPanelColumns];
  int64_t held = -1;
  for (;;) {
    const int64_t piece = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    if (piece >= plan.blocks * plan.runs) return;
    const int64_t block = piece / plan.runs, first = block * plan.block_rows;
    const int64_t rows = a.rows - first < plan.block_rows ? a.rows - first : plan.block_rows;
    const int64_t tiles = (rows + kQuantRows - 1) / kQuantRows;
    if (block != held) {
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t at = t * rows / tiles, count = (t + 1) * rows / tiles - at;
        quantise_rows(static_cast<const T*>(a.x) + (first + at) * a.x_stride, a.x_stride, int(count), a.in_features,
                      quant_start_factor<BITS>(MINIMUMS), held_rows + at * plan.row_bytes);
      }
      held = block;
    }
    const int64_t begin = piece % plan.runs * plan.run;
    const int64_t end = begin + plan.run < plan.panels ? begin + plan.run : plan.panels;
    for (int64_t p = begin; p < end; ++p) {
      const int64_t column = p * kPanelColumns, left = a.out_features - column;
      const int64_t columns = left < kPanelColumns ? left : kPanelColumns;
      const float* bias = a.bias == nullptr ? nullptr : a.bias + column;
      const char* panel = static_cast<const char*>(a.packed) + p * plan.panel_bytes;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t at = t * rows / tiles, count = (t + 1) * rows / tiles - at;
        // the first tile fetches the next panel; the last panel fetches past its end, which is harmless
        quant_multiply<BITS, MINIMUMS>(int(count), held_rows + at * plan.row_bytes, panel, plan.groups,
                                       t == 0 ? panel + plan.panel_bytes : nullptr, sums);
        Out* out = static_cast<Out*>(a.out) + (first + at) * a.out_features + column;
        for (int64_t r = 0; r < count; ++r)
          finish_quant_row(sums + r * kPanelColumns, bias, out + r * a.out_features, columns);
      }
    }
  }
}

template <int BITS, bool MINIMUMS>
void run_types(const LinearQuantArgs& a, int64_t* next) {
  if (!a.x_bf16) return run_quant<BITS, MINIMUMS, float, float>(a, next);
  if (a.out_bf16) return run_quant<BITS, MINIMUMS, uint16_t, uint16_t>(a, next);
  run_quant<BITS, MINIMUMS, uint16_t, float>(a, next);
}

void pack_group(const PackQuantArgs& a, int64_t panel, int64_t group, uint8_t* to) {
  const int64_t groups = quant_groups(a.in_features);
  uint16_t* heads = reinterpret_cast<uint16_t*>(to);
  uint8_t* lines = to + quant_head_bytes(a.format);
  __builtin_memset(to, 0, size_t(quant_group_bytes(a.format)));
  const int64_t first = group * kQuantGroup, left = a.in_features - first;
  const int64_t count = left < kQuantGroup ? left : kQuantGroup;
  for (int64_t c = 0; c < kPanelColumns; ++c) {
    const int64_t n = panel * kPanelColumns + c;
    if (n >= a.out_features) return;
    heads[c] = a.scales[n * groups + group];
    if (a.minimums != nullptr) heads[kPanelColumns + c] = a.minimums[n * groups + group];
    const uint8_t* values = a.values + n * a.stride + first;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t line = a.format.bits == 8 ? k / 4 : k % 16 / 4;
      const int shift = a.format.bits == 4 && k >= 16 ? 4 : 0;
      uint8_t& byte = lines[line * kQuantLine + c * 4 + k % 4];
      byte = uint8_t(byte | values[k] << shift);
    }
  }
}

}  // namespace

void pack_linear_quant(const PackQuantArgs& a, int64_t begin, int64_t end) {
  const int64_t groups = quant_groups(a.in_features), bytes = quant_group_bytes(a.format);
  uint8_t* packed = static_cast<uint8_t*>(a.packed);
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t g = 0; g < groups; ++g) pack_group(a, panel, g, packed + (panel * groups + g) * bytes);
}

void linear_quant(const LinearQuantArgs& a, int64_t* next) {
  if (a.format.bits == 8) {
    if (a.format.minimums) return run_types<8, true>(a, next);
    return run_types<8, false>(a, next);
  }
  if (a.format.minimums) return run_types<4, true>(a, next);
  run_types<4, false>(a, next);
}

}  // namespace pagemill::PAGEMILL_LEVEL
