// shape_logits: argument checks and threads.
#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "cpu/isa.h"
#include "op_list.h"

namespace pagemill {

void shape_logits(Tensor logits, double scale, double softcap) {
  const char* op = "shape_logits";
  check_cpu(op, "logits", logits);
  check_dtype(op, "logits", logits, ScalarType::Float);
  check_contiguous(op, "logits", logits);
  if (!(softcap >= 0)) fail(op, "softcap", "wanted a positive number or 0 for none, got ", softcap);
  const LogitArgs args{static_cast<float*>(logits.mutable_data_ptr()), static_cast<float>(scale),
                       static_cast<float>(softcap)};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, logits.numel(), 1 << 14,
                              [&](int64_t begin, int64_t end) { table.shape_logits(args, begin, end); });
}

}  // namespace pagemill
