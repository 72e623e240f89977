// What the sampling ops check alike, and how they share rows among the compute threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <exception>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/team.h"

namespace pagemill {

inline void check_logits(const char* op, const Tensor& logits) {
  constexpr int64_t kMaxVocab = int64_t(1) << 22;  // 2^22 weights of at most 2^40 sum without overflow
  check_cpu(op, "logits", logits);
  check_shape(op, "logits", logits, "[rows, vocab]", {-1, -1});
  check_dtype(op, "logits", logits, ScalarType::Float);
  check_rows(op, "logits", logits);
  if (logits.size(1) < 1 || logits.size(1) > kMaxVocab) {
    fail(op, "logits", "wanted 1 to ", kMaxVocab, " columns, got ", shape_text(logits));
  }
}

// A contiguous tensor of one dimension: `size` elements, -1 any number.
template <typename T>
const T* elements(const char* op, const char* argument, const Tensor& tensor, const char* layout, int64_t size,
                  ScalarType type) {
  check_cpu(op, argument, tensor);
  check_shape(op, argument, tensor, layout, {size});
  if (!(type == ScalarType::Byte && tensor.scalar_type() == ScalarType::Bool)) check_dtype(op, argument, tensor, type);
  check_contiguous(op, argument, tensor);
  return reinterpret_cast<const T*>(bytes_of(tensor));
}

// Row numbers in [least, end).
inline void check_numbers(const char* op, const char* argument, const int64_t* numbers, int64_t count, int64_t least,
                          int64_t end) {
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] < least || numbers[i] >= end) {
      fail(op, argument, "wanted numbers from ", least, " to ", end - 1, ", got ", numbers[i], " at ", i);
    }
  }
}

// The logit rows that rows are made of, and their number.
inline const int64_t* check_source(const char* op, const std::optional<Tensor>& source, const Tensor& logits,
                                   int64_t& rows) {
  rows = logits.size(0);
  if (!source.has_value()) return nullptr;
  const auto* numbers = elements<int64_t>(op, "source", *source, "[rows]", -1, ScalarType::Long);
  check_numbers(op, "source", numbers, source->size(0), 0, logits.size(0));
  rows = source->size(0);
  return numbers;
}

// Calls work(begin, end) on ranges that make up [0, rows), on the calling thread and the team's.
template <typename Work>
void share_rows(int64_t rows, int64_t vocab, const Work& work) {
  constexpr int64_t kWorthWaking = 1 << 16;  // logits: some microseconds
  struct Job {
    const Work& work;
    int64_t rows, grain, next;
    std::atomic<bool> failed;
    std::exception_ptr error;
    void run() {
      try {
        draw(&next, rows, grain, work);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  };
  const int64_t threads = rows * vocab < kWorthWaking ? 1 : torch::stable::get_num_threads();
  const int64_t grain = rows == 0 ? 1 : (rows + threads * 4 - 1) / (threads * 4);  // equal shares, or nearly
  const int64_t ranges = (rows + grain - 1) / grain;
  Job job{work, rows, grain, 0, {false}, nullptr};
  run_team(static_cast<int>(ranges < threads ? ranges : threads),
           [](void* context) { static_cast<Job*>(context)->run(); }, &job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace pagemill
