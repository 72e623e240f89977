// Registers the CUDA kernels under the schemas of ops.cpp, and those that only CUDA has. Part of `_C_cuda`, which loads
// in every torch from 2.11 on, with or without CUDA and with or without a driver.
#include <torch/csrc/stable/library.h>

#include "cuda/launchers.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

int64_t paged_attention_workspace(int64_t num_seqs, int64_t max_query_len, int64_t max_seq_len, int64_t num_query_heads,
                                  int64_t num_kv_heads, int64_t value_dim) {
  return pagemill_paged_attention_workspace(num_seqs, max_query_len, max_seq_len, num_query_heads, num_kv_heads,
                                            value_dim);
}

}  // namespace
}  // namespace pagemill::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(pagemill, library) {
  library.def(
      "paged_attention_into(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
      "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, int window, int chunk, float softcap, "
      "Tensor? sinks, Tensor? key_scale, Tensor? value_scale, Tensor(b!) workspace, int max_query_len, "
      "int max_seq_len) -> ()");
  library.def(
      "paged_attention_workspace(int num_seqs, int max_query_len, int max_seq_len, int num_query_heads, "
      "int num_kv_heads, int value_dim) -> int");
  library.def(
      "reshape_and_cache_scaled(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor? key_scale, Tensor? value_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pagemill, CompositeExplicitAutograd, library) {
  library.impl("paged_attention_workspace", TORCH_BOX(&pagemill::cuda::paged_attention_workspace));
}

STABLE_TORCH_LIBRARY_IMPL(pagemill, CUDA, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&pagemill::cuda::reshape_and_cache));
  library.impl("reshape_and_cache_scaled", TORCH_BOX(&pagemill::cuda::reshape_and_cache_scaled));
  library.impl("paged_attention", TORCH_BOX(&pagemill::cuda::paged_attention));
  library.impl("paged_attention_into", TORCH_BOX(&pagemill::cuda::paged_attention_into));
  library.impl("pack_linear", TORCH_BOX(&pagemill::cuda::pack_linear));
  library.impl("linear", TORCH_BOX(&pagemill::cuda::linear));
  library.impl("rms_norm", TORCH_BOX(&pagemill::cuda::rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&pagemill::cuda::fused_add_rms_norm));
  library.impl("activation", TORCH_BOX(&pagemill::cuda::activation));
  library.impl("gated_activation", TORCH_BOX(&pagemill::cuda::gated_activation));
  library.impl("sample", TORCH_BOX(&pagemill::cuda::sample));
  library.impl("logprobs_of", TORCH_BOX(&pagemill::cuda::logprobs_of));
}
