// What every .cu file includes instead of CUDA's headers: the few facilities that kernels use, each with two bodies,
// one for nvcc and one for g++ through tests/emulation, where the very same kernels run on the CPU.
//
// Rules that keep one source for both:
// - A launcher is PAGEMILL_EXPORT, takes pointers, int64_t, float and at last the stream, and returns 0 or CUDA's error
//   number. It allocates nothing, waits for nothing and reads no device memory, so a step can be captured as a graph.
// - A kernel is launched by PAGEMILL_LAUNCH. Its blocks are one-dimensional and made of whole warps.
// - All 32 lanes of a warp take part in every warp operation; all threads of a block in every sync_block.
// - Shared memory is dynamic (PAGEMILL_SHARED): the emulation fills it with NaN, which it cannot do for static arrays.
// - Every PTX instruction stands here, in numbers.cuh or in tensor_core.cuh. No cooperative groups, CUB or Thrust.
// - No block waits for another block. "The last block to finish" by an atomic counter is fine.
// - nvcc runs with --fmad=false, g++ with -ffp-contract=off: a multiply and an add fuse where the source says fmaf.
#pragma once

#include <cstdint>

#ifdef PAGEMILL_EMULATION
#include "tests/emulation/device.h"
#else
#include <cuda_runtime.h>
#endif

#define PAGEMILL_DEVICE __device__ __forceinline__
#define PAGEMILL_EXPORT extern "C" __attribute__((visibility("default")))

// PAGEMILL_LAUNCH(kernel, grid, threads, shared_bytes, stream)(arguments...). kernel: a function or a pointer to one
// (`auto kernel = &some_kernel<T, 4>;` keeps a template's commas out of the macro). grid: dim3 or a number.
// PAGEMILL_SHARED(name): `unsigned char* name`, the block's dynamic shared memory, aligned to 128 bytes.
// PAGEMILL_PARAMETER: of a large const argument that is read by index: it stays where launches put it.
#ifdef PAGEMILL_EMULATION
#define PAGEMILL_LAUNCH(kernel, grid, threads, shared_bytes, stream) \
  ::emulation::launch(kernel, #kernel, grid, threads, shared_bytes, stream)
#define PAGEMILL_SHARED(name) unsigned char* const name = ::emulation::shared_memory()
#define PAGEMILL_PARAMETER
#else
#define PAGEMILL_LAUNCH(kernel, grid, threads, shared_bytes, stream) \
  kernel<<<grid, static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes), static_cast<cudaStream_t>(stream)>>>
#define PAGEMILL_SHARED(name)                                            \
  extern __shared__ __align__(128) unsigned char pagemill_shared_bytes[]; \
  unsigned char* const name = pagemill_shared_bytes
#define PAGEMILL_PARAMETER __grid_constant__
#endif

namespace pagemill::cuda {

constexpr int kWarp = 32;
constexpr int kInvalidArgument = 1;  // cudaErrorInvalidValue

// ---- launching --------------------------------------------------------------------------------------------------

// What launches since the last call came to: a launcher's last statement.
inline int launch_status() {
#ifdef PAGEMILL_EMULATION
  return ::emulation::status();
#else
  return static_cast<int>(cudaGetLastError());
#endif
}

// Lets a kernel have more dynamic shared memory than 48 KiB; before its launch. Legal while a stream is captured. What it
// may have is never lowered again: recorded launches may want more than the next one.
template <typename Kernel>
int allow_shared(Kernel kernel, int64_t bytes) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
#else
  if (bytes <= 48 * 1024) return 0;
  const void* const function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes known;
  cudaError_t error = cudaFuncGetAttributes(&known, function);
  if (error == cudaSuccess && known.maxDynamicSharedSizeBytes < bytes)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) cudaGetLastError();  // it is told here, and not once more by the next launch
  return static_cast<int>(error);
#endif
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- threads of a block -------------------------------------------------------------------------------------------

PAGEMILL_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) & (kWarp - 1); }
PAGEMILL_DEVICE int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
PAGEMILL_DEVICE int num_warps() { return static_cast<int>(blockDim.x) / kWarp; }

PAGEMILL_DEVICE void sync_block() {
#ifdef PAGEMILL_EMULATION
  ::emulation::sync_block();
#else
  __syncthreads();
#endif
}

// sync_block, and how many threads of the block came with `condition`.
PAGEMILL_DEVICE int sync_block_count(bool condition) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::sync_block_count(condition);
#else
  return __syncthreads_count(condition);
#endif
}

// A barrier for `threads` (whole warps) of the block. barrier: 1 to 15.
PAGEMILL_DEVICE void sync_threads(int barrier, int threads) {
#ifdef PAGEMILL_EMULATION
  ::emulation::sync_threads(barrier, threads);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
#endif
}

PAGEMILL_DEVICE void sync_warp() {
#ifdef PAGEMILL_EMULATION
  ::emulation::sync_warp();
#else
  __syncwarp();
#endif
}

// ---- the 32 lanes of a warp ---------------------------------------------------------------------------------------

constexpr uint32_t kAllLanes = 0xffffffffu;

// T: any 4- or 8-byte number. `lane` may differ between lanes; it is taken modulo 32.
template <typename T>
PAGEMILL_DEVICE T shuffle(T value, int lane) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::shuffle(value, lane & (kWarp - 1), "shuffle");
#else
  return __shfl_sync(kAllLanes, value, lane);
#endif
}

template <typename T>
PAGEMILL_DEVICE T shuffle_xor(T value, int mask) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::shuffle(value, lane_id() ^ mask, "shuffle_xor");
#else
  return __shfl_xor_sync(kAllLanes, value, mask);
#endif
}

// From the lane `delta` below; the first `delta` lanes keep their own.
template <typename T>
PAGEMILL_DEVICE T shuffle_up(T value, int delta) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::shuffle(value, lane_id() < delta ? lane_id() : lane_id() - delta, "shuffle_up");
#else
  return __shfl_up_sync(kAllLanes, value, delta);
#endif
}

// From the lane `delta` above; the last `delta` lanes keep their own.
template <typename T>
PAGEMILL_DEVICE T shuffle_down(T value, int delta) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::shuffle(value, lane_id() + delta >= kWarp ? lane_id() : lane_id() + delta, "shuffle_down");
#else
  return __shfl_down_sync(kAllLanes, value, delta);
#endif
}

// Bit i: lane i's condition.
PAGEMILL_DEVICE uint32_t ballot(bool condition) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::ballot(condition);
#else
  return __ballot_sync(kAllLanes, condition);
#endif
}

PAGEMILL_DEVICE int count_bits(uint32_t bits) {
#ifdef PAGEMILL_EMULATION
  return __builtin_popcount(bits);
#else
  return __popc(bits);
#endif
}

// Sum and maximum over a warp, to every lane, in one order for all inputs: a butterfly, 16 lanes apart first.
template <typename T>
PAGEMILL_DEVICE T warp_sum(T value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = value + shuffle_xor(value, mask);
  return value;
}

template <typename T>
PAGEMILL_DEVICE T warp_max(T value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const T other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// ---- memory -------------------------------------------------------------------------------------------------------

struct alignas(16) Bytes16 {
  uint32_t word[4];
};

// 16 bytes in one access; the address must be a multiple of 16.
PAGEMILL_DEVICE Bytes16 load_16(const void* from) {
#ifdef PAGEMILL_EMULATION
  ::emulation::check_aligned(from, 16, "load_16");
  return *static_cast<const Bytes16*>(from);
#else
  const uint4 v = *static_cast<const uint4*>(from);
  return {v.x, v.y, v.z, v.w};
#endif
}

PAGEMILL_DEVICE void store_16(void* to, Bytes16 value) {
#ifdef PAGEMILL_EMULATION
  ::emulation::check_aligned(to, 16, "store_16");
  *static_cast<Bytes16*>(to) = value;
#else
  *static_cast<uint4*>(to) = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
#endif
}

// The same for bytes that are touched once: first to leave the caches.
PAGEMILL_DEVICE Bytes16 load_16_once(const void* from) {
#ifdef PAGEMILL_EMULATION
  return load_16(from);
#else
  const uint4 v = __ldcs(static_cast<const uint4*>(from));
  return {v.x, v.y, v.z, v.w};
#endif
}

PAGEMILL_DEVICE void store_16_once(void* to, Bytes16 value) {
#ifdef PAGEMILL_EMULATION
  store_16(to, value);
#else
  __stcs(static_cast<uint4*>(to), make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]));
#endif
}

// Adds and returns what was there. T: int32_t, uint32_t, uint64_t, float.
template <typename T>
PAGEMILL_DEVICE T atomic_add(T* to, T value) {
#ifdef PAGEMILL_EMULATION
  const T before = *to;
  *to = before + value;
  return before;
#else
  if constexpr (sizeof(T) == 8) {
    return static_cast<T>(
        atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value)));
  } else {
    return atomicAdd(to, value);
  }
#endif
}

// T: int32_t, uint32_t.
template <typename T>
PAGEMILL_DEVICE T atomic_min(T* to, T value) {
#ifdef PAGEMILL_EMULATION
  const T before = *to;
  *to = value < before ? value : before;
  return before;
#else
  return atomicMin(to, value);
#endif
}

PAGEMILL_DEVICE uint32_t atomic_or(uint32_t* to, uint32_t value) {
#ifdef PAGEMILL_EMULATION
  const uint32_t before = *to;
  *to = before | value;
  return before;
#else
  return atomicOr(to, value);
#endif
}

// This thread's writes before it are seen by other blocks before its writes after it.
PAGEMILL_DEVICE void fence_device() {
#ifndef PAGEMILL_EMULATION
  __threadfence();
#endif
}

template <typename To, typename From>
PAGEMILL_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace pagemill::cuda
