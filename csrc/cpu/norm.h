// What the norm kernel takes.
#pragma once

#include "cpu/types.h"

namespace pagemill {

// Where values are rounded to the tensor's type, after the model families that do so.
enum class NormVariant : int32_t {
  llama,    // round(round(x * scale) * weight)
  gemma,    // round(x * scale * (1 + weight))
  float32,  // round(x * scale * weight)
  layer,    // round((x - mean) * scale * weight + bias), no RMS norm: the mean is taken away first
};

struct NormArgs {
  const char* x;        // rows of `dim` elements
  const char* weight;   // [dim], layer: [2, dim], the bias second; null: out is the sum, rounded
  char* residual;       // [rows, dim] contiguous or null: residual = round(residual + x) is what gets normalised
  char* out;            // [rows, dim] contiguous; null, without a weight: only the sum is wanted
  int64_t inner;        // row r starts at (r / inner) * outer_stride + (r % inner) * inner_stride, in elements
  int64_t outer_stride, inner_stride;
  int64_t dim;
  float eps;
  NormVariant variant;
  ElementType type;
  float factor = 1;  // what x is multiplied by, and rounded, before it is added to the residual
  bool is_wide = false;  // x and residual are float32, whatever the type of weight and out
};

}  // namespace pagemill
