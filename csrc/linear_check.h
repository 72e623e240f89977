// What every op with packed weights checks.
#pragma once

#include <cstring>
#include <vector>

#include "check.h"
#include "cpu/linear.h"
#include "cpu/linear_quant.h"

namespace pagemill {

// Raises unless `packed` holds so many panels and steps, as pack_linear makes them. Its dtype is the caller's business.
inline void check_packed(const char* op, const char* argument, const Tensor& packed, int64_t panels, int64_t steps) {
  check_cpu(op, argument, packed);
  check_contiguous(op, argument, packed);
  if (element_type(op, argument, packed) == ElementType::bf16) {
    check_shape(op, argument, packed, "[panels, steps, 32, 2] as pack_linear made it for these features",
                {panels, steps, kPanelColumns, 2});
  } else {
    check_shape(op, argument, packed, "[panels, in_features, 32] as pack_linear made it for these features",
                {panels, steps, kPanelColumns});
  }
}

// What a tensor from pack_linear_quant says by its last dimension of how its groups look. Raises unless it is one of a
// weight [rows, in_features], packed as `gated` says.
inline QuantFormat check_packed_quant(const char* op, const char* argument, const Tensor& packed, int64_t in_features,
                                      int64_t rows, bool gated = false) {
  check_cpu(op, argument, packed);
  check_dtype(op, argument, packed, ScalarType::Byte);
  check_shape(op, argument, packed, "[out_features / 32, in_features / 32, bytes of a group]", {-1, -1, -1});
  check_contiguous(op, argument, packed);
  for (const QuantFormat& format : {QuantFormat{8, false}, {8, true}, {4, false}, {4, true}}) {
    if (packed.size(2) != quant_group_bytes(format)) continue;
    check_shape(op, argument, packed, "[out_features / 32, in_features / 32, bytes of a group]",
                {packed_panels(rows, gated), quant_groups(in_features), packed.size(2)});
    return format;
  }
  fail(op, argument, "wanted a tensor from pack_linear_quant, got shape ", shape_text(packed));
}

// A bias [count], float32 or bfloat16, as float32.
inline std::vector<float> read_bias(const char* op, const char* argument, const Tensor& bias, int64_t count,
                                    const char* layout = "[out_features]") {
  check_cpu(op, argument, bias);
  check_shape(op, argument, bias, layout, {count});
  check_contiguous(op, argument, bias);
  std::vector<float> values(static_cast<size_t>(count));
  if (element_type(op, argument, bias) == ElementType::f32) {
    std::memcpy(values.data(), bytes_of(bias), values.size() * sizeof(float));
  } else {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(bytes_of(bias));
    for (size_t i = 0; i < values.size(); ++i) {
      const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
      std::memcpy(&values[i], &bits, sizeof(float));
    }
  }
  return values;
}

}  // namespace pagemill
