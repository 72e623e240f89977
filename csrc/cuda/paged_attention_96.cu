// Paged attention for head sizes up to 96.
#include "cuda/attention_launch.cuh"

namespace pagemill::cuda {

int launch_head_size_96(const AttentionParams& params, const AttentionBounds& bounds, int64_t query_type,
                       int64_t cache_type, void* stream) {
  return launch_head_size<96>(params, bounds, query_type, cache_type, stream);
}

}  // namespace pagemill::cuda
