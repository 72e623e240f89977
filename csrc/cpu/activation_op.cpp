// activation and gated_activation: argument checks and threads.
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "cpu/activation_kind.h"
#include "cpu/isa.h"
#include "op_list.h"

namespace pagemill {
namespace {

constexpr int64_t kElementsPerThread = 1 << 14;

}  // namespace

Tensor activation(const Tensor x, std::string kind) {
  const char* op = "activation";
  check_cpu(op, "x", x);
  check_contiguous(op, "x", x);
  const ElementType type = element_type(op, "x", x);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const ActivationArgs args{bytes_of(x), mutable_bytes_of(out), 0, parse_activation(op, "kind", kind), type};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, x.numel(), kElementsPerThread,
                              [&](int64_t begin, int64_t end) { table.activation(args, begin, end); });
  return out;
}

Tensor gated_activation(const Tensor x, std::string kind) {
  const char* op = "gated_activation";
  check_cpu(op, "x", x);
  check_contiguous(op, "x", x);
  if (x.dim() < 1 || x.size(x.dim() - 1) % 2 != 0 || x.size(x.dim() - 1) == 0) {
    fail(op, "x", "wanted an even last dimension (gate, then up), got ", shape_text(x));
  }
  const ElementType type = element_type(op, "x", x);
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < x.dim(); ++i) shape.push_back(x.size(i));
  const int64_t width = shape.back() / 2;
  shape.back() = width;
  Tensor out = torch::stable::new_empty(x, shape);
  const ActivationArgs args{bytes_of(x), mutable_bytes_of(out), width, parse_activation(op, "kind", kind), type};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, out.numel() / width, kElementsPerThread / width + 1,
                              [&](int64_t begin, int64_t end) { table.gated_activation(args, begin, end); });
  return out;
}

}  // namespace pagemill
