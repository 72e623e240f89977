// Packs the weight of a linear layer into panels, once, at load.
//
// By groups of 64 values of K: a cache line or two of every row at a time, into lines that stay in L1 until they are
// full.
#include "cpu/kernels.h"
#include "cpu/linear_tiles.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int64_t kValues = 64;

// The weight's row in column c of a panel; -1 where there is none.
int64_t row_of(const PackArgs& a, int64_t panel, int64_t c) {
  if (!a.gated) {
    const int64_t n = panel * kPanelColumns + c;
    return n < a.out_features ? n : -1;
  }
  const int64_t n = panel * kGatedColumns + c % kGatedColumns, half = a.out_features / 2;
  return n >= half ? -1 : c < kGatedColumns ? n : half + n;
}

// DEPTH values per step.
template <typename T, int DEPTH>
void pack_panel(const PackArgs& a, int64_t panel) {
  const int64_t steps = packed_steps(a.in_features, a.bf16);
  T* lines = static_cast<T*>(a.packed) + panel * steps * kPanelColumns * DEPTH;
  alignas(64) T values[kValues];
  for (int64_t first = 0; first < steps * DEPTH; first += kValues) {
    const int64_t left = a.in_features - first, room = steps * DEPTH - first;
    const int64_t count = left < kValues ? left : kValues, end = (room < kValues ? room : kValues) / DEPTH;
    T* to = lines + first * kPanelColumns;
    for (int64_t c = 0; c < kPanelColumns; ++c) {
      const int64_t row = row_of(a, panel, c), used = row < 0 ? 0 : count;
      const T* from = static_cast<const T*>(a.weight) + (row < 0 ? 0 : row) * a.stride + first;
      for (int64_t i = 0; i < used; ++i) values[i] = from[i];
      for (int64_t i = used; i < kValues; ++i) values[i] = T(0);
      for (int64_t s = 0; s < end; ++s)
        __builtin_memcpy(to + (s * kPanelColumns + c) * DEPTH, values + s * DEPTH, sizeof(T) * DEPTH);
    }
  }
}

}  // namespace

void pack_linear(const PackArgs& a, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel) {
    if (a.bf16) {
      pack_panel<uint16_t, 2>(a, panel);
    } else {
      pack_panel<float, 1>(a, panel);
    }
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
