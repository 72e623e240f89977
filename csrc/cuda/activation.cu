// SiLU and both GELUs, alone and gated (activation(gate) * up).
//
// Tiling: a thread takes one piece of 16 bytes; element-wise, so nothing is shared and a value's place cannot matter.
// Floor: gated, 3 * sizeof(T) bytes per output element (two read, one written) and about 20 operations with one
// exponential (gelu: 40, for the error function): bandwidth-bound from a few thousand elements on.
#include "cuda/activation.cuh"
#include "cuda/rows.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;

// x and up: rows `stride` elements apart, of which `width` count; up null: not gated. out: [rows, width].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    activate_rows(const T* x, const T* up, T* out, int64_t rows, int64_t width, int64_t stride, int64_t kind, bool wide) {
  constexpr int n = kPerLoad<T>;
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * n;
  if (start >= width) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float values[n];
    load_piece(x + row * stride, start, width, wide, values);
#pragma unroll
    for (int i = 0; i < n; ++i) values[i] = activate(values[i], kind);
    if (up != nullptr) {
      float factors[n];
      load_piece(up + row * stride, start, width, wide, factors);
#pragma unroll
      for (int i = 0; i < n; ++i) values[i] = rounded<T>(values[i]) * factors[i];
    }
    store_piece(out + row * width, start, width, wide, values);
  }
}

template <typename T>
int activate_all(const T* x, const T* up, T* out, int64_t rows, int64_t width, int64_t stride, int64_t kind,
                 void* stream) {
  const bool wide =
      aligned_16(x) && aligned_16(up) && aligned_16(out) && whole_pieces<T>(width) && whole_pieces<T>(stride);
  const dim3 grid(static_cast<unsigned>(ceil_div(width, int64_t{kThreads} * kPerLoad<T>)),
                  static_cast<unsigned>(rows < kMaxGridY ? rows : kMaxGridY));
  auto kernel = &activate_rows<T>;
  PAGEMILL_LAUNCH(kernel, grid, kThreads, 0, stream)
  (x, up, out, rows, width, stride, kind, wide);
  return launch_status();
}

}  // namespace

// x, out: `count` elements, contiguous.
PAGEMILL_EXPORT int pagemill_activation(const void* x, void* out, int64_t count, int64_t kind, int64_t type,
                                        void* stream) {
  if (!known_activation(kind)) return kInvalidArgument;
  if (count == 0) return 0;
  return with_type(type, [&](auto element) {
    using T = decltype(element);
    return activate_all(static_cast<const T*>(x), static_cast<const T*>(nullptr), static_cast<T*>(out), 1, count, count,
                        kind, stream);
  });
}

// x: [rows, 2 * width], gate first; out: [rows, width]; contiguous. The gate is rounded to the type before the product.
PAGEMILL_EXPORT int pagemill_gated_activation(const void* x, void* out, int64_t rows, int64_t width, int64_t kind,
                                              int64_t type, void* stream) {
  if (!known_activation(kind) || width < 1) return kInvalidArgument;
  if (rows == 0) return 0;
  return with_type(type, [&](auto element) {
    using T = decltype(element);
    const T* gate = static_cast<const T*>(x);
    return activate_all(gate, gate + width, static_cast<T*>(out), rows, width, 2 * width, kind, stream);
  });
}

}  // namespace pagemill::cuda
