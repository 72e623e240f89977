// rotary, qk_norm and rope_and_cache on CUDA tensors: argument checks and the launches.
#include "cuda/launchers.h"
#include "cuda_check.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

// [num_tokens, heads, dim], heads of a token contiguous, tokens at a stride.
void check_heads(const char* op, const char* argument, const Tensor& tensor, const Tensor& query, int64_t dim) {
  check_cuda(op, argument, tensor);
  check_shape(op, argument, tensor, "[num_tokens, heads, dim]", {query.size(0), -1, dim});
  check_dtype(op, argument, tensor, query.scalar_type());
  if (tensor.stride(2) != 1 || (tensor.size(1) > 1 && tensor.stride(1) != tensor.size(2))) {
    fail(op, argument, "wanted the heads of a token side by side, got strides [", tensor.stride(0), ", ",
         tensor.stride(1), ", ", tensor.stride(2), "]");
  }
}

void check_query_and_key(const char* op, const Tensor& query, const Tensor& key) {
  check_shape(op, "query", query, "[num_tokens, heads, dim]", {-1, -1, -1});
  const int64_t dim = query.size(2);
  if (dim < 2 || dim % 2 != 0 || dim > 512) fail(op, "query", "wanted an even dim up to 512, got ", dim);
  check_heads(op, "query", query, query, dim);
  check_heads(op, "key", key, query, dim);
  if (query.scalar_type() == ScalarType::Float8_e4m3fn) check_dtype(op, "query", query, ScalarType::BFloat16);
}

struct Rotation {
  const void* cos = nullptr;
  const void* sin = nullptr;
  const int64_t* positions = nullptr;
  int64_t dim = 0;

  Rotation(const char* op, const Tensor& query, const std::optional<Tensor>& cos_table,
           const std::optional<Tensor>& sin_table, const Tensor& where) {
    if (cos_table.has_value() != sin_table.has_value()) fail(op, "sin", "wanted both tables or none");
    if (!cos_table.has_value()) return;
    check_shape(op, "cos", *cos_table, "[num_positions, rotary_dim]", {-1, -1});
    dim = cos_table->size(1);
    if (dim % 2 != 0 || dim > query.size(2)) {
      fail(op, "cos", "wanted an even rotary_dim up to ", query.size(2), ", got ", dim);
    }
    check_shape(op, "sin", *sin_table, "as cos", {cos_table->size(0), dim});
    cos = device_data<void>(op, "cos", cos_table, query.scalar_type());
    sin = device_data<void>(op, "sin", sin_table, query.scalar_type());
    check_shape(op, "positions", where, "[num_tokens]", {query.size(0)});
    positions = device_data<int64_t>(op, "positions", where, ScalarType::Long);
  }
};

struct Norms {
  const void* query = nullptr;
  const void* key = nullptr;
  float eps;
  int64_t variant;

  Norms(const char* op, const Tensor& rows, const std::optional<Tensor>& query_weight,
        const std::optional<Tensor>& key_weight, double wanted_eps, const std::string& name)
      : eps(static_cast<float>(wanted_eps)), variant(code_of(op, "variant", name, {"llama", "gemma", "f32"})) {
    if (!(wanted_eps >= 0)) fail(op, "eps", "wanted a number of at least 0, got ", wanted_eps);
    if (query_weight.has_value() != key_weight.has_value()) fail(op, "key_weight", "wanted both weights or none");
    if (!query_weight.has_value()) return;
    check_shape(op, "query_weight", *query_weight, "[dim]", {rows.size(2)});
    check_shape(op, "key_weight", *key_weight, "[dim]", {rows.size(2)});
    query = device_data<void>(op, "query_weight", query_weight, rows.scalar_type());
    key = device_data<void>(op, "key_weight", key_weight, rows.scalar_type());
  }
};

void check_caches(const char* op, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                  const Tensor& value_cache) {
  check_shape(op, "key_cache", key_cache, "[num_blocks, num_kv_heads, block_size, key_dim]",
              {-1, key.size(1), -1, key.size(2)});
  check_shape(op, "value_cache", value_cache, "[num_blocks, num_kv_heads, block_size, value_dim]",
              {key_cache.size(0), key.size(1), key_cache.size(2), value.size(2)});
  for (const auto& [name, cache] : {std::pair("key_cache", &key_cache), {"value_cache", &value_cache}}) {
    check_cuda(op, name, *cache);
    check_blocks(op, name, *cache);
    if (cache->scalar_type() != ScalarType::Float8_e4m3fn) check_dtype(op, name, *cache, key.scalar_type());
  }
  check_dtype(op, "value_cache", value_cache, key_cache.scalar_type());
}

const float* scale_data(const char* op, const char* argument, const std::optional<Tensor>& scale) {
  if (scale.has_value()) check_shape(op, argument, *scale, "[1]", {1});
  return device_data<float>(op, argument, scale, ScalarType::Float);
}

}  // namespace

void rotary(Tensor query, Tensor key, const Tensor cos, const Tensor sin, const Tensor positions) {
  const char* op = "rotary";
  check_query_and_key(op, query, key);
  const Rotation rotation(op, query, cos, sin, positions);
  const DeviceCall call(op, query);
  call.check(pagemill_rotary(query.mutable_data_ptr(), key.mutable_data_ptr(), rotation.cos, rotation.sin,
                             rotation.positions, query.size(0), query.size(1), key.size(1), query.size(2), rotation.dim,
                             query.stride(0), key.stride(0), element_code(op, "query", query), call.stream()));
}

void qk_norm(Tensor query, Tensor key, const Tensor query_weight, const Tensor key_weight, double eps,
             std::string variant, const std::optional<Tensor> cos, const std::optional<Tensor> sin,
             const Tensor positions) {
  const char* op = "qk_norm";
  check_query_and_key(op, query, key);
  const Norms norms(op, query, query_weight, key_weight, eps, variant);
  const Rotation rotation(op, query, cos, sin, positions);
  const DeviceCall call(op, query);
  call.check(pagemill_qk_norm(query.mutable_data_ptr(), key.mutable_data_ptr(), norms.query, norms.key, norms.eps,
                              norms.variant, rotation.cos, rotation.sin, rotation.positions, query.size(0),
                              query.size(1), key.size(1), query.size(2), rotation.dim, query.stride(0), key.stride(0),
                              element_code(op, "query", query), call.stream()));
}

void rope_and_cache(Tensor query, Tensor key, const Tensor value, const std::optional<Tensor> query_weight,
                    const std::optional<Tensor> key_weight, double eps, std::string variant,
                    const std::optional<Tensor> cos, const std::optional<Tensor> sin, const Tensor positions,
                    Tensor key_cache, Tensor value_cache, const Tensor slot_mapping,
                    const std::optional<Tensor> key_scale, const std::optional<Tensor> value_scale) {
  const char* op = "rope_and_cache";
  check_query_and_key(op, query, key);
  check_shape(op, "value", value, "[num_tokens, num_kv_heads, value_dim]", {query.size(0), key.size(1), -1});
  check_heads(op, "value", value, query, value.size(2));
  check_caches(op, key, value, key_cache, value_cache);
  check_shape(op, "slot_mapping", slot_mapping, "[num_tokens]", {query.size(0)});
  const Norms norms(op, query, query_weight, key_weight, eps, variant);
  const Rotation rotation(op, query, cos, sin, positions);
  const DeviceCall call(op, query);
  call.check(pagemill_rope_and_cache(
      query.mutable_data_ptr(), key.mutable_data_ptr(), value.const_data_ptr(), norms.query, norms.key, norms.eps,
      norms.variant, rotation.cos, rotation.sin, rotation.positions, key_cache.mutable_data_ptr(),
      value_cache.mutable_data_ptr(), device_data<int64_t>(op, "slot_mapping", slot_mapping, ScalarType::Long),
      scale_data(op, "key_scale", key_scale), scale_data(op, "value_scale", value_scale), query.size(0), query.size(1),
      key.size(1), key_cache.size(2), query.size(2), value.size(2), rotation.dim, query.stride(0), key.stride(0),
      value.stride(0), key_cache.stride(0), value_cache.stride(0), element_code(op, "query", query),
      element_code(op, "key_cache", key_cache), call.stream()));
}

}  // namespace pagemill::cuda
