// Memory for packed weights, in huge pages where the system gives them.
#pragma once

#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace pagemill {

// A tensor like `like` (dtype, device) of this shape, contents undefined, 128-byte aligned. Throws std::bad_alloc.
torch::stable::Tensor new_weight(const torch::stable::Tensor& like, const std::vector<int64_t>& shape);

}  // namespace pagemill
