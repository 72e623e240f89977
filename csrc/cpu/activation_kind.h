// The activations' names at the op boundary.
#pragma once

#include <string>

#include "check.h"
#include "cpu/activation.h"

namespace pagemill {

inline ActivationKind parse_activation(const char* op, const char* argument, const std::string& name) {
  if (name == "silu") return ActivationKind::silu;
  if (name == "gelu") return ActivationKind::gelu;
  if (name == "gelu_tanh") return ActivationKind::gelu_tanh;
  fail(op, argument, "wanted silu, gelu or gelu_tanh, got ", name);
}

}  // namespace pagemill
