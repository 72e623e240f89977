// Registers the CUDA kernels under the schemas of ops.cpp. Part of `_C_cuda`, which loads after `_C` in every torch from
// 2.11 on, with or without CUDA and with or without a driver.
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

STABLE_TORCH_LIBRARY_IMPL(pagemill, CompositeExplicitAutograd, library) {
  library.impl("paged_attention_workspace", TORCH_BOX(&pagemill::cuda::paged_attention_workspace));
}

STABLE_TORCH_LIBRARY_IMPL(pagemill, CUDA, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&pagemill::cuda::reshape_and_cache));
  library.impl("reshape_and_cache_scaled", TORCH_BOX(&pagemill::cuda::reshape_and_cache_scaled));
  library.impl("paged_attention", TORCH_BOX(&pagemill::cuda::paged_attention));
  library.impl("paged_attention_into", TORCH_BOX(&pagemill::cuda::paged_attention_into));
  library.impl("copy_blocks", TORCH_BOX(&pagemill::cuda::copy_blocks));
  library.impl("gather_blocks", TORCH_BOX(&pagemill::cuda::gather_blocks));
  library.impl("scatter_blocks", TORCH_BOX(&pagemill::cuda::scatter_blocks));
  library.impl("pack_linear", TORCH_BOX(&pagemill::cuda::pack_linear));
  library.impl("linear", TORCH_BOX(&pagemill::cuda::linear));
  library.impl("rms_norm", TORCH_BOX(&pagemill::cuda::rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&pagemill::cuda::fused_add_rms_norm));
  library.impl("activation", TORCH_BOX(&pagemill::cuda::activation));
  library.impl("gated_activation", TORCH_BOX(&pagemill::cuda::gated_activation));
  library.impl("rotary", TORCH_BOX(&pagemill::cuda::rotary));
  library.impl("qk_norm", TORCH_BOX(&pagemill::cuda::qk_norm));
  library.impl("rope_and_cache", TORCH_BOX(&pagemill::cuda::rope_and_cache));
  library.impl("prepare_batch", TORCH_BOX(&pagemill::cuda::prepare_batch));
  library.impl("advance_batch", TORCH_BOX(&pagemill::cuda::advance_batch));
  library.impl("store_tokens", TORCH_BOX(&pagemill::cuda::store_tokens));
  library.impl("shape_logits", TORCH_BOX(&pagemill::cuda::shape_logits));
  library.impl("load_counts", TORCH_BOX(&pagemill::cuda::load_counts));
  library.impl("count_tokens", TORCH_BOX(&pagemill::cuda::count_tokens));
  library.impl("apply_penalties", TORCH_BOX(&pagemill::cuda::apply_penalties));
  library.impl("add_bias", TORCH_BOX(&pagemill::cuda::add_bias));
  library.impl("apply_token_bitmask", TORCH_BOX(&pagemill::cuda::apply_token_bitmask));
  library.impl("sample", TORCH_BOX(&pagemill::cuda::sample));
  library.impl("sample_edited", TORCH_BOX(&pagemill::cuda::sample_edited));
  library.impl("logprobs_of", TORCH_BOX(&pagemill::cuda::logprobs_of));
  library.impl("logprobs_topn", TORCH_BOX(&pagemill::cuda::logprobs_topn));
}
