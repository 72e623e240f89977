// Shared memory and asynchronous copies.
#include <cstdlib>

#include "tests/emulation/machine.h"

namespace emulation {
namespace {

constexpr unsigned char kPoison = 0xff, kCanary = 0xa5;
constexpr int64_t kAlign = 128;
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kCanaryBytes = 0;  // AddressSanitizer guards the end, and names the line
#else
constexpr int64_t kCanaryBytes = 256;
#endif

unsigned char* arena;
int64_t arena_bytes;

unsigned char* checked(uint32_t address, const char* name) {
  if (address % 16 != 0) fail("%s: shared address %u is not a multiple of 16", name, address);
  if (int64_t(address) + 16 > arena_bytes)
    fail("%s: shared address %u, of %ld bytes", name, address, long(arena_bytes));
  return arena + address;
}

}  // namespace

void begin_shared(int64_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlign, size_t(bytes + kCanaryBytes + (bytes == 0))) != 0) std::abort();
  arena = static_cast<unsigned char*>(memory);
  arena_bytes = bytes;
  std::memset(arena, kPoison, size_t(bytes));
  std::memset(arena + bytes, kCanary, size_t(kCanaryBytes));
}

bool shared_is_intact() {
  for (int64_t i = 0; i < kCanaryBytes; ++i)
    if (arena[arena_bytes + i] != kCanary) return false;
  return true;
}

void end_shared() { std::free(arena); }

unsigned char* shared_memory() { return arena; }

uint32_t shared_address(const void* pointer) {
  const auto* at = static_cast<const unsigned char*>(pointer);
  if (at < arena || at > arena + arena_bytes) fail("takes the shared address of what is not in shared memory");
  return uint32_t(at - arena);
}

void check_aligned(const void* pointer, unsigned bytes, const char* name) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) fail("%s: %p is not a multiple of %u", name, pointer, bytes);
}

// The source is read now, where a stray address still has a culprit, and delivered in the wait.
void copy_async(uint32_t to, const void* from, bool valid) {
  AsyncCopy copy{checked(to, "copy_async_16"), {}, block.running->group};
  if (valid) {
    check_aligned(from, 16, "copy_async_16");
    std::memcpy(copy.bytes, from, 16);
  }
  std::memset(copy.to, kPoison, 16);
  block.running->copies.push_back(copy);
}

void copy_async_commit() { ++block.running->group; }

void copy_async_wait(int pending) {
  Thread& thread = *block.running;
  size_t kept = 0;
  for (const AsyncCopy& copy : thread.copies) {
    if (int64_t(copy.group) < int64_t(thread.group) - pending) {
      std::memcpy(copy.to, copy.bytes, 16);
    } else {
      thread.copies[kept++] = copy;
    }
  }
  thread.copies.resize(kept);
}

// ---- what lanes read and multiply -----------------------------------------------------------------------------------

namespace {

struct MatrixLoad {
  uint32_t* to;
  uint32_t row;
  int count;
  bool transposed;
};

void finish_load(void** lanes) {
  const auto of = [&](int lane) { return static_cast<const MatrixLoad*>(lanes[lane]); };
  uint16_t elements[4][8][8];
  const int count = of(0)->count;
  const bool transposed = of(0)->transposed;
  for (int i = 0; i < 8 * count; ++i) std::memcpy(elements[i / 8][i % 8], arena + of(i)->row, 16);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int major = lane / 4, minor = lane % 4 * 2;
    for (int m = 0; m < count; ++m) {
      const uint32_t low = transposed ? elements[m][minor][major] : elements[m][major][minor];
      const uint32_t high = transposed ? elements[m][minor + 1][major] : elements[m][major][minor + 1];
      of(lane)->to[m] = low | high << 16;
    }
  }
}

struct Product {
  float* c;
  const uint32_t* a;
  const uint32_t* b;
  bool bf16;
};

float element(uint32_t pair, int which, bool bf16) {
  const auto bits = uint16_t(pair >> 16 * which);
  if (!bf16) return float_of_f16(bits);
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

void finish_product(void** lanes) {
  const auto of = [&](int lane) { return static_cast<const Product*>(lanes[lane]); };
  const bool bf16 = of(0)->bf16;
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      a[g][t + i] = element(of(lane)->a[0], i, bf16);
      a[g + 8][t + i] = element(of(lane)->a[1], i, bf16);
      a[g][t + 8 + i] = element(of(lane)->a[2], i, bf16);
      a[g + 8][t + 8 + i] = element(of(lane)->a[3], i, bf16);
      b[t + i][g] = element(of(lane)->b[0], i, bf16);
      b[t + 8 + i][g] = element(of(lane)->b[1], i, bf16);
      c[g][t + i] = of(lane)->c[i];
      c[g + 8][t + i] = of(lane)->c[2 + i];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      of(lane)->c[i] = c[g][t + i];
      of(lane)->c[2 + i] = c[g + 8][t + i];
    }
  }
}

}  // namespace

void load_matrix(uint32_t* to, uint32_t row, int count, bool transposed) {
  if (block.running->index % kLanes < 8 * count) checked(row, "load_matrix");
  MatrixLoad load{to, row, count, transposed};
  static const char* const names[2][5] = {
      {"", "load_matrix x1", "load_matrix x2", "", "load_matrix x4"},
      {"", "load_matrix_transposed x1", "load_matrix_transposed x2", "", "load_matrix_transposed x4"}};
  meet_warp(names[transposed][count], &load, &finish_load);
}

void multiply_add(float* c, const uint32_t* a, const uint32_t* b, bool bf16) {
  Product product{c, a, b, bf16};
  meet_warp("multiply_add", &product, &finish_product);
}

}  // namespace emulation
