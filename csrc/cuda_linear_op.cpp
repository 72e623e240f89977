// pack_linear and linear on CUDA tensors: argument checks, output tensors, the launch.
#include <torch/csrc/stable/ops.h>

#include "cuda/launchers.h"
#include "cuda_check.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

// Checks the bias of so many rows of the weight; its data, or null.
const void* bias_data(const char* op, const std::optional<Tensor>& bias, int64_t weight_rows, ScalarType type) {
  if (!bias.has_value()) return nullptr;
  check_cuda(op, "bias", *bias);
  if (bias->scalar_type() != ScalarType::Float) check_dtype(op, "bias", *bias, type);
  check_shape(op, "bias", *bias, "[rows of the weight]", {weight_rows});
  check_contiguous(op, "bias", *bias);
  return bias->const_data_ptr();
}

const void* residual_data(const char* op, const std::optional<Tensor>& residual, const Tensor& out, bool gated) {
  if (!residual.has_value()) return nullptr;
  if (gated) fail(op, "residual", "wanted none beside an activation");
  check_cuda(op, "residual", *residual);
  check_dtype(op, "residual", *residual, out.scalar_type());
  check_shape(op, "residual", *residual, "[rows, out_features]", {out.size(0), out.size(1)});
  check_contiguous(op, "residual", *residual);
  return residual->const_data_ptr();
}

void check_type(const char* op, const char* argument, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half) return;
  fail(op, argument, "wanted float32, bfloat16 or float16, got ", dtype_text(type));
}

}  // namespace

// The kernels read weights as checkpoints hold them: the weight itself.
Tensor pack_linear(const Tensor weight, bool gated) {
  const char* op = "pack_linear";
  check_cuda(op, "weight", weight);
  check_type(op, "weight", weight);
  check_shape(op, "weight", weight, "[out_features, in_features]", {-1, -1});
  check_rows(op, "weight", weight);
  if (gated && weight.size(0) % 2 != 0) {
    fail(op, "weight", "wanted an even number of rows (gate, then up), got ", shape_text(weight));
  }
  return weight;
}

Tensor linear(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
              bool float32_out, const std::optional<std::string> activation, const std::optional<Tensor> residual) {
  const char* op = "linear";
  check_cuda(op, "x", x);
  check_type(op, "x", x);
  check_shape(op, "x", x, "[rows, in_features]", {-1, -1});
  check_rows(op, "x", x);
  const bool gated = activation.has_value();
  const int64_t rows = x.size(0), in_features = x.size(1), weight_rows = gated ? 2 * out_features : out_features;
  check_cuda(op, "packed", packed);
  check_dtype(op, "packed", packed, x.scalar_type());
  check_shape(op, "packed", packed, "[out_features, in_features]", {weight_rows, in_features});
  check_rows(op, "packed", packed);
  Tensor out = torch::stable::new_empty(x, {rows, out_features}, float32_out ? ScalarType::Float : x.scalar_type());
  const bool splits = x.scalar_type() != ScalarType::Float;
  const int64_t bytes = splits ? pagemill_linear_workspace(rows, weight_rows, in_features) : 0;
  Tensor workspace = torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  const int64_t kind = gated ? activation_code(op, "activation", *activation) : 0;
  const DeviceCall call(op, x);
  call.check(pagemill_linear(out.mutable_data_ptr(), x.const_data_ptr(), packed.const_data_ptr(),
                             bias_data(op, bias, weight_rows, x.scalar_type()), residual_data(op, residual, out, gated),
                             bytes > 0 ? workspace.mutable_data_ptr() : nullptr, bytes, rows, out_features, in_features,
                             x.stride(0), packed.stride(0), gated, kind, float32_out,
                             element_code(op, "bias", bias.has_value() ? *bias : x), element_code(op, "x", x),
                             call.stream()));
  return out;
}

}  // namespace pagemill::cuda
