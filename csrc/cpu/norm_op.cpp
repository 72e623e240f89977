// rms_norm and fused_add_rms_norm: argument checks and threads.
#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/norm_variant.h"
#include "op_list.h"

namespace pagemill {
namespace {

constexpr int64_t kElementsPerThread = 1 << 15;

Tensor run(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight, double eps,
           const std::string& variant) {
  check_cpu(op, "x", x);
  check_cpu(op, "weight", weight);
  if (x.dim() < 1) fail(op, "x", "wanted at least one dimension");
  const int64_t dim = x.size(x.dim() - 1);
  if (dim < 1) fail(op, "x", "wanted a last dimension of at least 1, got ", shape_text(x));
  check_rows(op, "x", x);
  if (x.dim() > 3) check_contiguous(op, "x", x);
  const NormVariant kind = parse_variant(op, variant);
  check_norm_weight(op, "weight", weight, kind, dim);
  const ElementType type = element_type(op, "x", x);
  const bool is_wide = type == ElementType::f32 && weight.scalar_type() == ScalarType::BFloat16;
  if (!is_wide) check_dtype(op, "weight", weight, x.scalar_type());
  if (!(eps >= 0)) fail(op, "eps", "wanted a number of at least 0, got ", eps);

  Tensor out = torch::stable::new_empty(x, x.sizes(), weight.scalar_type());
  NormArgs args{bytes_of(x), bytes_of(weight), nullptr, mutable_bytes_of(out), 1, dim, 0, dim,
                static_cast<float>(eps), kind, is_wide ? ElementType::bf16 : type};
  args.is_wide = is_wide;
  if (x.dim() == 2) args.outer_stride = x.stride(0);
  if (x.dim() == 3) {
    args.inner = x.size(1) > 0 ? x.size(1) : 1;
    args.outer_stride = x.stride(0);
    args.inner_stride = x.stride(1);
  }
  if (residual != nullptr) {
    check_cpu(op, "residual", *residual);
    check_dtype(op, "residual", *residual, x.scalar_type());
    check_contiguous(op, "residual", *residual);
    bool same = residual->dim() == x.dim();
    for (int64_t i = 0; same && i < x.dim(); ++i) same = residual->size(i) == x.size(i);
    if (!same) fail(op, "residual", "wanted the shape of x = ", shape_text(x), ", got ", shape_text(*residual));
    args.residual = mutable_bytes_of(*residual);
  }
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, x.numel() / dim, kElementsPerThread / dim + 1,
                              [&](int64_t begin, int64_t end) { table.rms_norm(args, begin, end); });
  return out;
}

}  // namespace

Tensor rms_norm(const Tensor x, const Tensor weight, double eps, std::string variant) {
  return run("rms_norm", x, nullptr, weight, eps, variant);
}

Tensor fused_add_rms_norm(const Tensor x, Tensor residual, const Tensor weight, double eps, std::string variant) {
  return run("fused_add_rms_norm", x, &residual, weight, eps, variant);
}

}  // namespace pagemill
