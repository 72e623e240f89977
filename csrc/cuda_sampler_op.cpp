// Draws and log probabilities on CUDA tensors: argument checks, output tensors, the launches.
#include <tuple>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "cuda/launchers.h"
#include "cuda_check.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

constexpr int64_t kMaxTop = 1024;

// The logit rows that rows are made of, and how many rows there are; null: each its own.
const int64_t* source_data(const char* op, const std::optional<Tensor>& source, const Tensor& logits, int64_t& rows) {
  rows = logits.size(0);
  if (!source.has_value()) return nullptr;
  check_shape(op, "source", *source, "[rows]", {-1});
  rows = source->size(0);
  return device_data<int64_t>(op, "source", source, ScalarType::Long);
}

Tensor draw(const char* op, const Tensor& logits, const std::optional<Tensor>& source, const Tensor& temperature,
            const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& greedy, const Tensor& seed_keys,
            const Tensor& positions) {
  const float* data = logits_data(op, logits);
  int64_t rows = 0;
  const int64_t* numbers = source_data(op, source, logits, rows);
  const ScalarType flag = greedy.scalar_type() == ScalarType::Bool ? ScalarType::Bool : ScalarType::Byte;
  Tensor ids = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  const DeviceCall call(op, logits);
  call.check(pagemill_sample(data, rows, logits.size(1), logits.stride(0), numbers,
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

}  // namespace

Tensor sample(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
              const Tensor greedy, const Tensor seed_keys, const Tensor positions) {
  return draw("sample", logits, std::nullopt, temperature, top_k, top_p, min_p, greedy, seed_keys, positions);
}

// With a source of each row. Edits have ops of their own here (cuda_logits_op.cpp): what they look at is on the device.
Tensor sample_edited(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p,
                     const Tensor min_p, const Tensor greedy, const Tensor seed_keys, const Tensor positions,
                     const std::optional<Tensor> source, const std::optional<Tensor> penalties,
                     const std::optional<Tensor> token_ids, const std::optional<Tensor> token_starts,
                     const std::optional<Tensor> output_starts, const std::optional<Tensor> bias_ids,
                     const std::optional<Tensor> bias_values, const std::optional<Tensor> bias_starts,
                     const std::optional<Tensor> masks, const std::optional<Tensor> mask_of,
                     std::optional<Tensor> drawn, const std::optional<Tensor> drawn_at,
                     const std::optional<std::vector<int64_t>> parameter_rows) {
  const char* op = "sample_edited";
  for (const auto* edit : {&penalties, &token_ids, &token_starts, &output_starts, &bias_ids, &bias_values, &bias_starts,
                           &masks, &mask_of, &drawn_at}) {
    if (edit->has_value()) fail(op, "edits", "wanted none for CUDA tensors, where they are ops of their own");
  }
  if (drawn.has_value()) fail(op, "drawn", "wanted none for CUDA tensors");
  if (parameter_rows.has_value()) fail(op, "rows", "wanted none for CUDA tensors, whose parameters come row by row");
  return draw(op, logits, source, temperature, top_k, top_p, min_p, greedy, seed_keys, positions);
}

Tensor logprobs_of(const Tensor logits, const Tensor ids) {
  const char* op = "logprobs_of";
  const float* data = logits_data(op, logits);
  check_shape(op, "ids", ids, "[rows, num_ids]", {logits.size(0), -1});
  Tensor logprobs = torch::stable::new_empty(logits, {logits.size(0), ids.size(1)}, ScalarType::Float);
  const DeviceCall call(op, logits);
  call.check(pagemill_logprobs_of(data, logits.size(0), logits.size(1), logits.stride(0),
                                  device_data<int64_t>(op, "ids", ids, ScalarType::Long), ids.size(1),
                                  static_cast<float*>(logprobs.mutable_data_ptr()), call.stream()));
  return logprobs;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logprobs_topn(const Tensor logits, const Tensor ids, int64_t num_top,
                                                         const std::optional<Tensor> source, bool ranks) {
  const char* op = "logprobs_topn";
  const float* data = logits_data(op, logits);
  int64_t rows = 0;
  const int64_t* numbers = source_data(op, source, logits, rows);
  check_shape(op, "ids", ids, "[rows, num_ids]", {rows, -1});
  if (ranks && ids.size(1) == 0) fail(op, "ids", "wanted at least one id per row for its rank");
  const int64_t count = num_top < logits.size(1) ? num_top : logits.size(1);
  if (count < 0 || count > kMaxTop) fail(op, "num_top", "wanted a number from 0 to ", kMaxTop, ", got ", num_top);
  Tensor logprobs = torch::stable::new_empty(logits, {rows, ids.size(1)}, ScalarType::Float);
  Tensor top_ids = torch::stable::new_empty(logits, {rows, count}, ScalarType::Long);
  Tensor top_logprobs = torch::stable::new_empty(logits, {rows, count}, ScalarType::Float);
  Tensor told_ranks = torch::stable::new_empty(logits, {ranks ? rows : 0}, ScalarType::Int);
  const DeviceCall call(op, logits);
  call.check(pagemill_logprobs_topn(data, rows, logits.size(1), logits.stride(0), numbers,
                                    device_data<int64_t>(op, "ids", ids, ScalarType::Long), ids.size(1),
                                    static_cast<float*>(logprobs.mutable_data_ptr()), count,
                                    static_cast<int64_t*>(top_ids.mutable_data_ptr()),
                                    static_cast<float*>(top_logprobs.mutable_data_ptr()),
                                    ranks ? static_cast<int32_t*>(told_ranks.mutable_data_ptr()) : nullptr,
                                    call.stream()));
  return {logprobs, top_ids, top_logprobs, told_ranks};
}

}  // namespace pagemill::cuda
