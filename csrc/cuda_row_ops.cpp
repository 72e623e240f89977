// Norms, activations and sampling on CUDA tensors: argument checks and the launch.
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

void check_logits(const char* op, const Tensor& logits) {
  check_cuda(op, "logits", logits);
  check_shape(op, "logits", logits, "[rows, vocab]", {-1, -1});
  check_dtype(op, "logits", logits, ScalarType::Float);
  check_rows(op, "logits", logits);
}

template <typename T>
const T* per_row(const char* op, const char* argument, const Tensor& tensor, int64_t rows, ScalarType type) {
  check_shape(op, argument, tensor, "[rows]", {rows});
  return device_data<T>(op, argument, tensor, type);
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

Tensor sample(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
              const Tensor greedy, const Tensor seed_keys, const Tensor positions) {
  const char* op = "sample";
  check_logits(op, logits);
  const int64_t rows = logits.size(0);
  const ScalarType flag = greedy.scalar_type() == ScalarType::Bool ? ScalarType::Bool : ScalarType::Byte;
  Tensor ids = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  const DeviceCall call(op, logits);
  call.check(pagemill_sample(static_cast<const float*>(logits.const_data_ptr()), rows, logits.size(1), logits.stride(0),
                             per_row<float>(op, "temperature", temperature, rows, ScalarType::Float),
                             per_row<int32_t>(op, "top_k", top_k, rows, ScalarType::Int),
                             per_row<float>(op, "top_p", top_p, rows, ScalarType::Float),
                             per_row<float>(op, "min_p", min_p, rows, ScalarType::Float),
                             per_row<uint8_t>(op, "greedy", greedy, rows, flag),
                             per_row<int64_t>(op, "seed_keys", seed_keys, rows, ScalarType::Long),
                             per_row<int64_t>(op, "positions", positions, rows, ScalarType::Long),
                             static_cast<int64_t*>(ids.mutable_data_ptr()), call.stream()));
  return ids;
}

Tensor logprobs_of(const Tensor logits, const Tensor ids) {
  const char* op = "logprobs_of";
  check_logits(op, logits);
  check_shape(op, "ids", ids, "[rows, num_ids]", {logits.size(0), -1});
  Tensor logprobs = torch::stable::new_empty(logits, {logits.size(0), ids.size(1)}, ScalarType::Float);
  const DeviceCall call(op, logits);
  call.check(pagemill_logprobs_of(static_cast<const float*>(logits.const_data_ptr()), logits.size(0), logits.size(1),
                                  logits.stride(0), device_data<int64_t>(op, "ids", ids, ScalarType::Long), ids.size(1),
                                  static_cast<float*>(logprobs.mutable_data_ptr()), call.stream()));
  return logprobs;
}

}  // namespace pagemill::cuda
