// sample and logprobs_of: argument checks and threads.
#include <cmath>

#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "cpu/isa.h"
#include "op_list.h"

namespace pagemill {
namespace {

constexpr int64_t kMaxVocab = int64_t(1) << 22;  // 2^22 weights of at most 2^40 sum without overflow

void check_logits(const char* op, const Tensor& logits) {
  check_cpu(op, "logits", logits);
  check_shape(op, "logits", logits, "[rows, vocab]", {-1, -1});
  check_dtype(op, "logits", logits, ScalarType::Float);
  check_rows(op, "logits", logits);
  if (logits.size(1) < 1 || logits.size(1) > kMaxVocab) {
    fail(op, "logits", "wanted 1 to ", kMaxVocab, " columns, got ", shape_text(logits));
  }
}

template <typename T>
const T* per_row(const char* op, const char* argument, const Tensor& tensor, int64_t rows, ScalarType type) {
  check_cpu(op, argument, tensor);
  check_shape(op, argument, tensor, "[rows]", {rows});
  if (!(type == ScalarType::Byte && tensor.scalar_type() == ScalarType::Bool)) check_dtype(op, argument, tensor, type);
  check_contiguous(op, argument, tensor);
  return reinterpret_cast<const T*>(bytes_of(tensor));
}

void check_values(const char* op, const SampleArgs& a, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    if (a.greedy[r]) continue;
    if (!(a.temperature[r] > 0) || std::isinf(a.temperature[r])) {
      fail(op, "temperature", "wanted a positive number unless greedy, got ", a.temperature[r], " in row ", r);
    }
    if (!(a.top_p[r] >= 0 && a.top_p[r] <= 1)) {
      fail(op, "top_p", "wanted a number between 0 and 1, got ", a.top_p[r], " in row ", r);
    }
    if (!(a.min_p[r] >= 0 && a.min_p[r] <= 1)) {
      fail(op, "min_p", "wanted a number between 0 and 1, got ", a.min_p[r], " in row ", r);
    }
  }
}

}  // namespace

Tensor sample(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
              const Tensor greedy, const Tensor seed_keys, const Tensor positions) {
  const char* op = "sample";
  check_logits(op, logits);
  const int64_t rows = logits.size(0);
  SampleArgs args{};
  args.logits = reinterpret_cast<const float*>(bytes_of(logits));
  args.stride = logits.stride(0);
  args.vocab = logits.size(1);
  args.temperature = per_row<float>(op, "temperature", temperature, rows, ScalarType::Float);
  args.top_k = per_row<int32_t>(op, "top_k", top_k, rows, ScalarType::Int);
  args.top_p = per_row<float>(op, "top_p", top_p, rows, ScalarType::Float);
  args.min_p = per_row<float>(op, "min_p", min_p, rows, ScalarType::Float);
  args.greedy = per_row<uint8_t>(op, "greedy", greedy, rows, ScalarType::Byte);
  args.seed_keys = per_row<int64_t>(op, "seed_keys", seed_keys, rows, ScalarType::Long);
  args.positions = per_row<int64_t>(op, "positions", positions, rows, ScalarType::Long);
  check_values(op, args, rows);
  Tensor ids = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  args.ids = reinterpret_cast<int64_t*>(mutable_bytes_of(ids));
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) { table.sample(args, begin, end); });
  return ids;
}

Tensor logprobs_of(const Tensor logits, const Tensor ids) {
  const char* op = "logprobs_of";
  check_logits(op, logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check_cpu(op, "ids", ids);
  check_shape(op, "ids", ids, "[rows, num_ids]", {rows, -1});
  check_dtype(op, "ids", ids, ScalarType::Long);
  check_contiguous(op, "ids", ids);
  const int64_t num_ids = ids.size(1);
  const auto* chosen = reinterpret_cast<const int64_t*>(bytes_of(ids));
  for (int64_t i = 0; i < rows * num_ids; ++i) {
    if (chosen[i] < 0 || chosen[i] >= vocab) {
      fail(op, "ids", "wanted ids from 0 to ", vocab - 1, ", got ", chosen[i], " in row ", i / num_ids);
    }
  }
  Tensor logprobs = torch::stable::new_empty(logits, {rows, num_ids}, ScalarType::Float);
  const LogprobArgs args{reinterpret_cast<const float*>(bytes_of(logits)), logits.stride(0), vocab, num_ids, chosen,
                         reinterpret_cast<float*>(mutable_bytes_of(logprobs))};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) { table.logprobs_of(args, begin, end); });
  return logprobs;
}

}  // namespace pagemill
