// What a decoder's handle stands for: the model, the memory of its steps, and the tensors that both point into.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "check.h"
#include "cpu/decoder.h"

namespace pagemill {

struct Decoder {
  DecoderModel model;
  DecoderSteps steps;
  std::vector<Tensor> weights, attached;  // the first weight is of the model's dtype
  std::vector<std::unique_ptr<std::vector<float>>> biases;
  int64_t vocabulary = 0, num_positions = 0, num_blocks = 0;
  bool is_attached = false;
  std::mutex one_step;
};

// Raises if `handle` is none that decoder_create gave or decoder_destroy has taken.
std::shared_ptr<Decoder> find_decoder(const char* op, int64_t handle);

template <typename List>
void check_length(const char* op, const char* argument, const List& list, size_t wanted) {
  if (list.size() != wanted) fail(op, argument, "wanted ", wanted, " entries, got ", list.size());
}

}  // namespace pagemill
