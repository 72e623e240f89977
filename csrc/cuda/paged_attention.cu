// Entry of paged attention: checks what kernels rely on, cuts the workspace, picks the kernels for the head size.
#include "cuda/attention_launch.cuh"

namespace pagemill::cuda {
namespace {

constexpr int64_t kAlign = 256;

int64_t aligned(int64_t bytes) { return ceil_div(bytes, kAlign) * kAlign; }

int64_t element_bytes(int64_t type) { return type == kFloat8 ? 1 : 2; }

bool is_fitting(const PagedAttentionArgs& args) {
  const int64_t bytes = element_bytes(args.cache_type);
  const auto fits_dim = [&](int64_t dim) { return dim >= 8 && dim <= kMaxHeadSize && dim * bytes % 16 == 0; };
  const bool even = args.query_token_stride % 2 == 0 && args.query_head_stride % 2 == 0 &&
                    args.out_token_stride % 2 == 0 && args.out_head_stride % 2 == 0;
  return fits_dim(args.key_dim) && fits_dim(args.value_dim) && even && args.block_size > 0 &&
         args.block_size % kPieceKeys == 0 && args.key_block_stride * bytes % 16 == 0 &&
         args.value_block_stride * bytes % 16 == 0 && args.num_kv_heads > 0 &&
         args.num_query_heads % args.num_kv_heads == 0 && args.num_multiprocessors > 0 &&
         args.workspace_bytes >= args.num_seqs * 4;
}

AttentionParams params_of(const PagedAttentionArgs& args) {
  AttentionParams params = {};
  const int64_t bytes = element_bytes(args.cache_type);
  params.out = args.out;
  params.query = args.query;
  params.key_cache = static_cast<const char*>(args.key_cache);
  params.value_cache = static_cast<const char*>(args.value_cache);
  params.block_tables = args.block_tables;
  params.query_start = args.query_start;
  params.seq_lens = args.seq_lens;
  params.sinks = args.sinks;
  params.key_scale = args.key_scale;
  params.value_scale = args.value_scale;
  params.table_stride = args.table_stride;
  params.query_token_stride = args.query_token_stride;
  params.query_head_stride = args.query_head_stride;
  params.out_token_stride = args.out_token_stride;
  params.out_head_stride = args.out_head_stride;
  params.key_block_stride = args.key_block_stride * bytes;
  params.value_block_stride = args.value_block_stride * bytes;
  params.num_tokens = static_cast<int>(args.num_tokens);
  params.num_seqs = static_cast<int>(args.num_seqs);
  params.num_query_heads = static_cast<int>(args.num_query_heads);
  params.num_kv_heads = static_cast<int>(args.num_kv_heads);
  params.group = static_cast<int>(args.num_query_heads / args.num_kv_heads);
  params.block_size = static_cast<int>(args.block_size);
  params.key_dim = static_cast<int>(args.key_dim);
  params.value_dim = static_cast<int>(args.value_dim);
  params.window = static_cast<int>(args.window);
  params.chunk = static_cast<int>(args.chunk);
  params.causal = static_cast<int>(args.causal);
  params.scales_per_head = static_cast<int>(args.scales_per_head);
  params.scale = static_cast<float>(args.scale);
  params.softcap = static_cast<float>(args.softcap);
  return params;
}

int64_t row_bytes(int64_t num_kv_heads, int64_t value_dim) {
  return num_kv_heads * (value_dim * 4 + static_cast<int64_t>(sizeof(FloatPair)));
}

// bases, partial_sums, partials: as many partial rows as fit.
void cut_workspace(const PagedAttentionArgs& args, AttentionParams& params) {
  const int64_t bases = aligned(args.num_seqs * 4), left = args.workspace_bytes - bases - kAlign;
  const int64_t rows = left > 0 ? left / row_bytes(args.num_kv_heads, args.value_dim) : 0;
  char* const memory = static_cast<char*>(args.workspace);
  const int64_t sums = aligned(args.num_kv_heads * rows * static_cast<int64_t>(sizeof(FloatPair)));
  params.capacity = static_cast<int>(rows);
  params.bases = reinterpret_cast<int32_t*>(memory);
  params.partial_sums = reinterpret_cast<FloatPair*>(memory + bases);
  params.partials = reinterpret_cast<float*>(memory + bases + sums);
}

int run(const PagedAttentionArgs& args, void* stream) {
  if (!is_fitting(args)) return kInvalidArgument;
  if (args.num_tokens == 0) return 0;
  AttentionParams params = params_of(args);
  cut_workspace(args, params);
  const int64_t queries = args.max_query_len > 0 ? args.max_query_len : args.num_tokens;
  const AttentionBounds bounds{queries, args.max_seq_len, args.num_multiprocessors};
  const int64_t dim = args.key_dim > args.value_dim ? args.key_dim : args.value_dim;
  const auto launch = dim <= 64    ? launch_head_size_64
                      : dim <= 96  ? launch_head_size_96
                      : dim <= 128 ? launch_head_size_128
                                   : launch_head_size_256;
  if (const int error = launch(params, bounds, args.query_type, args.cache_type, stream)) return error;
  return launch_status();
}

}  // namespace
}  // namespace pagemill::cuda

// Arguments: see PagedAttentionArgs. Reads lengths on the device only.
PAGEMILL_EXPORT int pagemill_paged_attention(
    void* out, const void* query, const void* key_cache, const void* value_cache, const int32_t* block_tables,
    const int32_t* query_start, const int32_t* seq_lens, const float* sinks, const float* key_scale,
    const float* value_scale, void* workspace, int64_t workspace_bytes, int64_t num_tokens, int64_t num_seqs,
    int64_t max_query_len, int64_t max_seq_len, int64_t table_stride, int64_t query_token_stride,
    int64_t query_head_stride, int64_t out_token_stride, int64_t out_head_stride, int64_t key_block_stride,
    int64_t value_block_stride, int64_t num_query_heads, int64_t num_kv_heads, int64_t block_size, int64_t key_dim,
    int64_t value_dim, int64_t window, int64_t chunk, int64_t causal, int64_t query_type, int64_t cache_type,
    int64_t scales_per_head, int64_t num_multiprocessors, float scale, float softcap, void* stream) {
  using namespace pagemill::cuda;
  const PagedAttentionArgs args = {
      out, query, key_cache, value_cache, block_tables, query_start, seq_lens, sinks, key_scale, value_scale,
      workspace, workspace_bytes, num_tokens, num_seqs, max_query_len, max_seq_len, table_stride, query_token_stride,
      query_head_stride, out_token_stride, out_head_stride, key_block_stride, value_block_stride, num_query_heads,
      num_kv_heads, block_size, key_dim, value_dim, window, chunk, causal, query_type, cache_type, scales_per_head,
      num_multiprocessors, scale, softcap};
  return run(args, stream);
}

// As many partial rows as split sequences can have, up to the limit; what exceeds it is computed in fewer blocks.
PAGEMILL_EXPORT int64_t pagemill_paged_attention_workspace(int64_t num_seqs, int64_t max_query_len,
                                                           int64_t max_seq_len, int64_t num_query_heads,
                                                           int64_t num_kv_heads, int64_t value_dim) {
  using namespace pagemill::cuda;
  const int64_t group = num_query_heads / num_kv_heads, most = group > 64 ? group : 64;
  const int64_t rows = max_query_len * group < most ? max_query_len * group : most;
  const int64_t splits = ceil_div(max_seq_len, kSplitKeys) + 1;
  const int64_t partials = num_seqs * rows * splits * row_bytes(num_kv_heads, value_dim);
  const int64_t bases = aligned(num_seqs * 4) + 2 * kAlign;
  return bases + (partials < kWorkspaceLimit ? partials : kWorkspaceLimit);
}
