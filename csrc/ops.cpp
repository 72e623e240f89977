// The whole schema of torch.ops.pagemill and its CPU registration (CUDA's is in cuda_ops.cpp), over torch's stable ABI
// (target 2.11): one built file loads in every torch from 2.11 on. Shapes and meanings are documented once, in
// engine/ops.py and engine/device_ops.py.
#include <torch/csrc/stable/library.h>

#include "op_list.h"

STABLE_TORCH_LIBRARY(pagemill, library) {
  library.def("isa() -> str");
  library.def("isa_levels() -> str");
  library.def("set_isa(str name) -> ()");
  library.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()");
  library.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
      "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, int window, int chunk, float softcap, "
      "Tensor? sinks) -> ()");
  library.def("copy_blocks(Tensor(a!)[] caches, Tensor pairs) -> ()");
  library.def("gather_blocks(Tensor[] caches, Tensor ids, Tensor(a!) staging) -> ()");
  library.def("scatter_blocks(Tensor(a!)[] caches, Tensor ids, Tensor staging) -> ()");
  library.def("pack_linear(Tensor weight, bool gated) -> Tensor");
  library.def(
      "linear(Tensor x, Tensor packed, Tensor? bias, int out_features, bool float32_out, str? activation, "
      "Tensor? residual) -> Tensor");
  library.def("pack_linear_quant(Tensor values, Tensor scales, Tensor? minimums, int bits, bool gated) -> Tensor");
  library.def(
      "linear_quant(Tensor x, Tensor packed, Tensor? bias, int out_features, bool float32_out, str? activation) -> "
      "Tensor");
  library.def("embed_quant(Tensor ids, Tensor packed, Tensor like, int vocab_size) -> Tensor");
  library.def(
      "decoder_create(Tensor[] ends, Tensor[] layers, int[] sizes, int[] windows, int[] ropes, float[] numbers, "
      "float[] eps, str variants, str activation) -> int");
  library.def("decoder_step_bytes(int handle, int num_tokens, int num_wanted) -> int");
  library.def("decoder_adapt(int handle, Tensor[] low_ranks, int[] ranks) -> ()");
  library.def("decoder_destroy(int handle) -> ()");
  library.def("decoder_attach(int handle, Tensor[] ropes, Tensor[] key_caches, Tensor[] value_caches) -> ()");
  library.def(
      "decoder_forward(int handle, Tensor input_ids, Tensor positions, Tensor block_tables, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor slot_mapping, Tensor? logits_indices, int[] spans) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps, str variant) -> Tensor");
  library.def("fused_add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, str variant) -> Tensor");
  library.def("activation(Tensor x, str kind) -> Tensor");
  library.def("gated_activation(Tensor x, str kind) -> Tensor");
  library.def("shape_logits(Tensor(a!) logits, float scale, float softcap) -> ()");
  library.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor greedy, "
      "Tensor seed_keys, Tensor positions) -> Tensor");
  library.def(
      "sample_edited(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor greedy, "
      "Tensor seed_keys, Tensor positions, Tensor? source, Tensor? penalties, Tensor? token_ids, "
      "Tensor? token_starts, Tensor? output_starts, Tensor? bias_ids, Tensor? bias_values, Tensor? bias_starts, "
      "Tensor? masks, Tensor? mask_of, Tensor(a!)? drawn, Tensor? drawn_at, int[]? rows) -> Tensor");
  library.def("logprobs_of(Tensor logits, Tensor ids) -> Tensor");
  library.def(
      "logprobs_topn(Tensor logits, Tensor ids, int num_top, Tensor? source, bool ranks) -> (Tensor, Tensor, Tensor, "
      "Tensor)");

  // ---- what only a device's path uses: engine/device_ops.py ------------------------------------------------------
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
  library.def(
      "prepare_batch(Tensor token_ids, Tensor row_tables, int block_size, Tensor rows, Tensor computed, Tensor counts, "
      "Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) slot_mapping, Tensor(d!) query_start_loc, "
      "Tensor(e!) seq_lens, Tensor(f!) block_tables, Tensor(g!) logits_indices) -> ()");
  library.def(
      "advance_batch(Tensor(a!) token_ids, Tensor row_tables, int block_size, Tensor rows, Tensor drawn, "
      "Tensor num_seqs, Tensor(b!) input_ids, Tensor(c!) positions, Tensor(d!) slot_mapping, Tensor(e!) seq_lens) -> "
      "()");
  library.def("store_tokens(Tensor(a!) token_ids, Tensor rows, Tensor positions, Tensor drawn) -> ()");
  library.def(
      "load_counts(Tensor(a!) counts, Tensor(b!) prompt_bits, Tensor rows, Tensor token_ids, Tensor num_prompt, "
      "Tensor num_tokens) -> ()");
  library.def("count_tokens(Tensor(a!) counts, Tensor rows, Tensor ids) -> ()");
  library.def(
      "apply_penalties(Tensor(a!) logits, Tensor rows, Tensor counts, Tensor prompt_bits, Tensor presence, "
      "Tensor frequency, Tensor repetition) -> ()");
  library.def("add_bias(Tensor(a!) logits, Tensor rows, Tensor ids, Tensor values) -> ()");
  library.def("apply_token_bitmask(Tensor(a!) logits, Tensor masks, Tensor? mask_of) -> ()");
  library.def("rotary(Tensor(a!) query, Tensor(b!) key, Tensor cos, Tensor sin, Tensor positions) -> ()");
  library.def(
      "qk_norm(Tensor(a!) query, Tensor(b!) key, Tensor query_weight, Tensor key_weight, float eps, str variant, "
      "Tensor? cos, Tensor? sin, Tensor positions) -> ()");
  library.def(
      "rope_and_cache(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor? query_weight, Tensor? key_weight, "
      "float eps, str variant, Tensor? cos, Tensor? sin, Tensor positions, Tensor(c!) key_cache, "
      "Tensor(d!) value_cache, Tensor slot_mapping, Tensor? key_scale, Tensor? value_scale) -> ()");
}

// Ops without tensors belong to no device.
STABLE_TORCH_LIBRARY_IMPL(pagemill, CompositeExplicitAutograd, library) {
  library.impl("isa", TORCH_BOX(&pagemill::isa));
  library.impl("isa_levels", TORCH_BOX(&pagemill::isa_levels));
  library.impl("set_isa", TORCH_BOX(&pagemill::set_isa));
  library.impl("decoder_destroy", TORCH_BOX(&pagemill::decoder_destroy));
  library.impl("decoder_step_bytes", TORCH_BOX(&pagemill::decoder_step_bytes));
}

STABLE_TORCH_LIBRARY_IMPL(pagemill, CPU, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&pagemill::reshape_and_cache));
  library.impl("paged_attention", TORCH_BOX(&pagemill::paged_attention));
  library.impl("copy_blocks", TORCH_BOX(&pagemill::copy_blocks));
  library.impl("gather_blocks", TORCH_BOX(&pagemill::gather_blocks));
  library.impl("scatter_blocks", TORCH_BOX(&pagemill::scatter_blocks));
  library.impl("pack_linear", TORCH_BOX(&pagemill::pack_linear));
  library.impl("linear", TORCH_BOX(&pagemill::linear));
  library.impl("pack_linear_quant", TORCH_BOX(&pagemill::pack_linear_quant));
  library.impl("linear_quant", TORCH_BOX(&pagemill::linear_quant));
  library.impl("embed_quant", TORCH_BOX(&pagemill::embed_quant));
  library.impl("decoder_create", TORCH_BOX(&pagemill::decoder_create));
  library.impl("decoder_adapt", TORCH_BOX(&pagemill::decoder_adapt));
  library.impl("decoder_attach", TORCH_BOX(&pagemill::decoder_attach));
  library.impl("decoder_forward", TORCH_BOX(&pagemill::decoder_forward));
  library.impl("rms_norm", TORCH_BOX(&pagemill::rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&pagemill::fused_add_rms_norm));
  library.impl("activation", TORCH_BOX(&pagemill::activation));
  library.impl("gated_activation", TORCH_BOX(&pagemill::gated_activation));
  library.impl("shape_logits", TORCH_BOX(&pagemill::shape_logits));
  library.impl("sample", TORCH_BOX(&pagemill::sample));
  library.impl("sample_edited", TORCH_BOX(&pagemill::sample_edited));
  library.impl("logprobs_of", TORCH_BOX(&pagemill::logprobs_of));
  library.impl("logprobs_topn", TORCH_BOX(&pagemill::logprobs_topn));
}
