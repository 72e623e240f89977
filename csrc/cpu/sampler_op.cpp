// sample and sample_edited: argument checks and threads.
#include <cmath>

#include "cpu/sampler_check.h"
#include "op_list.h"

namespace pagemill {
namespace {

using Given = std::optional<Tensor>;
using Numbers = std::optional<std::vector<int64_t>>;

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

// The parameters of every row, and where they were gathered if they were.
struct Parameters {
  const Numbers& rows;  // the place of each row's parameters; none: its own number
  std::vector<float> temperature, top_p, min_p;
  std::vector<int32_t> top_k;
  std::vector<uint8_t> greedy;
  std::vector<int64_t> seed_keys;

  explicit Parameters(const Numbers& numbers) : rows(numbers) {}

  template <typename T>
  const T* of(const char* op, const char* argument, const Tensor& tensor, int64_t count, ScalarType type,
              std::vector<T>& gathered) {
    if (!rows.has_value()) return elements<T>(op, argument, tensor, "[rows]", count, type);
    const T* table = elements<T>(op, argument, tensor, "[num_rows]", -1, type);
    check_numbers(op, "rows", rows->data(), count, 0, tensor.size(0));
    for (int64_t row : *rows) gathered.push_back(table[row]);
    return gathered.data();
  }
};

SampleArgs base_args(const char* op, const Tensor& logits, int64_t rows, const Tensor& temperature,
                     const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& greedy,
                     const Tensor& seed_keys, const Tensor& positions, Parameters& own) {
  if (own.rows.has_value() && static_cast<int64_t>(own.rows->size()) != rows) {
    fail(op, "rows", "wanted ", rows, " numbers, got ", own.rows->size());
  }
  SampleArgs args{};
  args.logits = reinterpret_cast<const float*>(bytes_of(logits));
  args.stride = logits.stride(0);
  args.vocab = logits.size(1);
  args.temperature = own.of(op, "temperature", temperature, rows, ScalarType::Float, own.temperature);
  args.top_k = own.of(op, "top_k", top_k, rows, ScalarType::Int, own.top_k);
  args.top_p = own.of(op, "top_p", top_p, rows, ScalarType::Float, own.top_p);
  args.min_p = own.of(op, "min_p", min_p, rows, ScalarType::Float, own.min_p);
  args.greedy = own.of(op, "greedy", greedy, rows, ScalarType::Byte, own.greedy);
  args.seed_keys = own.of(op, "seed_keys", seed_keys, rows, ScalarType::Long, own.seed_keys);
  args.positions = elements<int64_t>(op, "positions", positions, "[rows]", rows, ScalarType::Long);
  check_values(op, args, rows);
  return args;
}

Tensor run(SampleArgs& args, const Tensor& logits, int64_t rows) {
  Tensor ids = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  args.ids = reinterpret_cast<int64_t*>(mutable_bytes_of(ids));
  const KernelTable& table = kernels();
  share_rows(rows, args.vocab, [&](int64_t begin, int64_t end) { table.sample(args, begin, end); });
  return ids;
}

// Offsets [rows + 1] into `count` elements.
const int64_t* starts(const char* op, const char* argument, const Tensor& tensor, int64_t rows, int64_t count) {
  const auto* offsets = elements<int64_t>(op, argument, tensor, "[rows + 1]", rows + 1, ScalarType::Long);
  for (int64_t r = 0; r <= rows; ++r) {
    if (offsets[r] < (r ? offsets[r - 1] : 0) || offsets[r] > count) {
      fail(op, argument, "wanted ascending offsets up to ", count, ", got ", offsets[r], " at ", r);
    }
  }
  return offsets;
}

// A part of the edits is given whole or not at all.
const Tensor& needed(const char* op, const char* argument, const Given& tensor) {
  if (!tensor.has_value()) fail(op, argument, "wanted a tensor beside the others of its kind");
  return *tensor;
}

void read_penalties(const char* op, LogitEdits& edits, int64_t rows, const Tensor& penalties, const Given& token_ids,
                    const Given& token_starts, const Given& output_starts) {
  check_cpu(op, "penalties", penalties);
  check_shape(op, "penalties", penalties, "[rows, 3]", {rows, 3});
  check_dtype(op, "penalties", penalties, ScalarType::Float);
  check_contiguous(op, "penalties", penalties);
  edits.penalties = reinterpret_cast<const float*>(bytes_of(penalties));
  const Tensor& ids = needed(op, "token_ids", token_ids);
  edits.token_ids = elements<int32_t>(op, "token_ids", ids, "[tokens]", -1, ScalarType::Int);
  edits.token_starts = starts(op, "token_starts", needed(op, "token_starts", token_starts), rows, ids.size(0));
  edits.output_starts = elements<int64_t>(op, "output_starts", needed(op, "output_starts", output_starts), "[rows]",
                                          rows, ScalarType::Long);
  for (int64_t r = 0; r < rows; ++r) {
    if (!(edits.penalties[r * 3] > 0)) {
      fail(op, "penalties", "wanted a positive repetition penalty, got ", edits.penalties[r * 3], " in row ", r);
    }
    if (edits.output_starts[r] < edits.token_starts[r] || edits.output_starts[r] > edits.token_starts[r + 1]) {
      fail(op, "output_starts", "wanted an offset among the row's tokens, got ", edits.output_starts[r], " in row ", r);
    }
  }
}

void read_biases(const char* op, LogitEdits& edits, int64_t rows, const Tensor& bias_ids, const Given& bias_values,
                 const Given& bias_starts) {
  const int64_t count = bias_ids.numel();
  edits.bias_ids = elements<int32_t>(op, "bias_ids", bias_ids, "[biases]", -1, ScalarType::Int);
  edits.bias_values = elements<float>(op, "bias_values", needed(op, "bias_values", bias_values), "[biases]", count,
                                      ScalarType::Float);
  edits.bias_starts = starts(op, "bias_starts", needed(op, "bias_starts", bias_starts), rows, count);
}

void read_masks(const char* op, LogitEdits& edits, int64_t rows, const Tensor& masks, const Given& mask_of) {
  check_cpu(op, "masks", masks);
  check_shape(op, "masks", masks, "[masks, words]", {-1, -1});
  check_dtype(op, "masks", masks, ScalarType::Int);
  check_contiguous(op, "masks", masks);
  edits.masks = reinterpret_cast<const int32_t*>(bytes_of(masks));
  edits.mask_words = masks.size(1);
  edits.mask_of = elements<int64_t>(op, "mask_of", needed(op, "mask_of", mask_of), "[rows]", rows, ScalarType::Long);
  check_numbers(op, "mask_of", edits.mask_of, rows, -1, masks.size(0));
}

void read_drawn(const char* op, SampleArgs& args, int64_t rows, Tensor& drawn, const Given& drawn_at) {
  check_cpu(op, "drawn", drawn);
  check_shape(op, "drawn", drawn, "[., vocab]", {-1, args.vocab});
  check_dtype(op, "drawn", drawn, ScalarType::Float);
  check_contiguous(op, "drawn", drawn);
  args.drawn = reinterpret_cast<float*>(mutable_bytes_of(drawn));
  args.drawn_at = elements<int64_t>(op, "drawn_at", needed(op, "drawn_at", drawn_at), "[rows]", rows, ScalarType::Long);
  check_numbers(op, "drawn_at", args.drawn_at, rows, -1, drawn.size(0));
}

}  // namespace

Tensor sample(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p, const Tensor min_p,
              const Tensor greedy, const Tensor seed_keys, const Tensor positions) {
  const char* op = "sample";
  check_logits(op, logits);
  const int64_t rows = logits.size(0);
  const Numbers none;
  Parameters own(none);
  SampleArgs args = base_args(op, logits, rows, temperature, top_k, top_p, min_p, greedy, seed_keys, positions, own);
  return run(args, logits, rows);
}

Tensor sample_edited(const Tensor logits, const Tensor temperature, const Tensor top_k, const Tensor top_p,
                     const Tensor min_p, const Tensor greedy, const Tensor seed_keys, const Tensor positions,
                     const Given source, const Given penalties, const Given token_ids, const Given token_starts,
                     const Given output_starts, const Given bias_ids, const Given bias_values, const Given bias_starts,
                     const Given masks, const Given mask_of, std::optional<Tensor> drawn, const Given drawn_at,
                     const Numbers parameter_rows) {
  const char* op = "sample_edited";
  check_logits(op, logits);
  int64_t rows = 0;
  const int64_t* numbers = check_source(op, source, logits, rows);
  Parameters own(parameter_rows);
  SampleArgs args = base_args(op, logits, rows, temperature, top_k, top_p, min_p, greedy, seed_keys, positions, own);
  args.source = numbers;
  if (penalties.has_value()) {
    read_penalties(op, args.edits, rows, *penalties, token_ids, token_starts, output_starts);
  }
  if (bias_ids.has_value()) read_biases(op, args.edits, rows, *bias_ids, bias_values, bias_starts);
  if (masks.has_value()) read_masks(op, args.edits, rows, *masks, mask_of);
  if (drawn.has_value()) read_drawn(op, args, rows, *drawn, drawn_at);
  return run(args, logits, rows);
}

}  // namespace pagemill
