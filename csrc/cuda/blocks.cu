// copy_blocks, gather_blocks, scatter_blocks: whole blocks as bytes, every layer in one launch. They know nothing of
// heads or dtypes, so layers may differ in both.
//
// Tiling: grid (parts of a block, blocks, layers); a thread moves 4 pieces of 16 bytes, loaded before any is stored, so
// that 64 bytes per thread are under way. At 1024 threads per SM (64 registers each) that is 64 KiB in flight, more than
// twice what latency asks for. Staging may be pinned host memory: then the link is the limit, and whole lines are written.
// Floor: every byte is read once and written once, no arithmetic.
#include "cuda/portable.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256, kPieces = 4;
constexpr int64_t kPartBytes = int64_t(kThreads) * kPieces * 16;
constexpr int64_t kMaxGridY = 65535;

// A layer's cache: `num_blocks` blocks of offsets[layer + 1] - offsets[layer] bytes. offsets are also where the layers
// lie inside one staged block.
struct Layers {
  char* const* bases;      // [layers], device
  const int64_t* offsets;  // [layers + 1], device
};

// Moves this block's part of one copied block.
PAGEMILL_DEVICE void move(char* to, const char* from, int64_t bytes) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPartBytes;
  const int64_t end = begin + kPartBytes < bytes ? begin + kPartBytes : bytes;
  const bool wide = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uintptr_t(bytes)) % 16 == 0;
  if (!wide) {
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) to[i] = from[i];
    return;
  }
  const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * 16;
  Bytes16 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t(i) * kThreads * 16;
    if (at < end) pieces[i] = load_16_once(from + at);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t(i) * kThreads * 16;
    if (at < end) store_16_once(to + at, pieces[i]);
  }
}

__global__ void __launch_bounds__(kThreads) copy_pairs(Layers layers, const int64_t* pairs, int64_t count) {
  const int64_t bytes = layers.offsets[blockIdx.z + 1] - layers.offsets[blockIdx.z];
  char* base = layers.bases[blockIdx.z];
  for (int64_t i = blockIdx.y; i < count; i += gridDim.y)
    move(base + pairs[2 * i + 1] * bytes, base + pairs[2 * i] * bytes, bytes);
}

template <bool GATHER>
__global__ void __launch_bounds__(kThreads)
    stage(Layers layers, int64_t num_layers, const int64_t* ids, int64_t count, char* staging) {
  const int64_t offset = layers.offsets[blockIdx.z], bytes = layers.offsets[blockIdx.z + 1] - offset;
  const int64_t staged_bytes = layers.offsets[num_layers];
  for (int64_t i = blockIdx.y; i < count; i += gridDim.y) {
    char* cached = layers.bases[blockIdx.z] + ids[i] * bytes;
    char* staged = staging + i * staged_bytes + offset;
    if constexpr (GATHER) {
      move(staged, cached, bytes);
    } else {
      move(cached, staged, bytes);
    }
  }
}

dim3 grid_of(int64_t num_layers, int64_t count, int64_t max_block_bytes) {
  return dim3(static_cast<unsigned>(ceil_div(max_block_bytes, kPartBytes)),
              static_cast<unsigned>(count < kMaxGridY ? count : kMaxGridY), static_cast<unsigned>(num_layers));
}

}  // namespace

// bases: [num_layers] pointers, offsets: [num_layers + 1] bytes, pairs: [count, 2] (source, destination), all on the
// device. max_block_bytes: of the layer with the largest blocks. Destinations are distinct and no source.
PAGEMILL_EXPORT int pagemill_copy_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers,
                                         int64_t max_block_bytes, const int64_t* pairs, int64_t count, void* stream) {
  if (num_layers == 0 || count == 0 || max_block_bytes == 0) return 0;
  const Layers layers{reinterpret_cast<char* const*>(bases), offsets};
  PAGEMILL_LAUNCH(copy_pairs, grid_of(num_layers, count, max_block_bytes), kThreads, 0, stream)(layers, pairs, count);
  return launch_status();
}

// staging: [count, bytes of one block in all layers], on the device or pinned; ids: [count], on the device.
PAGEMILL_EXPORT int pagemill_gather_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers,
                                           int64_t max_block_bytes, const int64_t* ids, int64_t count, void* staging,
                                           void* stream) {
  if (num_layers == 0 || count == 0 || max_block_bytes == 0) return 0;
  const Layers layers{reinterpret_cast<char* const*>(bases), offsets};
  PAGEMILL_LAUNCH(stage<true>, grid_of(num_layers, count, max_block_bytes), kThreads, 0, stream)
  (layers, num_layers, ids, count, static_cast<char*>(staging));
  return launch_status();
}

// The reverse; ids are distinct.
PAGEMILL_EXPORT int pagemill_scatter_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers,
                                            int64_t max_block_bytes, const int64_t* ids, int64_t count, void* staging,
                                            void* stream) {
  if (num_layers == 0 || count == 0 || max_block_bytes == 0) return 0;
  const Layers layers{reinterpret_cast<char* const*>(bases), offsets};
  PAGEMILL_LAUNCH(stage<false>, grid_of(num_layers, count, max_block_bytes), kThreads, 0, stream)
  (layers, num_layers, ids, count, static_cast<char*>(staging));
  return launch_status();
}

}  // namespace pagemill::cuda
