// Kernels that do right and wrong on purpose, for the tests of the machine itself. One launcher: case and output.
#include "cuda/tensor_core.cuh"

namespace pagemill::cuda {
namespace {

// Each thread's number, passed round its block: through shared memory and a barrier.
__global__ void rotate_block(float* out, int64_t synchronised) {
  PAGEMILL_SHARED(shared);
  float* values = reinterpret_cast<float*>(shared);
  const int n = static_cast<int>(blockDim.x), i = static_cast<int>(threadIdx.x);
  values[i] = static_cast<float>(i);
  if (synchronised) sync_block();
  out[blockIdx.x * n + i] = values[(i + kWarp) % n];
}

__global__ void lanes(float* out) {
  const int i = static_cast<int>(threadIdx.x);
  const uint32_t odd = ballot(i % 2 == 1);
  const double down = shuffle_down(static_cast<double>(i), 1);
  const int64_t up = shuffle_up(static_cast<int64_t>(i), 2);
  out[i] = static_cast<float>(shuffle_xor(i, 5) + 100 * (odd == 0xaaaaaaaau)) + static_cast<float>(down) * 1000.0f +
           static_cast<float>(up) * 1e5f + shuffle(static_cast<float>(i), 3) * 0.125f;
}

__global__ void count(float* out) {
  for (int turn = 0; turn < 5; ++turn) {
    const int many = sync_block_count(static_cast<int>(threadIdx.x) < 10 * turn);
    if (many != 10 * turn) out[threadIdx.x] = -1.0f;
  }
  if (out[threadIdx.x] != -1.0f) out[threadIdx.x] = 1.0f;
}

// A [16 x 16] row-major and B [16 x 8] row-major in float32, rounded to T; C = A B, twice.
template <typename T>
__global__ void product(const float* a, const float* b, float* c) {
  PAGEMILL_SHARED(shared);
  T* left = reinterpret_cast<T*>(shared);
  T* right = left + 256;
  for (int i = lane_id(); i < 256; i += kWarp) left[i] = round_to<T>(a[i]);
  for (int i = lane_id(); i < 128; i += kWarp) right[i] = round_to<T>(b[i]);
  sync_warp();
  const int lane = lane_id();
  uint32_t left_pairs[4], right_pairs[2];
  load_matrix(left_pairs, shared_address(left + (lane % 16) * 16 + lane / 16 * 8));
  load_matrix_transposed(right_pairs, shared_address(right + (lane % 16) * 8));
  float sums[4] = {};
  multiply_add<T>(sums, left_pairs, right_pairs);
  multiply_add<T>(sums, left_pairs, right_pairs);
  const int row = lane / 4, column = lane % 4 * 2;
  for (int i = 0; i < 2; ++i) {
    c[row * 8 + column + i] = sums[i];
    c[(row + 8) * 8 + column + i] = sums[2 + i];
  }
}

// Two groups of copies in flight; reads the first after waiting for all but `PENDING`.
template <int PENDING>
__global__ void copy(const float* from, float* out, int64_t valid, int64_t shift) {
  PAGEMILL_SHARED(shared);
  const int i = static_cast<int>(threadIdx.x);
  copy_async_16(shared_address(shared + 32 * i) + static_cast<uint32_t>(shift), from + 8 * i, i < valid);
  copy_async_commit();
  copy_async_16(shared_address(shared + 32 * i + 16), from + 8 * i + 4);
  copy_async_commit();
  copy_async_wait<PENDING>();
  out[i] = reinterpret_cast<const float*>(shared)[8 * i + 3];
  copy_async_wait<0>();
}

__global__ void misbehave(float* out, int64_t what) {
  PAGEMILL_SHARED(shared);
  const int i = static_cast<int>(threadIdx.x);
  uint32_t matrix[1];
  switch (what) {
    case 0:  // half of the block comes to the barrier
      if (i < 32) sync_block();
      break;
    case 1:  // one lane stays away
      if (i != 7) out[i] = shuffle(1.0f, 0);
      break;
    case 2:  // lanes in different operations
      out[i] = i % 2 ? shuffle(1.0f, 0) : shuffle_xor(1.0f, 1);
      break;
    case 3: load_matrix(matrix, shared_address(shared) + 4); break;
    case 4: load_matrix(matrix, shared_address(shared) + 4096); break;
    case 5: shared[4096 + i] = 1; break;
    case 6: copy_async_16(shared_address(shared + 16 * i), out); break;
    case 7: load_16(out + 1); break;
    case 8: sync_threads(1, i < 32 ? 32 : 64); break;
    case 9: shared_address(out); break;
    default: break;
  }
  out[i] = 1.0f;
}

__global__ void convert(const float* from, float* out, int64_t count, int64_t code) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  out[i] = code == kBfloat16   ? rounded<Bf16>(from[i])
           : code == kFloat16  ? rounded<F16>(from[i])
           : code == kFloat8   ? rounded<Fp8>(from[i])
                               : exp2_approx(from[i]);
}

}  // namespace

PAGEMILL_EXPORT int pagemill_case_rotate_block(float* out, int64_t blocks, int64_t threads, int64_t synchronised,
                                               void* stream) {
  PAGEMILL_LAUNCH(rotate_block, static_cast<unsigned>(blocks), threads, threads * 4, stream)(out, synchronised);
  return launch_status();
}

PAGEMILL_EXPORT int pagemill_case_lanes(float* out, void* stream) {
  PAGEMILL_LAUNCH(lanes, 1, 32, 0, stream)(out);
  return launch_status();
}

PAGEMILL_EXPORT int pagemill_case_count(float* out, void* stream) {
  PAGEMILL_LAUNCH(count, 1, 96, 0, stream)(out);
  return launch_status();
}

PAGEMILL_EXPORT int pagemill_case_product(const float* a, const float* b, float* c, int64_t code, void* stream) {
  return with_half_type(code, [&](auto type) {
    auto kernel = &product<decltype(type)>;
    PAGEMILL_LAUNCH(kernel, 1, 32, 1024, stream)(a, b, c);
    return launch_status();
  });
}

PAGEMILL_EXPORT int pagemill_case_copy(const float* from, float* out, int64_t valid, int64_t pending, int64_t shift,
                                       void* stream) {
  auto kernel = pending == 0 ? &copy<0> : pending == 1 ? &copy<1> : &copy<2>;
  PAGEMILL_LAUNCH(kernel, 1, 64, 64 * 32, stream)(from, out, valid, shift);
  return launch_status();
}

PAGEMILL_EXPORT int pagemill_case_misbehave(float* out, int64_t what, void* stream) {
  PAGEMILL_LAUNCH(misbehave, 1, 64, 4096, stream)(out, what);
  return launch_status();
}

PAGEMILL_EXPORT int pagemill_case_launch(float* out, int64_t blocks, int64_t threads, int64_t shared_bytes,
                                         int64_t allowed, void* stream) {
  if (const int status = allow_shared(&misbehave, allowed)) return status;
  PAGEMILL_LAUNCH(misbehave, dim3(1, static_cast<unsigned>(blocks)), threads, shared_bytes, stream)(out, int64_t(-1));
  return launch_status();
}

PAGEMILL_EXPORT int pagemill_case_convert(const float* from, float* out, int64_t count, int64_t code, void* stream) {
  PAGEMILL_LAUNCH(convert, static_cast<unsigned>(ceil_div(count, 256)), 256, 0, stream)(from, out, count, code);
  return launch_status();
}

}  // namespace pagemill::cuda
