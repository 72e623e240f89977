// Norms and activations on CUDA tensors: argument checks and the launch.
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "cuda/launchers.h"
#include "cuda_check.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

Tensor norm(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight, double eps,
            const std::string& variant) {
  check_cuda(op, "x", x);
  if (x.dim() < 1 || x.size(x.dim() - 1) < 1) {
    fail(op, "x", "wanted a last dimension of at least 1, got ", shape_text(x));
  }
  const int64_t dim = x.size(x.dim() - 1);
  check_rows(op, "x", x);
  if (x.dim() > 3) check_contiguous(op, "x", x);
  const int64_t kind = code_of(op, "variant", variant, {"llama", "gemma", "f32", "layer"});
  if (variant == "layer") {
    check_shape(op, "weight", weight, "[2, dim]", {2, dim});
  } else {
    check_shape(op, "weight", weight, "[dim]", {dim});
  }
  check_cuda(op, "weight", weight);
  check_contiguous(op, "weight", weight);
  if (x.scalar_type() != ScalarType::Float) check_dtype(op, "weight", weight, x.scalar_type());
  if (!(eps >= 0)) fail(op, "eps", "wanted a number of at least 0, got ", eps);
  void* sum = nullptr;
  if (residual != nullptr) {
    check_cuda(op, "residual", *residual);
    check_dtype(op, "residual", *residual, x.scalar_type());
    check_contiguous(op, "residual", *residual);
    bool same = residual->dim() == x.dim();
    for (int64_t i = 0; same && i < x.dim(); ++i) same = residual->size(i) == x.size(i);
    if (!same) fail(op, "residual", "wanted the shape of x = ", shape_text(x), ", got ", shape_text(*residual));
    sum = residual->mutable_data_ptr();
  }
  int64_t inner = 1, outer_stride = x.dim() == 1 || x.dim() > 3 ? dim : x.stride(0), inner_stride = dim;
  if (x.dim() == 3) {
    inner = x.size(1) > 0 ? x.size(1) : 1;
    inner_stride = x.stride(1);
  }
  Tensor out = torch::stable::new_empty(x, x.sizes(), weight.scalar_type());
  const DeviceCall call(op, x);
  call.check(pagemill_rms_norm(x.const_data_ptr(), weight.const_data_ptr(), sum, out.mutable_data_ptr(),
                               x.numel() / dim, inner, outer_stride, inner_stride, dim, static_cast<float>(eps), kind,
                               element_code(op, "x", x), element_code(op, "weight", weight), call.stream()));
  return out;
}

}  // namespace

Tensor rms_norm(const Tensor x, const Tensor weight, double eps, std::string variant) {
  return norm("rms_norm", x, nullptr, weight, eps, variant);
}

Tensor fused_add_rms_norm(const Tensor x, Tensor residual, const Tensor weight, double eps, std::string variant) {
  return norm("fused_add_rms_norm", x, &residual, weight, eps, variant);
}

Tensor activation(const Tensor x, std::string kind) {
  const char* op = "activation";
  check_cuda(op, "x", x);
  check_contiguous(op, "x", x);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const DeviceCall call(op, x);
  call.check(pagemill_activation(x.const_data_ptr(), out.mutable_data_ptr(), x.numel(), activation_code(op, "kind", kind),
                                 element_code(op, "x", x), call.stream()));
  return out;
}

Tensor gated_activation(const Tensor x, std::string kind) {
  const char* op = "gated_activation";
  check_cuda(op, "x", x);
  check_contiguous(op, "x", x);
  if (x.dim() < 1 || x.size(x.dim() - 1) % 2 != 0 || x.size(x.dim() - 1) == 0) {
    fail(op, "x", "wanted an even last dimension (gate, then up), got ", shape_text(x));
  }
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < x.dim(); ++i) shape.push_back(x.size(i));
  const int64_t width = shape.back() / 2;
  shape.back() = width;
  Tensor out = torch::stable::new_empty(x, shape);
  const DeviceCall call(op, x);
  call.check(pagemill_gated_activation(x.const_data_ptr(), out.mutable_data_ptr(), out.numel() / width, width,
                                       activation_code(op, "kind", kind), element_code(op, "x", x), call.stream()));
  return out;
}

}  // namespace pagemill::cuda
