// paged_attention and reshape_and_cache on CUDA tensors: argument checks and the launch.
#include <cuda_runtime_api.h>

#include <limits>

#include <torch/csrc/stable/ops.h>

#include "cuda/launchers.h"
#include "cuda_check.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

constexpr const char* kOp = "paged_attention";

int64_t num_multiprocessors(const Tensor& tensor) {
  int count = 0;
  const auto error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, tensor.get_device_index());
  if (error != cudaSuccess) {
    cudaGetLastError();  // it is told here, and not once more by the next launch
    fail(kOp, "device", "CUDA error ", static_cast<int>(error));
  }
  return count;
}

// Shapes and layouts of everything but the optional arguments.
void check_attention(const Tensor& out, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                     const Tensor& block_tables, const Tensor& query_start_loc, const Tensor& seq_lens) {
  check_shape(kOp, "key_cache", key_cache, "[num_blocks, num_kv_heads, block_size, key_dim]", {-1, -1, -1, -1});
  const int64_t kv_heads = key_cache.size(1);
  check_shape(kOp, "value_cache", value_cache, "[num_blocks, num_kv_heads, block_size, value_dim]",
              {key_cache.size(0), kv_heads, key_cache.size(2), -1});
  check_shape(kOp, "query", query, "[num_tokens, num_query_heads, key_dim]", {-1, -1, key_cache.size(3)});
  check_shape(kOp, "out", out, "[num_tokens, num_query_heads, value_dim]",
              {query.size(0), query.size(1), value_cache.size(3)});
  check_shape(kOp, "seq_lens", seq_lens, "[num_seqs]", {-1});
  check_shape(kOp, "query_start_loc", query_start_loc, "[num_seqs + 1]", {seq_lens.size(0) + 1});
  check_shape(kOp, "block_tables", block_tables, "[num_seqs, max_blocks]", {seq_lens.size(0), -1});
  if (kv_heads == 0 || query.size(1) % kv_heads != 0) {
    fail(kOp, "query", "wanted a multiple of ", kv_heads, " heads, got ", query.size(1));
  }
  for (const auto& [name, tensor] : {std::pair("query", &query), {"out", &out}, {"block_tables", &block_tables}}) {
    check_cuda(kOp, name, *tensor);
    check_rows(kOp, name, *tensor);
  }
  if (query.scalar_type() != ScalarType::BFloat16) check_dtype(kOp, "query", query, ScalarType::Half);
  check_dtype(kOp, "out", out, query.scalar_type());
  check_dtype(kOp, "block_tables", block_tables, ScalarType::Int);
  for (const auto& [name, cache] : {std::pair("key_cache", &key_cache), {"value_cache", &value_cache}}) {
    check_cuda(kOp, name, *cache);
    check_blocks(kOp, name, *cache);
    if (cache->scalar_type() != ScalarType::Float8_e4m3fn) check_dtype(kOp, name, *cache, query.scalar_type());
    const int64_t row_bytes = cache->size(3) * static_cast<int64_t>(cache->element_size());
    if (row_bytes % 16 != 0 || cache->size(3) > 256) {
      fail(kOp, name, "wanted rows of a multiple of 16 bytes and up to 256 elements, got ", cache->size(3));
    }
  }
  check_dtype(kOp, "value_cache", value_cache, key_cache.scalar_type());
}

}  // namespace

void paged_attention_into(Tensor out, const Tensor query, const Tensor key_cache, const Tensor value_cache,
                          const Tensor block_tables, const Tensor query_start_loc, const Tensor seq_lens, double scale,
                          bool causal, int64_t window, int64_t chunk, double softcap, const std::optional<Tensor> sinks,
                          const std::optional<Tensor> key_scale, const std::optional<Tensor> value_scale,
                          Tensor workspace, int64_t max_query_len, int64_t max_seq_len) {
  check_attention(out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens);
  if (!(scale > 0) || scale > std::numeric_limits<float>::max()) {
    fail(kOp, "scale", "wanted a positive number, got ", scale);
  }
  if (!(softcap >= 0)) fail(kOp, "softcap", "wanted a positive number or 0 for none, got ", softcap);
  if (window < 0) fail(kOp, "window", "wanted a positive number of tokens or 0 for none, got ", window);
  if (chunk < 0) fail(kOp, "chunk", "wanted a positive number of tokens or 0 for none, got ", chunk);
  if (key_scale.has_value() != value_scale.has_value()) fail(kOp, "value_scale", "wanted both scales or none");
  const int64_t heads = query.size(1), kv_heads = key_cache.size(1);
  const bool per_head = key_scale.has_value() && key_scale->numel() > 1;
  if (sinks.has_value()) check_shape(kOp, "sinks", *sinks, "[num_query_heads]", {heads});
  if (key_scale.has_value()) {
    const int64_t count = per_head ? kv_heads : 1;
    check_shape(kOp, "key_scale", *key_scale, "[1] or [num_kv_heads]", {count});
    check_shape(kOp, "value_scale", *value_scale, "as key_scale", {count});
  }
  check_cuda(kOp, "workspace", workspace);
  check_dtype(kOp, "workspace", workspace, ScalarType::Byte);
  check_contiguous(kOp, "workspace", workspace);
  const DeviceCall call(kOp, query);
  call.check(pagemill_paged_attention(
      out.mutable_data_ptr(), query.const_data_ptr(), key_cache.const_data_ptr(), value_cache.const_data_ptr(),
      static_cast<const int32_t*>(block_tables.const_data_ptr()),
      device_data<int32_t>(kOp, "query_start_loc", query_start_loc, ScalarType::Int),
      device_data<int32_t>(kOp, "seq_lens", seq_lens, ScalarType::Int),
      device_data<float>(kOp, "sinks", sinks, ScalarType::Float),
      device_data<float>(kOp, "key_scale", key_scale, ScalarType::Float),
      device_data<float>(kOp, "value_scale", value_scale, ScalarType::Float), workspace.mutable_data_ptr(),
      workspace.numel(), query.size(0), seq_lens.size(0), max_query_len, max_seq_len, block_tables.stride(0),
      query.stride(0), query.stride(1), out.stride(0), out.stride(1), key_cache.stride(0), value_cache.stride(0), heads,
      kv_heads, key_cache.size(2), key_cache.size(3), value_cache.size(3), window, chunk, causal,
      element_code(kOp, "query", query), element_code(kOp, "key_cache", key_cache), per_head,
      num_multiprocessors(query), static_cast<float>(scale), static_cast<float>(softcap), call.stream()));
}

// The workspace comes from torch's own pool.
void paged_attention(Tensor out, const Tensor query, const Tensor key_cache, const Tensor value_cache,
                     const Tensor block_tables, const Tensor query_start_loc, const Tensor seq_lens, double scale,
                     bool causal, int64_t window, int64_t chunk, double softcap, const std::optional<Tensor> sinks) {
  check_attention(out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens);
  const int64_t longest = block_tables.size(1) * key_cache.size(2);
  const int64_t bytes = pagemill_paged_attention_workspace(seq_lens.size(0), query.size(0), longest, query.size(1),
                                                           key_cache.size(1), value_cache.size(3));
  Tensor workspace = torch::stable::new_empty(query, {bytes}, ScalarType::Byte);
  paged_attention_into(out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale, causal,
                       window, chunk, softcap, sinks, std::nullopt, std::nullopt, workspace, query.size(0), longest);
}

void reshape_and_cache_scaled(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                              const Tensor slot_mapping, const std::optional<Tensor> key_scale,
                              const std::optional<Tensor> value_scale) {
  const char* op = "reshape_and_cache";
  check_shape(op, "key_cache", key_cache, "[num_blocks, num_kv_heads, block_size, key_dim]", {-1, -1, -1, -1});
  check_shape(op, "value_cache", value_cache, "[num_blocks, num_kv_heads, block_size, value_dim]",
              {key_cache.size(0), key_cache.size(1), key_cache.size(2), -1});
  check_shape(op, "key", key, "[num_tokens, num_kv_heads, key_dim]", {-1, key_cache.size(1), key_cache.size(3)});
  check_shape(op, "value", value, "[num_tokens, num_kv_heads, value_dim]",
              {key.size(0), key_cache.size(1), value_cache.size(3)});
  check_shape(op, "slot_mapping", slot_mapping, "[num_tokens]", {key.size(0)});
  for (const auto& [name, tensor] : {std::pair("key", &key), {"value", &value}}) {
    check_cuda(op, name, *tensor);
    check_rows(op, name, *tensor);
  }
  for (const auto& [name, cache] : {std::pair("key_cache", &key_cache), {"value_cache", &value_cache}}) {
    check_cuda(op, name, *cache);
    check_blocks(op, name, *cache);
    if (cache->scalar_type() != ScalarType::Float8_e4m3fn) check_dtype(op, name, *cache, key.scalar_type());
  }
  check_dtype(op, "value", value, key.scalar_type());
  check_dtype(op, "value_cache", value_cache, key_cache.scalar_type());
  const DeviceCall call(op, key);
  call.check(pagemill_reshape_and_cache(
      key.const_data_ptr(), value.const_data_ptr(), key_cache.mutable_data_ptr(), value_cache.mutable_data_ptr(),
      device_data<int64_t>(op, "slot_mapping", slot_mapping, ScalarType::Long),
      device_data<float>(op, "key_scale", key_scale, ScalarType::Float),
      device_data<float>(op, "value_scale", value_scale, ScalarType::Float), key.size(0), key_cache.size(1),
      key_cache.size(2), key_cache.size(3), value_cache.size(3), key.stride(0), key.stride(1), value.stride(0),
      value.stride(1), key_cache.stride(0), value_cache.stride(0), element_code(op, "key", key),
      element_code(op, "key_cache", key_cache), call.stream()));
}

void reshape_and_cache(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                       const Tensor slot_mapping) {
  reshape_and_cache_scaled(key, value, key_cache, value_cache, slot_mapping, std::nullopt, std::nullopt);
}

}  // namespace pagemill::cuda
