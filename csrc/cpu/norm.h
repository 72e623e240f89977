// What the RMS norm kernel takes.
#pragma once

#include "cpu/types.h"

namespace pagemill {

// Where values are rounded to the tensor's type, after the model families that do so.
enum class NormVariant : int32_t {
  llama,    // round(round(x * scale) * weight)
  gemma,    // round(x * scale * (1 + weight))
  float32,  // round(x * scale * weight)
};

struct NormArgs {
  const char* x;        // rows of `dim` elements
  const char* weight;   // [dim]
  char* residual;       // [rows, dim] contiguous or null: residual = round(residual + x) is what gets normalised
  char* out;            // [rows, dim] contiguous
  int64_t inner;        // row r starts at (r / inner) * outer_stride + (r % inner) * inner_stride, in elements
  int64_t outer_stride, inner_stride;
  int64_t dim;
  float eps;
  NormVariant variant;
  ElementType type;
};

}  // namespace pagemill
