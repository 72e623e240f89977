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

Tensor pack_linear(const Tensor weight);
Tensor linear(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
              bool float32_out);

}  // namespace pagemill
