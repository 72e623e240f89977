// What this machine can do at most: streaming reads, and the multiply-add or dot instruction that a level's kernels use,
// on registers alone. Compiled by yardsticks.py with the level's flags; no part of the library.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <new>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr int kChains = 16;  // independent sums: more than an instruction's latency times how many start per cycle
constexpr int kRounds = 7;

// Instructions: sum = step(sum, a, b) does kWork operations (a multiply and an add are two).
typedef float Floats __attribute__((vector_size(16)));

#if defined(__AVX512F__)
struct MultiplyAdd {
  static constexpr const char* kName = "vfmadd (512 bits)";
  static constexpr double kWork = 32;
  using V = __m512;
  static V step(V sum, V a, V b) { return _mm512_fmadd_ps(a, b, sum); }
};
#elif defined(__AVX2__)
struct MultiplyAdd {
  static constexpr const char* kName = "vfmadd (256 bits)";
  static constexpr double kWork = 16;
  using V = __m256;
  static V step(V sum, V a, V b) { return _mm256_fmadd_ps(a, b, sum); }
};
#elif defined(__aarch64__)
struct MultiplyAdd {
  static constexpr const char* kName = "fmla";
  static constexpr double kWork = 8;
  using V = float32x4_t;
  static V step(V sum, V a, V b) { return vfmaq_f32(sum, a, b); }
};
#else
struct MultiplyAdd {
  static constexpr const char* kName = "multiply, add (128 bits)";
  static constexpr double kWork = 8;
  using V = Floats;
  static V step(V sum, V a, V b) { return sum + a * b; }
};
#endif

#if defined(__AVX512BF16__)
struct DotBf16 {
  static constexpr const char* kName = "vdpbf16ps";
  static constexpr double kWork = 64;
  using V = __m512;
  static V step(V sum, V a, V b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct DotBf16 {
  static constexpr const char* kName = "bfmmla";
  static constexpr double kWork = 32;
  using V = float32x4_t;
  static V step(V sum, V a, V b) { return vbfmmlaq_f32(sum, (bfloat16x8_t)a, (bfloat16x8_t)b); }
};
#else
using DotBf16 = MultiplyAdd;  // pairs are split and multiplied as float32
#endif

#if defined(__AVX512VNNI__)
struct DotInt8 {
  static constexpr const char* kName = "vpdpbusd";
  static constexpr double kWork = 128;
  using V = __m512i;
  static V step(V sum, V a, V b) { return _mm512_dpbusd_epi32(sum, a, b); }
};
#elif defined(__AVX2__)
struct DotInt8 {
  static constexpr const char* kName = "vpmaddubsw, vpmaddwd, vpaddd";
  static constexpr double kWork = 64;
  using V = __m256i;
  static V step(V sum, V a, V b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(sum, a), b));  // of the sum, or it is hoisted
  }
};
#elif defined(__ARM_FEATURE_MATMUL_INT8)
struct DotInt8 {
  static constexpr const char* kName = "usdot";
  static constexpr double kWork = 32;
  using V = int32x4_t;
  static V step(V sum, V a, V b) { return vusdotq_s32(sum, (uint8x16_t)a, (int8x16_t)b); }
};
#else
using DotInt8 = MultiplyAdd;
#endif

// Seconds of body() on so many threads: CPU time of one, which others on the machine do not spoil, else the wall's.
template <typename Body>
double seconds(int threads, const Body& body) {
  if (threads == 1) {
    timespec start, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    body(0);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    return static_cast<double>(end.tv_sec - start.tv_sec) + 1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec);
  }
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back([&body, i] { body(i); });
  body(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <typename Body>
double least_seconds(int threads, const Body& body) {
  double least = seconds(threads, body);
  for (int round = 1; round < kRounds; ++round) {
    const double taken = seconds(threads, body);
    if (taken < least) least = taken;
  }
  return least;
}

template <class Instruction>
void compute(int64_t times) {
  using V = typename Instruction::V;
  V sums[kChains] = {}, a = {}, b = {};
  __asm__ volatile("" : "+m"(a), "+m"(b));  // values the compiler does not know
  for (int64_t i = 0; i < times; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sums[c] = Instruction::step(sums[c], a, b);
  }
  __asm__ volatile("" : "+m"(sums));
}

template <class Instruction>
double rate(int threads) {
  constexpr int64_t kTimes = 1 << 21;
  const double taken = least_seconds(threads, [](int) { compute<Instruction>(kTimes); });
  return Instruction::kWork * kChains * kTimes * threads / taken * 1e-9;
}

uint64_t sum_words(const uint64_t* from, int64_t count) {
  typedef uint64_t Words __attribute__((vector_size(64)));
  Words sums[8] = {};
  for (int64_t i = 0; i + 64 <= count; i += 64) {
    Words words[8];
    std::memcpy(words, from + i, sizeof words);
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) sums[c] += words[c];
  }
  uint64_t total = 0;
  for (int c = 0; c < 8; ++c)
    for (int i = 0; i < 8; ++i) total += sums[c][i];
  return total;
}

}  // namespace

extern "C" {

// kind: 'f' float32, 'b' bfloat16, 'i' 8-bit integers.
const char* instruction(char kind) {
  return kind == 'b' ? DotBf16::kName : kind == 'i' ? DotInt8::kName : MultiplyAdd::kName;
}

// 10^9 operations per second of all threads together.
double operation_rate(char kind, int threads) {
  return kind == 'b' ? rate<DotBf16>(threads) : kind == 'i' ? rate<DotInt8>(threads) : rate<MultiplyAdd>(threads);
}

// GB/s at which 256 MiB in huge pages, as weights are, stream past; each thread reads its own part.
double read_rate(int threads) {
  constexpr int64_t kBytes = 256 << 20, kPage = 2 << 20;
  auto* memory = static_cast<uint64_t*>(::operator new(kBytes, std::align_val_t(kPage)));
#if defined(__linux__)
  madvise(memory, kBytes, MADV_HUGEPAGE);
#endif
  std::memset(memory, 1, kBytes);
  const int64_t share = kBytes / 8 / threads;
  std::vector<uint64_t> sums(static_cast<size_t>(threads) * 8);  // 8: a line each
  const double taken = least_seconds(threads, [&](int i) { sums[static_cast<size_t>(i) * 8] += sum_words(memory + i * share, share); });
  volatile uint64_t sink = sums[0];
  (void)sink;
  ::operator delete(memory, std::align_val_t(kPage));
  return static_cast<double>(share * 8 * threads) / taken * 1e-9;
}
}
