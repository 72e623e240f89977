// copy_blocks, gather_blocks, scatter_blocks: whole blocks as bytes, every layer in one launch. They know nothing of
// heads or dtypes, so layers may differ in both.
//
// Tiling: grid (parts of a block, blocks, layers); a thread moves 4 pieces of 16 bytes, loaded before any is stored, so
// that 64 bytes per thread are under way. At 1024 threads per SM (64 registers each) that is 64 KiB in flight, more than
// twice what latency asks for. Staging may be pinned host memory: then the link is the limit, and whole lines are written.
// Layers are told by value, as many in a launch as its arguments have room for: no table on the device to keep, to fill or
// to wait for, and a captured launch keeps them.
// Floor: every byte is read once and written once, no arithmetic.
#include "cuda/portable.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256, kPieces = 4;
constexpr int64_t kPartBytes = int64_t(kThreads) * kPieces * 16;
constexpr int64_t kMaxGridY = 65535;

constexpr int kMaxLayers = 128;  // of a launch

// A layer's cache: blocks of offsets[layer + 1] - offsets[layer] bytes. offsets are also where the layers lie inside one
// staged block.
struct Layers {
  char* bases[kMaxLayers];
  int64_t offsets[kMaxLayers + 1];
  int64_t staged_bytes;  // of one block in all layers, those of other launches too
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

__global__ void __launch_bounds__(kThreads)
    copy_pairs(const PAGEMILL_PARAMETER Layers layers, const int64_t* pairs, int64_t count) {
  const int64_t bytes = layers.offsets[blockIdx.z + 1] - layers.offsets[blockIdx.z];
  char* base = layers.bases[blockIdx.z];
  for (int64_t i = blockIdx.y; i < count; i += gridDim.y)
    move(base + pairs[2 * i + 1] * bytes, base + pairs[2 * i] * bytes, bytes);
}

template <bool GATHER>
__global__ void __launch_bounds__(kThreads)
    stage(const PAGEMILL_PARAMETER Layers layers, const int64_t* ids, int64_t count, char* staging) {
  const int64_t offset = layers.offsets[blockIdx.z], bytes = layers.offsets[blockIdx.z + 1] - offset;
  for (int64_t i = blockIdx.y; i < count; i += gridDim.y) {
    char* cached = layers.bases[blockIdx.z] + ids[i] * bytes;
    char* staged = staging + i * layers.staged_bytes + offset;
    if constexpr (GATHER) {
      move(staged, cached, bytes);
    } else {
      move(cached, staged, bytes);
    }
  }
}

// run(layers, grid) for every kMaxLayers of them; the first error ends it.
template <typename Run>
int for_layers(void* const* bases, const int64_t* offsets, int64_t num_layers, int64_t count, const Run& run) {
  for (int64_t first = 0; first < num_layers; first += kMaxLayers) {
    const int64_t many = num_layers - first < kMaxLayers ? num_layers - first : kMaxLayers;
    Layers layers{};
    int64_t most = 0;
    for (int64_t i = 0; i <= many; ++i) layers.offsets[i] = offsets[first + i];
    for (int64_t i = 0; i < many; ++i) {
      layers.bases[i] = static_cast<char*>(bases[first + i]);
      const int64_t bytes = layers.offsets[i + 1] - layers.offsets[i];
      most = bytes > most ? bytes : most;
    }
    layers.staged_bytes = offsets[num_layers];
    if (most == 0) continue;
    const int64_t rows = count < kMaxGridY ? count : kMaxGridY;
    run(layers, dim3(static_cast<unsigned>(ceil_div(most, kPartBytes)), static_cast<unsigned>(rows),
                     static_cast<unsigned>(many)));
    if (const int error = launch_status()) return error;
  }
  return 0;
}

template <bool GATHER>
int stage_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers, const int64_t* ids, int64_t count,
                 void* staging, void* stream) {
  if (count == 0) return 0;
  return for_layers(bases, offsets, num_layers, count, [&](const Layers& layers, dim3 grid) {
    PAGEMILL_LAUNCH(stage<GATHER>, grid, kThreads, 0, stream)(layers, ids, count, static_cast<char*>(staging));
  });
}

}  // namespace

// bases: [num_layers] addresses on the device, offsets: [num_layers + 1] bytes, both of the host and read before the call
// returns; pairs: [count, 2] (source, destination), on the device. Destinations are distinct and no source.
PAGEMILL_EXPORT int pagemill_copy_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers,
                                         const int64_t* pairs, int64_t count, void* stream) {
  if (count == 0) return 0;
  return for_layers(bases, offsets, num_layers, count, [&](const Layers& layers, dim3 grid) {
    PAGEMILL_LAUNCH(copy_pairs, grid, kThreads, 0, stream)(layers, pairs, count);
  });
}

// staging: [count, bytes of one block in all layers], on the device or pinned; ids: [count], on the device.
PAGEMILL_EXPORT int pagemill_gather_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers,
                                           const int64_t* ids, int64_t count, void* staging, void* stream) {
  return stage_blocks<true>(bases, offsets, num_layers, ids, count, staging, stream);
}

// The reverse; ids are distinct.
PAGEMILL_EXPORT int pagemill_scatter_blocks(void* const* bases, const int64_t* offsets, int64_t num_layers,
                                            const int64_t* ids, int64_t count, void* staging, void* stream) {
  return stage_blocks<false>(bases, offsets, num_layers, ids, count, staging, stream);
}

}  // namespace pagemill::cuda
