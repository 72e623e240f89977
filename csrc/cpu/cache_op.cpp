// reshape_and_cache: checks the arguments and spreads tokens over torch's threads.
#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "cpu/isa.h"
#include "op_list.h"

namespace pagemill {
void reshape_and_cache(const Tensor key, const Tensor value, Tensor key_cache, Tensor value_cache,
                       const Tensor slot_mapping) {
  const char* op = "reshape_and_cache";
  check_shape(op, "key_cache", key_cache, "[num_blocks, num_kv_heads, block_size, key_dim]", {-1, -1, -1, -1});
  const int64_t num_blocks = key_cache.size(0), heads = key_cache.size(1), block_size = key_cache.size(2);
  check_shape(op, "value_cache", value_cache, "[num_blocks, num_kv_heads, block_size, value_dim]",
              {num_blocks, heads, block_size, -1});
  const int64_t key_dim = key_cache.size(3), value_dim = value_cache.size(3);
  check_shape(op, "key", key, "[num_tokens, num_kv_heads, key_dim]", {-1, heads, key_dim});
  const int64_t tokens = key.size(0);
  check_shape(op, "value", value, "[num_tokens, num_kv_heads, value_dim]", {tokens, heads, value_dim});
  check_shape(op, "slot_mapping", slot_mapping, "[num_tokens]", {tokens});
  check_cpu(op, "key_cache", key_cache);
  check_cpu(op, "value_cache", value_cache);
  check_blocks(op, "key_cache", key_cache);
  check_blocks(op, "value_cache", value_cache);
  check_cpu(op, "key", key);
  check_cpu(op, "value", value);
  check_cpu(op, "slot_mapping", slot_mapping);
  check_rows(op, "key", key);
  check_rows(op, "value", value);
  check_contiguous(op, "slot_mapping", slot_mapping);
  const ElementType type = element_type(op, "key", key);
  check_dtype(op, "value", value, key.scalar_type());
  check_dtype(op, "key_cache", key_cache, key.scalar_type());
  check_dtype(op, "value_cache", value_cache, key.scalar_type());
  check_dtype(op, "slot_mapping", slot_mapping, ScalarType::Long);
  if (type == ElementType::bf16 && key_dim % 2 != 0) {
    fail(op, "key", "wanted an even key_dim in bfloat16, got ", key_dim);
  }
  const int64_t* slots = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] >= num_blocks * block_size) {
      fail(op, "slot_mapping", "wanted slots below ", num_blocks * block_size, ", got ", slots[i], " at token ", i);
    }
  }
  CacheWrite args{bytes_of(key), bytes_of(value), mutable_bytes_of(key_cache), mutable_bytes_of(value_cache), slots,
                  key.stride(0), key.stride(1), value.stride(0), value.stride(1), key_cache.stride(0),
                  value_cache.stride(0), heads, block_size, key_dim, value_dim, type};
  const KernelTable& table = kernels();
  torch::stable::parallel_for(0, tokens, 32, [&](int64_t begin, int64_t end) { table.write_cache(args, begin, end); });
}

}  // namespace pagemill
