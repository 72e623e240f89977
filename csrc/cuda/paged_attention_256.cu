// Paged attention for head sizes up to 256.
#include "cuda/attention_launch.cuh"

namespace pagemill::cuda {

int launch_head_size_256(const AttentionParams& params, const AttentionBounds& bounds, int64_t query_type,
                        int64_t cache_type, void* stream) {
  return launch_head_size<256>(params, bounds, query_type, cache_type, stream);
}

}  // namespace pagemill::cuda
