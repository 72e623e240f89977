// pack_linear_quant, linear_quant and embed_quant: argument checks, output tensors, threads.
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

Tensor pack_linear_quant(const Tensor values, const Tensor scales, const std::optional<Tensor> minimums, int64_t bits,
                         bool gated) {
  const char* op = "pack_linear_quant";
  check_values(op, values, bits);
  const int64_t n = values.size(0), k = values.size(1), groups = quant_groups(k);
  if (gated && n % 2 != 0) fail(op, "values", "wanted an even number of rows (gate, then up), got ", shape_text(values));
  const uint16_t* scale_data = halves(op, "scales", scales, n, groups);
  const uint16_t* minimum_data = minimums.has_value() ? halves(op, "minimums", *minimums, n, groups) : nullptr;
  const QuantFormat format{static_cast<int>(bits), minimums.has_value()};
  const int64_t panels = packed_panels(n, gated);
  Tensor packed = new_weight(values, {panels, groups, quant_group_bytes(format)});
  const PackQuantArgs args{reinterpret_cast<const uint8_t*>(bytes_of(values)), values.stride(0), scale_data, minimum_data,
                           mutable_bytes_of(packed), n, k, format, gated};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, panels, 4,
                              [&](int64_t begin, int64_t end) { table.pack_linear_quant(args, begin, end); });
  return packed;
}

Tensor linear_quant(const Tensor x, const Tensor packed, const std::optional<Tensor> bias, int64_t out_features,
                    bool float32_out, const std::optional<std::string> activation) {
  const char* op = "linear_quant";
  check_cpu(op, "x", x);
  check_shape(op, "x", x, "[rows, in_features]", {-1, -1});
  check_rows(op, "x", x);
  const bool bf16 = element_type(op, "x", x) == ElementType::bf16, gated = activation.has_value();
  const int64_t rows = x.size(0), k = x.size(1), weight_rows = gated ? 2 * out_features : out_features;
  if (out_features < 1) fail(op, "out_features", "wanted at least 1, got ", out_features);
  const QuantFormat format = check_packed_quant(op, "packed", packed, k, weight_rows, gated);
  if (bias.has_value()) {
    check_cpu(op, "bias", *bias);
    check_dtype(op, "bias", *bias, ScalarType::Float);
    check_shape(op, "bias", *bias, gated ? "[2 * out_features]" : "[out_features]", {weight_rows});
    check_contiguous(op, "bias", *bias);
  }
  const bool bf16_out = bf16 && !float32_out;
  Tensor out = torch::stable::new_empty(x, {rows, out_features}, bf16_out ? ScalarType::BFloat16 : ScalarType::Float);

  const int64_t useful = rows * weight_rows * k / kQuantWorkPerThread + 1;
  const int64_t most = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t threads = useful < most ? useful : most;
  const float* bias_data = bias.has_value() ? reinterpret_cast<const float*>(bytes_of(*bias)) : nullptr;
  LinearArgs args{bytes_of(x), x.stride(0), bytes_of(packed), bias_data, mutable_bytes_of(out), rows, k,
                  out_features, bf16, bf16_out, static_cast<int>(threads)};
  if (gated) {
    args.epilogue = Epilogue::gated;
    args.activation = parse_activation(op, "activation", *activation);
  }
  if (rows == 0) return out;
  const KernelTable& table = kernels();
  int64_t next = 0;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { table.linear_quant(args, format, &next); });
  return out;
}

Tensor embed_quant(const Tensor ids, const Tensor packed, const Tensor like, int64_t vocab_size) {
  const char* op = "embed_quant";
  check_cpu(op, "ids", ids);
  check_dtype(op, "ids", ids, ScalarType::Long);
  check_shape(op, "ids", ids, "[num_tokens]", {-1});
  check_contiguous(op, "ids", ids);
  check_shape(op, "like", like, "[hidden_size]", {-1});
  if (vocab_size < 1) fail(op, "vocab_size", "wanted at least 1, got ", vocab_size);
  const int64_t count = ids.size(0), dim = like.size(0);
  const QuantFormat format = check_packed_quant(op, "packed", packed, dim, vocab_size);
  const int64_t* id = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    if (id[i] < 0 || id[i] >= vocab_size) fail(op, "ids", "wanted numbers below ", vocab_size, ", got ", id[i], " at ", i);
  }
  Tensor out = torch::stable::new_empty(like, {count, dim});
  const EmbedQuantArgs args{bytes_of(packed), id, mutable_bytes_of(out), dim, 1.0f, format, element_type(op, "like", like)};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, count, 64, [&](int64_t begin, int64_t end) { table.embed_quant(args, begin, end); });
  return out;
}

}  // namespace pagemill
