// What the linear layer's kernels take, and the layout of packed weights.
#pragma once

#include <cstdint>

#include "cpu/activation.h"

namespace pagemill {

constexpr int64_t kPanelColumns = 32;  // output features per packed panel
constexpr int64_t kGatedColumns = 16;  // of a gated weight's panel: as many of the gate, then theirs of the up half

// Steps of K that a packed panel holds: float32 one value per step; 16-bit types pairs, padded so that a whole
// number of 32-deep AMX tiles fits.
static inline int64_t packed_steps(int64_t in_features, bool bf16) {
  return bf16 ? (in_features + 31) / 32 * 16 : in_features;
}

static inline int64_t packed_panels(int64_t rows_of_weight, bool gated) {
  const int64_t outputs = gated ? rows_of_weight / 2 : rows_of_weight;
  const int64_t columns = gated ? kGatedColumns : kPanelColumns;
  return (outputs + columns - 1) / columns;
}

struct PackArgs {
  const void* weight;  // [out_features, in_features], rows `stride` elements apart
  int64_t stride;
  void* packed;  // float32 [panels, steps, 32]; bfloat16 [panels, steps, 32, 2]
  int64_t out_features, in_features;
  bool bf16;
  bool gated = false;  // the first half of the weight's rows is a gate, the second what it lets through
};

// What becomes of x @ weight.T + bias, rounded to the output's type, before it is stored.
enum class Epilogue : int32_t {
  none,
  add,    // residual + it, rounded again: the same bits as two operations
  gated,  // activation(gate half), rounded, times the up half: the same bits as gated_activation. Packed with `gated`
};

struct LinearArgs {
  const void* x;  // [rows, in_features], rows `x_stride` elements apart, in the weight's type
  int64_t x_stride;
  const void* packed;
  const float* bias;  // [out_features] or null; gated: [2 * out_features]
  void* out;          // [rows, out_features], contiguous
  int64_t rows, in_features, out_features;
  bool bf16, out_bf16;
  int threads;  // how many workers will call linear(): a hint for the size of a piece of work, never for arithmetic
  Epilogue epilogue = Epilogue::none;
  const void* residual = nullptr;  // add: [rows, out_features], contiguous, of out's type; may be `out`
  ActivationKind activation = ActivationKind::silu;  // gated
};

}  // namespace pagemill
