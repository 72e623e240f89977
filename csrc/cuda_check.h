// What the CUDA ops share: argument checks, the stream of a call, the launchers' codes.
//
// Values on the device (lengths, tables, slots, ids) are not looked at: that would wait for the device.
#pragma once

#include <dlfcn.h>

#include <torch/csrc/stable/accelerator.h>

#include "check.h"

namespace pagemill {

inline void check_cuda(const char* op, const char* argument, const Tensor& tensor) {
  if (!tensor.is_cuda()) fail(op, argument, "wanted a CUDA tensor");
}

// The launchers' code of an element type (ElementCode of cuda/numbers.cuh).
inline int64_t element_code(const char* op, const char* argument, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return 0;
    case ScalarType::BFloat16: return 1;
    case ScalarType::Half: return 2;
    case ScalarType::Float8_e4m3fn: return 3;
    default: fail(op, argument, "wanted float32, bfloat16, float16 or float8_e4m3fn, got ",
                  dtype_text(tensor.scalar_type()));
  }
}

// The place of `name` in `names`, which is the launcher's code.
inline int64_t code_of(const char* op, const char* argument, const std::string& name,
                       std::initializer_list<const char*> names) {
  int64_t code = 0;
  for (const char* known : names) {
    if (name == known) return code;
    ++code;
  }
  fail(op, argument, "unknown name ", name);
}

inline int64_t activation_code(const char* op, const char* argument, const std::string& kind) {
  return code_of(op, argument, kind, {"silu", "gelu", "gelu_tanh"});
}

// torch's current stream of a device, or null in a torch without CUDA. Not linked, so that this library loads in any
// torch; and looked for by the name of its own library, for Python loads torch into a scope that only torch sees.
using CurrentStream = int32_t (*)(int32_t device_index, void** stream);

inline CurrentStream find_current_stream() {
  constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
  void* found = dlsym(RTLD_DEFAULT, kName);
  for (const char* name : {"libtorch_cuda.so", "libtorch_python.so"}) {  // the second one knows all of torch's
    if (found != nullptr) break;
    void* const library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (library != nullptr) found = dlsym(library, kName);
  }
  return reinterpret_cast<CurrentStream>(found);
}

// While it lives, a tensor's device is the current one; its stream is torch's current stream there.
class DeviceCall {
 public:
  DeviceCall(const char* op, const Tensor& tensor) : op_(op), guard_(tensor.get_device_index()) {
    static const CurrentStream current_stream = find_current_stream();
    if (current_stream == nullptr) fail(op, "this torch", "is built without CUDA");
    if (current_stream(tensor.get_device_index(), &stream_) != 0) fail(op, "stream", "torch does not tell its own");
  }

  void* stream() const { return stream_; }

  void check(int status) const {
    if (status != 0) fail(op_, "launch", "CUDA error ", status);
  }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

// Data of a contiguous tensor on the device, or null.
template <typename T>
const T* device_data(const char* op, const char* argument, const std::optional<Tensor>& tensor, ScalarType type) {
  if (!tensor.has_value()) return nullptr;
  check_cuda(op, argument, *tensor);
  check_dtype(op, argument, *tensor, type);
  check_contiguous(op, argument, *tensor);
  return static_cast<const T*>(tensor->const_data_ptr());
}

// One value per row of logits, on the device.
template <typename T>
const T* per_row(const char* op, const char* argument, const Tensor& tensor, int64_t rows, ScalarType type) {
  check_shape(op, argument, tensor, "[rows]", {rows});
  return device_data<T>(op, argument, tensor, type);
}

// [rows, vocab] float32, rows at a stride.
inline float* logits_data(const char* op, const Tensor& logits) {
  constexpr int64_t kMaxVocab = int64_t(1) << 22;  // 2^22 weights of at most 2^40 sum without overflow
  check_cuda(op, "logits", logits);
  check_shape(op, "logits", logits, "[rows, vocab]", {-1, -1});
  check_dtype(op, "logits", logits, ScalarType::Float);
  check_rows(op, "logits", logits);
  if (logits.size(1) < 1 || logits.size(1) > kMaxVocab) {
    fail(op, "logits", "wanted 1 to ", kMaxVocab, " columns, got ", shape_text(logits));
  }
  return static_cast<float*>(logits.mutable_data_ptr());
}

}  // namespace pagemill
