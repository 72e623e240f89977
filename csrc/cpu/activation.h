// What the activation kernels take.
#pragma once

#include "cpu/types.h"

namespace pagemill {

enum class ActivationKind : int32_t { silu, gelu, gelu_tanh };

struct ActivationArgs {
  const char* x;  // contiguous; gated: [rows, 2 * width], gate first
  char* out;      // contiguous; gated: [rows, width]
  int64_t width;
  ActivationKind kind;
  ElementType type;
};

}  // namespace pagemill
