// SiLU and both GELUs, alone and gated (activation(gate) * up).
//
// A value's result must not depend on where it stands: the partial vector at the end goes through the same arithmetic
// as the whole ones, padded.
#include "cpu/activation_math.h"
#include "cpu/kernels.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// The gate is rounded to the tensor's type before the product, as when the two are separate operations.
template <typename T, ActivationKind KIND, bool GATED>
void run(const T* x, const T* up, T* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec value = activate<KIND>(load_up_to(x + i, count - i));
    if constexpr (GATED) value = round_to(value, x) * load_up_to(up + i, count - i);
    store_up_to(out + i, value, count - i);
  }
}

template <typename T, bool GATED>
void run_kind(ActivationKind kind, const T* x, const T* up, T* out, int64_t count) {
  switch (kind) {
    case ActivationKind::silu: return run<T, ActivationKind::silu, GATED>(x, up, out, count);
    case ActivationKind::gelu: return run<T, ActivationKind::gelu, GATED>(x, up, out, count);
    case ActivationKind::gelu_tanh: return run<T, ActivationKind::gelu_tanh, GATED>(x, up, out, count);
  }
}

template <typename T>
void run_elements(const ActivationArgs& a, int64_t begin, int64_t end) {
  const T* x = reinterpret_cast<const T*>(a.x) + begin;
  run_kind<T, false>(a.kind, x, nullptr, reinterpret_cast<T*>(a.out) + begin, end - begin);
}

template <typename T>
void run_rows(const ActivationArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = reinterpret_cast<const T*>(a.x) + row * 2 * a.width;
    run_kind<T, true>(a.kind, gate, gate + a.width, reinterpret_cast<T*>(a.out) + row * a.width, a.width);
  }
}

}  // namespace

void activation(const ActivationArgs& args, int64_t begin, int64_t end) {
  if (args.type == ElementType::bf16) {
    run_elements<uint16_t>(args, begin, end);
  } else {
    run_elements<float>(args, begin, end);
  }
}

void gated_activation(const ActivationArgs& args, int64_t row_begin, int64_t row_end) {
  if (args.type == ElementType::bf16) {
    run_rows<uint16_t>(args, row_begin, row_end);
  } else {
    run_rows<float>(args, row_begin, row_end);
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
