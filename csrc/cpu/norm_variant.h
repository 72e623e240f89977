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
  fail(op, "variant", "wanted llama, gemma or f32, got ", name);
}

}  // namespace pagemill
