// What the linear layer's kernels take, and the layout of packed weights.
#pragma once

#include <cstdint>

namespace pagemill {

constexpr int64_t kPanelColumns = 32;  // output features per packed panel

// Steps of K that a packed panel holds: float32 one value per step; bfloat16 pairs, padded so that a whole
// number of 32-deep AMX tiles fits.
inline int64_t packed_steps(int64_t in_features, bool bf16) {
  return bf16 ? (in_features + 31) / 32 * 16 : in_features;
}

struct PackArgs {
  const void* weight;  // [out_features, in_features], rows `stride` elements apart
  int64_t stride;
  void* packed;  // float32 [panels, steps, 32]; bfloat16 [panels, steps, 32, 2]
  int64_t out_features, in_features;
  bool bf16;
};

struct LinearArgs {
  const void* x;  // [rows, in_features], rows `x_stride` elements apart, in the weight's type
  int64_t x_stride;
  const void* packed;
  const float* bias;  // [out_features] or null
  void* out;          // [rows, out_features], contiguous
  int64_t rows, in_features, out_features;
  bool bf16, out_bf16;
  int threads;  // how many workers will call linear(): a hint for the size of a piece of work, never for arithmetic
};

}  // namespace pagemill
