// What the quantised linear layer's kernels take, and the layout of its packed weights. A product takes LinearArgs
// (`bf16` is the type of x) and the format of what is packed.
//
// A weight is scale * value, or scale * value + minimum, with one float16 scale (and minimum) per output feature and
// group of 32 input features; values are unsigned. Without minimums, 128 or 8 is the value that means zero.
#pragma once

#include <cstdint>

#include "cpu/linear.h"

namespace pagemill {

constexpr int64_t kQuantGroup = 32;  // input features that share a scale

struct QuantFormat {
  int bits;  // 8 or 4
  bool minimums;
};

// One panel's group: 32 scales, 32 minimums if there are any, then lines of 32 columns x 4 input features. 8 bits: line
// s holds features 4 s .. 4 s + 3 of the group. 4 bits: line s holds those in the low halves of its bytes and features
// 16 + 4 s .. 16 + 4 s + 3 in the high halves.
static constexpr int64_t quant_head_bytes(QuantFormat format) { return kPanelColumns * (format.minimums ? 4 : 2); }
static constexpr int64_t quant_group_bytes(QuantFormat format) {
  return quant_head_bytes(format) + kPanelColumns * kQuantGroup * format.bits / 8;
}
static constexpr int64_t quant_groups(int64_t in_features) { return (in_features + kQuantGroup - 1) / kQuantGroup; }

struct PackQuantArgs {
  const uint8_t* values;  // [out_features, in_features], rows `stride` apart, one value per byte
  int64_t stride;
  const uint16_t* scales;    // [out_features, groups], float16, contiguous
  const uint16_t* minimums;  // likewise, or null
  void* packed;              // [panels, groups, quant_group_bytes]
  int64_t out_features, in_features;
  QuantFormat format;
  bool gated;  // as in PackArgs
};

// Rows of a packed weight as numbers: an embedding table that is a head's weight at the same time.
struct EmbedQuantArgs {
  const void* packed;  // [vocabulary, dim], not gated
  const int64_t* ids;  // [num_tokens]
  char* out;           // [num_tokens, dim]
  int64_t dim;
  float scale;  // of rounded rows: a number of the type; 1: none
  QuantFormat format;
  ElementType type;
};

}  // namespace pagemill
