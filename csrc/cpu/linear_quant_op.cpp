// pack_linear_quant and linear_quant: argument checks, output tensors, threads.
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/weight_memory.h"
#include "linear_check.h"
#include "op_list.h"

namespace pagemill {
namespace {

// A second thread must save more than it costs to wake: at one row this is about 1 MiB of 8-bit weights.
constexpr int64_t kQuantWorkPerThread = 1 << 20;

const uint16_t* halves(const char* op, const char* argument, const Tensor& tensor, int64_t n, int64_t groups) {
  check_cpu(op, argument, tensor);
  check_dtype(op, argument, tensor, ScalarType::Half);
  check_shape(op, argument, tensor, "[out_features, groups of 32 in_features]", {n, groups});
  check_contiguous(op, argument, tensor);
  const uint16_t* values = reinterpret_cast<const uint16_t*>(bytes_of(tensor));
  for (int64_t i = 0; i < n * groups; ++i)
    if ((values[i] & 0x7c00) == 0x7c00) fail(op, argument, "wanted finite numbers, got an infinity or NaN");
  return values;
}

void check_values(const char* op, const Tensor& values, int64_t bits) {
  check_cpu(op, "values", values);
  check_dtype(op, "values", values, ScalarType::Byte);
  check_shape(op, "values", values, "[out_features, in_features]", {-1, -1});
  check_rows(op, "values", values);
  if (bits != 8 && bits != 4) fail(op, "bits", "wanted 8 or 4, got ", bits);
  const int64_t n = values.size(0), k = values.size(1);
  if (n < 1 || k < 1) fail(op, "values", "wanted at least one row and one column, got ", shape_text(values));
  if (bits == 8) return;
  const uint8_t* row = reinterpret_cast<const uint8_t*>(bytes_of(values));
  uint8_t all = 0;
  for (int64_t i = 0; i < n; ++i, row += values.stride(0))
    for (int64_t j = 0; j < k; ++j) all = static_cast<uint8_t>(all | row[j]);
  if (all > 15) fail(op, "values", "wanted values from 0 to 15");
}

}  // namespace

Tensor pack_linear_quant(const Tensor values, const Tensor scales, const std::optional<Tensor> minimums, int64_t bits) {
  const char* op = "pack_linear_quant";
  check_values(op, values, bits);
  const int64_t n = values.size(0), k = values.size(1), groups = quant_groups(k);
  const uint16_t* scale_data = halves(op, "scales", scales, n, groups);
  const uint16_t* minimum_data = minimums.has_value() ? halves(op, "minimums", *minimums, n, groups) : nullptr;
  const QuantFormat format{static_cast<int>(bits), minimums.has_value()};
  const int64_t panels = (n + kPanelColumns - 1) / kPanelColumns;
  Tensor packed = new_weight(values, {panels, groups, quant_group_bytes(format)});
  const PackQuantArgs args{reinterpret_cast<const uint8_t*>(bytes_of(values)), values.stride(0), scale_data, minimum_data,
                           mutable_bytes_of(packed), n, k, format};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, panels, 4,
                              [&](int64_t begin, int64_t end) { table.pack_linear_quant(args, begin, end); });
  return packed;
}

Tensor linear_quant(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
                    bool float32_out) {
  const char* op = "linear_quant";
  check_cpu(op, "x", x);
  check_shape(op, "x", x, "[rows, in_features]", {-1, -1});
  check_rows(op, "x", x);
  const bool bf16 = element_type(op, "x", x) == ElementType::bf16;
  const int64_t rows = x.size(0), k = x.size(1);
  if (out_features < 1) fail(op, "out_features", "wanted at least 1, got ", out_features);
  const QuantFormat format = check_packed_quant(op, "packed", packed, k, out_features);
  if (bias.has_value()) {
    check_cpu(op, "bias", *bias);
    check_dtype(op, "bias", *bias, ScalarType::Float);
    check_shape(op, "bias", *bias, "[out_features]", {out_features});
    check_contiguous(op, "bias", *bias);
  }
  const bool bf16_out = bf16 && !float32_out;
  Tensor out = torch::stable::new_empty(x, {rows, out_features}, bf16_out ? ScalarType::BFloat16 : ScalarType::Float);
  if (rows == 0) return out;

  const int64_t useful = rows * out_features * k / kQuantWorkPerThread + 1;
  const int64_t most = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t threads = useful < most ? useful : most;
  const float* bias_data = bias.has_value() ? reinterpret_cast<const float*>(bytes_of(*bias)) : nullptr;
  const LinearQuantArgs args{bytes_of(x), x.stride(0), bytes_of(packed), bias_data, mutable_bytes_of(out), rows, k,
                             out_features, format, bf16, bf16_out, static_cast<int>(threads)};
  const KernelTable& table = kernels();
  int64_t next = 0;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { table.linear_quant(args, &next); });
  return out;
}

}  // namespace pagemill
