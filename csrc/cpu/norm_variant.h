// The norm variants' names at the op boundary.
#pragma once

#include <string>

#include "check.h"
#include "cpu/norm.h"

namespace pagemill {

inline NormVariant parse_variant(const char* op, const std::string& name) {
  if (name == "llama") return NormVariant::llama;
  if (name == "gemma") return NormVariant::gemma;
  if (name == "f32") return NormVariant::float32;
  if (name == "layer") return NormVariant::layer;
  fail(op, "variant", "wanted llama, gemma, f32 or layer, got ", name);
}

inline void check_norm_weight(const char* op, const char* argument, const Tensor& weight, NormVariant variant,
                              int64_t dim) {
  if (variant == NormVariant::layer) {
    check_shape(op, argument, weight, "[2, dim]", {2, dim});
  } else {
    check_shape(op, argument, weight, "[dim]", {dim});
  }
  check_contiguous(op, argument, weight);
}

}  // namespace pagemill
