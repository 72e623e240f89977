// The functions ops.cpp registers; each is defined in cpu/NAME_op.cpp, which checks its arguments.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace pagemill {

using torch::stable::Tensor;

std::string isa();
std::string isa_levels();
void set_isa(std::string name);

void reshape_and_cache(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache, const Tensor slot_mapping);

}  // namespace pagemill
