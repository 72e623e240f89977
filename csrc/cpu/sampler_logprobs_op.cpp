// logprobs_of and logprobs_topn: argument checks and threads.
#include <tuple>

#include "cpu/sampler_check.h"
#include "op_list.h"

namespace pagemill {
namespace {

constexpr int64_t kMaxTop = 1 << 16;

// Everything but what is told: logits, ids and their rows.
LogprobArgs base_args(const char* op, const Tensor& logits, const Tensor& ids, int64_t rows) {
  check_cpu(op, "ids", ids);
  check_shape(op, "ids", ids, "[rows, num_ids]", {rows, -1});
  check_dtype(op, "ids", ids, ScalarType::Long);
  check_contiguous(op, "ids", ids);
  LogprobArgs args{};
  args.logits = reinterpret_cast<const float*>(bytes_of(logits));
  args.stride = logits.stride(0);
  args.vocab = logits.size(1);
  args.num_ids = ids.size(1);
  args.ids = reinterpret_cast<const int64_t*>(bytes_of(ids));
  for (int64_t i = 0; i < rows * args.num_ids; ++i) {
    if (args.ids[i] < 0 || args.ids[i] >= args.vocab) {
      fail(op, "ids", "wanted ids from 0 to ", args.vocab - 1, ", got ", args.ids[i], " in row ", i / args.num_ids);
    }
  }
  return args;
}

void run(const LogprobArgs& args, int64_t rows) {
  const KernelTable& table = kernels();
  share_rows(rows, args.vocab, [&](int64_t begin, int64_t end) { table.logprobs_of(args, begin, end); });
}

}  // namespace

Tensor logprobs_of(const Tensor logits, const Tensor ids) {
  const char* op = "logprobs_of";
  check_logits(op, logits);
  const int64_t rows = logits.size(0);
  LogprobArgs args = base_args(op, logits, ids, rows);
  Tensor logprobs = torch::stable::new_empty(logits, {rows, args.num_ids});
  args.logprobs = reinterpret_cast<float*>(mutable_bytes_of(logprobs));
  run(args, rows);
  return logprobs;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logprobs_topn(const Tensor logits, const Tensor ids, int64_t num_top,
                                                         const std::optional<Tensor> source, bool ranks) {
  const char* op = "logprobs_topn";
  check_logits(op, logits);
  int64_t rows = 0;
  const int64_t* numbers = check_source(op, source, logits, rows);
  LogprobArgs args = base_args(op, logits, ids, rows);
  args.source = numbers;
  if (num_top < 0 || num_top > kMaxTop) fail(op, "num_top", "wanted a number from 0 to ", kMaxTop, ", got ", num_top);
  if (ranks && args.num_ids == 0) fail(op, "ids", "wanted at least one id per row for its rank");
  args.num_top = num_top < args.vocab ? num_top : args.vocab;
  Tensor logprobs = torch::stable::new_empty(logits, {rows, args.num_ids});
  Tensor top_ids = torch::stable::new_empty(logits, {rows, args.num_top}, ScalarType::Long);
  Tensor top_logprobs = torch::stable::new_empty(logits, {rows, args.num_top});
  Tensor told_ranks = torch::stable::new_empty(logits, {ranks ? rows : 0}, ScalarType::Int);
  args.logprobs = reinterpret_cast<float*>(mutable_bytes_of(logprobs));
  args.top_ids = reinterpret_cast<int64_t*>(mutable_bytes_of(top_ids));
  args.top_logprobs = reinterpret_cast<float*>(mutable_bytes_of(top_logprobs));
  if (ranks) args.ranks = reinterpret_cast<int32_t*>(mutable_bytes_of(told_ranks));
  run(args, rows);
  return {logprobs, top_ids, top_logprobs, told_ranks};
}

}  // namespace pagemill
