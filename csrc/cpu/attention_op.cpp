// paged_attention: checks everything the kernels rely on (shapes, dtypes, monotone query starts, block ids in range
// wherever a key is visible) and hands the batch to the planner on torch's threads.
#include <torch/csrc/stable/ops.h>

#include <limits>

#include "batch_check.h"
#include "check.h"
#include "cpu/attention_plan.h"
#include "cpu/isa.h"
#include "op_list.h"

namespace pagemill {
namespace {

constexpr const char* kOp = "paged_attention";
constexpr int64_t kAloneBelow = 3000000;  // multiply-adds, about 20 us

const int32_t* int32_argument(const char* argument, const Tensor& tensor) {
  check_cpu(kOp, argument, tensor);
  check_dtype(kOp, argument, tensor, ScalarType::Int);
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

void check_cache(const char* argument, const Tensor& cache, const Tensor& query) {
  check_cpu(kOp, argument, cache);
  check_dtype(kOp, argument, cache, query.scalar_type());
  check_blocks(kOp, argument, cache);
}

void parallel(int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) { body(begin, end, context); });
}

}  // namespace

void paged_attention(Tensor out, const Tensor query, const Tensor key_cache, const Tensor value_cache,
                     const Tensor block_tables, const Tensor query_start_loc, const Tensor seq_lens, double scale,
                     bool causal, int64_t window, int64_t chunk, double softcap, const std::optional<Tensor> sinks) {
  check_shape(kOp, "key_cache", key_cache, "[num_blocks, num_kv_heads, block_size, key_dim]", {-1, -1, -1, -1});
  const int64_t num_blocks = key_cache.size(0), kv_heads = key_cache.size(1), block_size = key_cache.size(2);
  const int64_t key_dim = key_cache.size(3);
  check_shape(kOp, "value_cache", value_cache, "[num_blocks, num_kv_heads, block_size, value_dim]",
              {num_blocks, kv_heads, block_size, -1});
  const int64_t value_dim = value_cache.size(3);
  check_shape(kOp, "query", query, "[num_tokens, num_query_heads, key_dim]", {-1, -1, key_dim});
  const int64_t tokens = query.size(0), heads = query.size(1);
  check_shape(kOp, "out", out, "[num_tokens, num_query_heads, value_dim]", {tokens, heads, value_dim});
  check_shape(kOp, "seq_lens", seq_lens, "[num_seqs]", {-1});
  const int64_t num_seqs = seq_lens.size(0);
  check_shape(kOp, "query_start_loc", query_start_loc, "[num_seqs + 1]", {num_seqs + 1});
  check_shape(kOp, "block_tables", block_tables, "[num_seqs, max_blocks]", {num_seqs, -1});
  if (kv_heads == 0 || heads % kv_heads != 0) {
    fail(kOp, "query", "wanted a multiple of ", kv_heads, " heads, got ", heads);
  }
  const ElementType type = element_type(kOp, "query", query);
  check_cpu(kOp, "query", query);
  check_cpu(kOp, "out", out);
  check_dtype(kOp, "out", out, query.scalar_type());
  check_rows(kOp, "query", query);
  check_rows(kOp, "out", out);
  check_cache("key_cache", key_cache, query);
  check_cache("value_cache", value_cache, query);
  if (type == ElementType::bf16 && key_dim % 2 != 0) {
    fail(kOp, "query", "wanted an even key_dim in bfloat16, got ", key_dim);
  }
  check_rows(kOp, "block_tables", block_tables);
  check_contiguous(kOp, "query_start_loc", query_start_loc);
  check_contiguous(kOp, "seq_lens", seq_lens);
  if (!(scale > 0) || scale > std::numeric_limits<float>::max()) {
    fail(kOp, "scale", "wanted a positive number, got ", scale);
  }
  if (!(softcap >= 0)) fail(kOp, "softcap", "wanted a positive number or 0 for none, got ", softcap);
  if (window < 0) fail(kOp, "window", "wanted a positive number of tokens or 0 for none, got ", window);
  if (chunk < 0) fail(kOp, "chunk", "wanted a positive number of tokens or 0 for none, got ", chunk);
  const float* sink_logits = nullptr;
  if (sinks.has_value()) {
    check_shape(kOp, "sinks", *sinks, "[num_query_heads]", {heads});
    check_cpu(kOp, "sinks", *sinks);
    check_dtype(kOp, "sinks", *sinks, ScalarType::Float);
    check_contiguous(kOp, "sinks", *sinks);
    sink_logits = static_cast<const float*>(sinks->const_data_ptr());
  }
  AttentionArgs args{};
  args.query = bytes_of(query);
  args.out = mutable_bytes_of(out);
  args.key_cache = bytes_of(key_cache);
  args.value_cache = bytes_of(value_cache);
  args.block_tables = int32_argument("block_tables", block_tables);
  args.query_start = int32_argument("query_start_loc", query_start_loc);
  args.seq_lens = int32_argument("seq_lens", seq_lens);
  args.sinks = sink_logits;
  args.table_stride = block_tables.stride(0);
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.out_token_stride = out.stride(0);
  args.out_head_stride = out.stride(1);
  args.key_block_stride = key_cache.stride(0);
  args.value_block_stride = value_cache.stride(0);
  args.num_kv_heads = kv_heads;
  args.group = heads / kv_heads;
  args.block_size = block_size;
  args.key_dim = key_dim;
  args.value_dim = value_dim;
  args.window = window;
  args.chunk = chunk;
  args.scale = static_cast<float>(scale);
  args.softcap = static_cast<float>(softcap);
  args.causal = causal;
  args.type = type;
  check_batch(kOp, args, num_seqs, block_tables.size(1), num_blocks, tokens);
  const int64_t num_threads = torch::stable::get_num_threads();
  run_attention(kernels(), args, num_seqs, {num_threads, kAloneBelow, parallel});
  const int64_t row_bytes = value_dim * element_bytes(type);
  for (int64_t token = args.query_start[num_seqs]; token < tokens; ++token) {  // padding: no sequence, zeros
    for (int64_t head = 0; head < heads; ++head) {
      char* row = args.out + (token * args.out_token_stride + head * args.out_head_stride) * element_bytes(type);
      for (int64_t i = 0; i < row_bytes; ++i) row[i] = 0;
    }
  }
}

}  // namespace pagemill
