// pack_linear and linear: argument checks, output tensors, threads.
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "cpu/activation_kind.h"
#include "cpu/isa.h"
#include "cpu/weight_memory.h"
#include "linear_check.h"
#include "op_list.h"

namespace pagemill {
namespace {

// A second thread must save more than it costs to wake: at one row this is 1 MiB of bfloat16 weights, about 40 us.
constexpr int64_t kWorkPerThread = 1 << 19;

void check_residual(const char* op, const Tensor& residual, bool gated, int64_t rows, int64_t out_features,
                    ScalarType type) {
  if (gated) fail(op, "residual", "wanted none beside an activation");
  check_cpu(op, "residual", residual);
  check_dtype(op, "residual", residual, type);
  check_shape(op, "residual", residual, "[rows, out_features]", {rows, out_features});
  check_contiguous(op, "residual", residual);
}

void run(LinearArgs args) {
  const int64_t useful = args.rows * args.out_features * args.in_features / kWorkPerThread + 1;
  const int64_t most = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t threads = useful < most ? useful : most;
  args.threads = static_cast<int>(threads);
  const KernelTable& table = kernels();
  int64_t next = 0;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { table.linear(args, &next); });
}

}  // namespace

Tensor pack_linear(const Tensor weight, bool gated) {
  const char* op = "pack_linear";
  check_cpu(op, "weight", weight);
  check_shape(op, "weight", weight, "[out_features, in_features]", {-1, -1});
  check_rows(op, "weight", weight);
  const bool bf16 = element_type(op, "weight", weight) == ElementType::bf16;
  const int64_t n = weight.size(0), k = weight.size(1);
  if (n < 1 || k < 1) fail(op, "weight", "wanted at least one row and one column, got ", shape_text(weight));
  if (gated && n % 2 != 0) fail(op, "weight", "wanted an even number of rows (gate, then up), got ", shape_text(weight));
  const int64_t panels = packed_panels(n, gated), steps = packed_steps(k, bf16);
  const std::vector<int64_t> shape = bf16 ? std::vector<int64_t>{panels, steps, kPanelColumns, 2}
                                          : std::vector<int64_t>{panels, steps, kPanelColumns};
  Tensor packed = new_weight(weight, shape);
  const PackArgs args{bytes_of(weight), weight.stride(0), mutable_bytes_of(packed), n, k, bf16, gated};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, panels, 4, [&](int64_t begin, int64_t end) { table.pack_linear(args, begin, end); });
  return packed;
}

Tensor linear(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
              bool float32_out, const std::optional<std::string> activation, const std::optional<Tensor> residual) {
  const char* op = "linear";
  check_cpu(op, "x", x);
  check_cpu(op, "packed", packed);
  check_shape(op, "x", x, "[rows, in_features]", {-1, -1});
  check_rows(op, "x", x);
  const bool bf16 = element_type(op, "x", x) == ElementType::bf16, gated = activation.has_value();
  check_dtype(op, "packed", packed, x.scalar_type());
  const int64_t rows = x.size(0), k = x.size(1);
  if (out_features < 1) fail(op, "out_features", "wanted at least 1, got ", out_features);
  check_packed(op, "packed", packed, packed_panels(gated ? 2 * out_features : out_features, gated), packed_steps(k, bf16));
  const std::vector<float> bias_values = bias.has_value()
                                             ? read_bias(op, "bias", *bias, gated ? 2 * out_features : out_features,
                                                         gated ? "[2 * out_features]" : "[out_features]")
                                             : std::vector<float>{};
  const bool bf16_out = bf16 && !float32_out;
  const ScalarType out_type = bf16_out ? ScalarType::BFloat16 : ScalarType::Float;
  if (residual.has_value()) check_residual(op, *residual, gated, rows, out_features, out_type);
  Tensor out = torch::stable::new_empty(x, {rows, out_features}, out_type);

  LinearArgs args{bytes_of(x), x.stride(0), bytes_of(packed), bias_values.empty() ? nullptr : bias_values.data(),
                  mutable_bytes_of(out), rows, k, out_features, bf16, bf16_out, 1};
  if (gated) {
    args.epilogue = Epilogue::gated;
    args.activation = parse_activation(op, "activation", *activation);
  } else if (residual.has_value()) {
    args.epilogue = Epilogue::add;
    args.residual = bytes_of(*residual);
  }
  if (rows == 0) return out;

  run(args);
  return out;
}

}  // namespace pagemill
