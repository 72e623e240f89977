// What a kernel sees of the emulated device: csrc/cuda/portable.cuh and its neighbours include this in place of CUDA's
// headers and send every device facility here. The machine behind it is described in machine.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define threadIdx (::emulation::place.thread)
#define blockIdx (::emulation::place.block)
#define blockDim (::emulation::place.block_dim)
#define gridDim (::emulation::place.grid_dim)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulation {

struct Place {
  dim3 thread, block, block_dim, grid_dim;
};
extern Place place;  // of the fiber that runs

// ---- launches -----------------------------------------------------------------------------------------------------

struct Configuration {
  const void* kernel;
  const char* name;
  dim3 grid;
  int64_t threads, shared_bytes;
};

void run_grid(const Configuration& configuration, void (*body)(void*), void* arguments);
int allow_shared(const void* kernel, int64_t bytes);
int status();  // 0, or 719 (cudaErrorLaunchFailure) if a report waits to be read

template <typename... Parameters>
struct Launch {
  void (*kernel)(Parameters...);
  Configuration configuration;

  template <typename... Arguments>
  void operator()(Arguments... arguments) const {
    static_assert((std::is_trivially_copyable_v<Parameters> && ...), "arguments reach a kernel as bytes");
    static_assert((sizeof(Parameters) + ... + 0) <= 4096, "all arguments of a kernel have room in 4 KiB");
    struct Call {
      void (*kernel)(Parameters...);
      std::tuple<Parameters...> values;
    } call{kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)};
    run_grid(
        configuration,
        [](void* pointer) {
          const Call& made = *static_cast<const Call*>(pointer);
          std::apply(made.kernel, made.values);
        },
        &call);
  }
};

template <typename... Parameters>
Launch<Parameters...> launch(void (*kernel)(Parameters...), const char* name, dim3 grid, int64_t threads,
                             int64_t shared_bytes, void* /*stream*/) {
  return {kernel, {reinterpret_cast<const void*>(kernel), name, grid, threads, shared_bytes}};
}

// ---- barriers and warps -------------------------------------------------------------------------------------------

void sync_block();
int sync_block_count(bool condition);
void sync_threads(int barrier, int threads);
void sync_warp();
uint64_t shuffle_bits(uint64_t bits, int lane, const char* name);
uint32_t ballot(bool condition);

template <typename T>
T shuffle(T value, int lane, const char* name) {
  static_assert((sizeof(T) == 4 || sizeof(T) == 8) && std::is_arithmetic_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle_bits(bits, lane, name);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- memory -------------------------------------------------------------------------------------------------------

unsigned char* shared_memory();
uint32_t shared_address(const void* pointer);
void check_aligned(const void* pointer, unsigned bytes, const char* name);
void copy_async(uint32_t to, const void* from, bool valid);
void copy_async_commit();
void copy_async_wait(int pending);

// ---- matrices and numbers -----------------------------------------------------------------------------------------

void load_matrix(uint32_t* to, uint32_t row, int count, bool transposed);
void multiply_add(float* c, const uint32_t* a, const uint32_t* b, bool bf16);
float float_of_f16(uint16_t bits);
uint16_t f16_of_float(float value);
uint16_t bf16_of_float(float value);

inline float exp2_flushed(float x) {
  const float power = std::exp2(x);
  return power < 0x1p-126f ? 0.0f : power;
}

}  // namespace emulation
