// Edits of logits on CUDA tensors, and the counts they look at: argument checks and the launches.
#include "cuda/launchers.h"
#include "cuda_check.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

constexpr int64_t kMaxRows = 65535;  // of a grid's second dimension

int64_t check_row_count(const char* op, const Tensor& logits) {
  if (logits.size(0) > kMaxRows) fail(op, "logits", "wanted at most ", kMaxRows, " rows, got ", logits.size(0));
  return logits.size(0);
}

int32_t* counts_data(const char* op, const Tensor& counts, int64_t vocab) {
  check_shape(op, "counts", counts, "[num_rows, vocab]", {-1, vocab});
  return const_cast<int32_t*>(device_data<int32_t>(op, "counts", counts, ScalarType::Int));
}

// Bits of ids, in words of 32.
uint32_t* bits_data(const char* op, const Tensor& bits, const Tensor& counts) {
  check_shape(op, "prompt_bits", bits, "[num_rows, ceil(vocab / 32)]", {counts.size(0), (counts.size(1) + 31) / 32});
  return reinterpret_cast<uint32_t*>(
      const_cast<int32_t*>(device_data<int32_t>(op, "prompt_bits", bits, ScalarType::Int)));
}

}  // namespace

void shape_logits(Tensor logits, double scale, double softcap) {
  const char* op = "shape_logits";
  check_cuda(op, "logits", logits);
  check_dtype(op, "logits", logits, ScalarType::Float);
  check_contiguous(op, "logits", logits);
  if (!(softcap >= 0)) fail(op, "softcap", "wanted a positive number or 0 for none, got ", softcap);
  const DeviceCall call(op, logits);
  call.check(pagemill_shape_logits(static_cast<float*>(logits.mutable_data_ptr()), logits.numel(),
                                   static_cast<float>(scale), static_cast<float>(softcap), call.stream()));
}

void load_counts(Tensor counts, Tensor prompt_bits, const Tensor rows, const Tensor token_ids, const Tensor num_prompt,
                 const Tensor num_tokens) {
  const char* op = "load_counts";
  check_shape(op, "rows", rows, "[n]", {-1});
  const int64_t n = rows.size(0);
  int32_t* numbers = counts_data(op, counts, -1);
  check_cuda(op, "token_ids", token_ids);
  check_dtype(op, "token_ids", token_ids, ScalarType::Int);
  check_shape(op, "token_ids", token_ids, "[num_rows, max_tokens]", {counts.size(0), -1});
  check_rows(op, "token_ids", token_ids);
  const DeviceCall call(op, counts);
  call.check(pagemill_load_counts(numbers, bits_data(op, prompt_bits, counts), counts.size(1),
                                  device_data<int64_t>(op, "rows", rows, ScalarType::Long),
                                  static_cast<const int32_t*>(token_ids.const_data_ptr()), token_ids.stride(0),
                                  per_row<int32_t>(op, "num_prompt", num_prompt, n, ScalarType::Int),
                                  per_row<int32_t>(op, "num_tokens", num_tokens, n, ScalarType::Int), n,
                                  call.stream()));
}

void count_tokens(Tensor counts, const Tensor rows, const Tensor ids) {
  const char* op = "count_tokens";
  check_shape(op, "rows", rows, "[n]", {-1});
  int32_t* numbers = counts_data(op, counts, -1);
  const DeviceCall call(op, counts);
  call.check(pagemill_count_tokens(numbers, counts.size(1), device_data<int64_t>(op, "rows", rows, ScalarType::Long),
                                   per_row<int64_t>(op, "ids", ids, rows.size(0), ScalarType::Long), rows.size(0),
                                   call.stream()));
}

void apply_penalties(Tensor logits, const Tensor rows, const Tensor counts, const Tensor prompt_bits,
                     const Tensor presence, const Tensor frequency, const Tensor repetition) {
  const char* op = "apply_penalties";
  float* data = logits_data(op, logits);
  const int64_t n = check_row_count(op, logits);
  const DeviceCall call(op, logits);
  call.check(pagemill_apply_penalties(data, n, logits.size(1), logits.stride(0),
                                      per_row<int64_t>(op, "rows", rows, n, ScalarType::Long),
                                      counts_data(op, counts, logits.size(1)), bits_data(op, prompt_bits, counts),
                                      per_row<float>(op, "presence", presence, n, ScalarType::Float),
                                      per_row<float>(op, "frequency", frequency, n, ScalarType::Float),
                                      per_row<float>(op, "repetition", repetition, n, ScalarType::Float),
                                      call.stream()));
}

void add_bias(Tensor logits, const Tensor rows, const Tensor ids, const Tensor values) {
  const char* op = "add_bias";
  float* data = logits_data(op, logits);
  check_shape(op, "rows", rows, "[num_biases]", {-1});
  const int64_t count = rows.size(0);
  const DeviceCall call(op, logits);
  call.check(pagemill_add_bias(data, logits.stride(0), device_data<int64_t>(op, "rows", rows, ScalarType::Long),
                               per_row<int64_t>(op, "ids", ids, count, ScalarType::Long),
                               per_row<float>(op, "values", values, count, ScalarType::Float), count, call.stream()));
}

void apply_token_bitmask(Tensor logits, const Tensor masks, const std::optional<Tensor> mask_of) {
  const char* op = "apply_token_bitmask";
  float* data = logits_data(op, logits);
  const int64_t n = check_row_count(op, logits);
  check_shape(op, "masks", masks, "[num_masks, words]", {mask_of.has_value() ? -1 : n, -1});
  if (mask_of.has_value()) check_shape(op, "mask_of", *mask_of, "[rows]", {n});
  const DeviceCall call(op, logits);
  call.check(pagemill_apply_token_bitmask(
      data, n, logits.size(1), logits.stride(0),
      reinterpret_cast<const uint32_t*>(device_data<int32_t>(op, "masks", masks, ScalarType::Int)), masks.size(1),
      device_data<int64_t>(op, "mask_of", mask_of, ScalarType::Long), call.stream()));
}

}  // namespace pagemill::cuda
