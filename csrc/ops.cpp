// The whole schema of torch.ops.pagemill and its CPU registration, over torch's stable ABI (target 2.11): one built
// file loads in every torch from 2.11 on. Shapes and meanings are documented once, in engine/ops.py.
#include <torch/csrc/stable/library.h>

#include "op_list.h"

STABLE_TORCH_LIBRARY(pagemill, library) {
  library.def("isa() -> str");
  library.def("isa_levels() -> str");
  library.def("set_isa(str name) -> ()");
  library.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()");
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features, bool float32_out) -> Tensor");
}

// Ops without tensors belong to no device.
STABLE_TORCH_LIBRARY_IMPL(pagemill, CompositeExplicitAutograd, library) {
  library.impl("isa", TORCH_BOX(&pagemill::isa));
  library.impl("isa_levels", TORCH_BOX(&pagemill::isa_levels));
  library.impl("set_isa", TORCH_BOX(&pagemill::set_isa));
}

STABLE_TORCH_LIBRARY_IMPL(pagemill, CPU, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&pagemill::reshape_and_cache));
  library.impl("pack_linear", TORCH_BOX(&pagemill::pack_linear));
  library.impl("linear", TORCH_BOX(&pagemill::linear));
}
