// Argument checks at the op boundary. A message names the op, the argument, what was wanted and what came.
#pragma once

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "cpu/types.h"

namespace pagemill {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const char* op, const char* argument, const Parts&... parts) {
  std::ostringstream message;
  message << "pagemill." << op << ": " << argument << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

inline const char* dtype_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
  }
}

// `shape` has one entry per dimension; -1 accepts any size. `layout` is how the message spells the shape.
inline void check_shape(const char* op, const char* argument, const Tensor& tensor, const char* layout,
                        std::initializer_list<int64_t> shape) {
  bool same = tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (int64_t wanted : shape) {
    if (!same) break;
    same = wanted < 0 || tensor.size(i) == wanted;
    ++i;
  }
  if (same) return;
  std::ostringstream sizes;
  i = 0;
  for (int64_t wanted : shape) {
    sizes << (i++ ? ", " : "");
    if (wanted < 0) {
      sizes << '*';
    } else {
      sizes << wanted;
    }
  }
  fail(op, argument, "wanted ", layout, " = [", sizes.str(), "], got ", shape_text(tensor));
}

inline void check_dtype(const char* op, const char* argument, const Tensor& tensor, ScalarType wanted) {
  if (tensor.scalar_type() != wanted) {
    fail(op, argument, "wanted ", dtype_text(wanted), ", got ", dtype_text(tensor.scalar_type()));
  }
}

inline void check_cpu(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cpu()) fail(op, argument, "wanted a CPU tensor");
}

inline void check_contiguous(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_contiguous()) fail(op, argument, "wanted a contiguous tensor, shape ", shape_text(tensor));
}

inline void check_rows(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.stride(tensor.dim() - 1) != 1 && tensor.size(tensor.dim() - 1) > 1) {
    fail(op, argument, "wanted elements of the last dimension side by side, got stride ",
         tensor.stride(tensor.dim() - 1));
  }
}

// A cache [num_blocks, heads, block_size, dim]: blocks may lie apart (K and V share one buffer per layer), but inside
// a block the elements are contiguous.
inline void check_blocks(const char* op, const char* argument, const Tensor& cache) {
  const int64_t dim = cache.size(3), block_size = cache.size(2);
  if (block_size < kTileTokens || block_size % kTileTokens != 0) {
    fail(op, argument, "wanted a block size that is a multiple of 16, got ", block_size);
  }
  if (dim < 1) fail(op, argument, "wanted at least one element per row, got shape ", shape_text(cache));
  if (cache.stride(3) != 1 || cache.stride(2) != dim || (cache.size(1) > 1 && cache.stride(1) != block_size * dim)) {
    fail(op, argument, "wanted contiguous blocks (strides [*, ", block_size * dim, ", ", dim, ", 1]), got strides [",
         cache.stride(0), ", ", cache.stride(1), ", ", cache.stride(2), ", ", cache.stride(3), "]");
  }
}

inline ElementType element_type(const char* op, const char* argument, const Tensor& tensor) {
  if (tensor.scalar_type() == ScalarType::Float) return ElementType::f32;
  if (tensor.scalar_type() == ScalarType::BFloat16) return ElementType::bf16;
  fail(op, argument, "wanted float32 or bfloat16, got ", dtype_text(tensor.scalar_type()));
}

inline const char* bytes_of(const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }
inline char* mutable_bytes_of(const Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

}  // namespace pagemill
