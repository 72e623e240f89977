// Runs the kernels, the decoder and its threads against plain loops in double, without torch or Python: what CI
// cross-compiles and runs under an emulator for machines it has not got, and what the sanitizers watch. The attention and
// cache cases are in this file. Every level the machine offers is run, the portable one everywhere, or those named as
// arguments. Prints one line per level; the exit code is the number of failed cases, at most 100.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cpu/attention_plan.h"
#include "cpu/isa.h"
#include "decoder_cases.h"
#include "layer_cases.h"
#include "plan_cases.h"
#include "quant_cases.h"
#include "team_cases.h"

namespace {

using namespace pagemill;

struct Case {
  const char* name;
  int64_t kv_heads, group, key_dim, value_dim, block_size;
  int64_t window, chunk;
  float softcap;
  bool sinks;
  ElementType type;
};

constexpr ElementType kF32 = ElementType::f32, kBf16 = ElementType::bf16;
constexpr Case kCases[] = {
    {"g3 f32", 2, 3, 64, 64, 16, 0, 0, 0, false, kF32},
    {"g3 bf16", 2, 3, 64, 64, 16, 0, 0, 0, false, kBf16},
    {"g1 d80 f32", 1, 1, 80, 96, 32, 0, 0, 0, false, kF32},
    {"g1 d80 bf16", 1, 1, 80, 96, 32, 0, 0, 0, false, kBf16},
    {"g7 tiny f32", 1, 7, 20, 60, 16, 0, 0, 0, false, kF32},
    {"g7 tiny bf16", 1, 7, 20, 60, 16, 0, 0, 0, false, kBf16},
    {"g4 d256 bf16", 1, 4, 256, 256, 16, 0, 0, 0, false, kBf16},
    {"window f32", 2, 2, 64, 64, 16, 50, 0, 0, false, kF32},
    {"chunk bf16", 2, 2, 64, 64, 16, 0, 100, 0, false, kBf16},
    {"softcap f32", 1, 2, 64, 64, 16, 0, 0, 5.0f, false, kF32},
    {"sinks bf16", 1, 8, 64, 64, 16, 120, 0, 20.0f, true, kBf16},
};
constexpr int64_t kLengths[] = {1, 16, 17, 255, 257, 600};
#if defined(PAGEMILL_SHORT_CASES)  // for emulators and sanitizers
constexpr int64_t kQueries[] = {1, 16, 1, 40, 131, 40}, kComparedEvery = 5;
#else
constexpr int64_t kQueries[] = {1, 16, 1, 100, 257, 40}, kComparedEvery = 1;
#endif
constexpr int64_t kNumSeqs = 6;

struct Random {
  uint64_t state = 88172645463325252ull;
  float next() {  // roughly normal: a sum of uniforms
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      sum += static_cast<float>(state >> 40) / static_cast<float>(1 << 24) - 0.5f;
    }
    return sum * 1.7f;
  }
};

uint16_t round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Values in the case's element type, and the same values as double.
struct Values {
  std::vector<char> bytes;
  std::vector<double> exact;

  Values(int64_t count, ElementType type, Random& random) : bytes(count * element_bytes(type)), exact(count) {
    for (int64_t i = 0; i < count; ++i) {
      float x = random.next();
      if (type == kBf16) {
        const uint16_t half = round_bf16(x);
        std::memcpy(&bytes[i * 2], &half, 2);
        const uint32_t word = static_cast<uint32_t>(half) << 16;
        std::memcpy(&x, &word, 4);
      } else {
        std::memcpy(&bytes[i * 4], &x, 4);
      }
      exact[i] = x;
    }
  }
};

double element(const std::vector<char>& bytes, int64_t index, ElementType type) {
  if (type == kF32) {
    float x;
    std::memcpy(&x, &bytes[index * 4], 4);
    return x;
  }
  uint16_t half;
  std::memcpy(&half, &bytes[index * 2], 2);
  const uint32_t word = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

void on_threads(int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < count; ++i) threads.emplace_back(body, i, i + 1, context);
  body(0, 1, context);
  for (std::thread& thread : threads) thread.join();
}

class Fixture {
 public:
  explicit Fixture(const Case& c) : case_(c), max_blocks_((600 + c.block_size - 1) / c.block_size) {
    Random random;
    int64_t keys = 0, queries = 0;
    for (int64_t s = 0; s < kNumSeqs; ++s) {
      starts_.push_back(static_cast<int32_t>(queries));
      lengths_.push_back(static_cast<int32_t>(kLengths[s]));
      first_key_.push_back(keys);
      keys += kLengths[s];
      queries += kQueries[s];
    }
    starts_.push_back(static_cast<int32_t>(queries));
    const int64_t num_blocks = kNumSeqs * max_blocks_;
    tables_.assign(num_blocks, -1);
    key_cache_.assign(num_blocks * c.kv_heads * c.block_size * c.key_dim * element_bytes(c.type), '\xff');  // NaN
    value_cache_.assign(num_blocks * c.kv_heads * c.block_size * c.value_dim * element_bytes(c.type), '\xff');
    key_.emplace_back(keys * c.kv_heads * c.key_dim, c.type, random);
    value_.emplace_back(keys * c.kv_heads * c.value_dim, c.type, random);
    query_.emplace_back(queries * heads() * c.key_dim, c.type, random);
    for (int64_t h = 0; h < heads(); ++h) sinks_.push_back(random.next());
    fill(keys);
  }

  int64_t heads() const { return case_.kv_heads * case_.group; }

  // Output of queries [begin, end) of sequence `seq` alone (seq < 0: of the whole batch).
  std::vector<char> run(int64_t seq, int64_t begin, int64_t end, int64_t num_threads) const {
    AttentionArgs args = arguments();
    std::vector<int32_t> starts = starts_, lengths = lengths_;
    int64_t num_seqs = kNumSeqs, first = 0, count = starts_[kNumSeqs];
    if (seq >= 0) {
      num_seqs = 1;
      count = end - begin;
      first = starts_[seq] + begin;
      starts = {0, static_cast<int32_t>(count)};
      lengths = {static_cast<int32_t>(kLengths[seq] - kQueries[seq] + end)};
      args.block_tables += seq * max_blocks_;
    }
    const int64_t bytes = element_bytes(case_.type);
    std::vector<char> out(count * heads() * case_.value_dim * bytes, '\xff');
    args.query += first * heads() * case_.key_dim * bytes;
    args.query_start = starts.data();
    args.seq_lens = lengths.data();
    args.out = out.data();
    run_attention(kernels(), args, num_seqs, {num_threads, 0, on_threads});
    return out;
  }

  // Whether `out` (of the whole batch) is what loops in double give.
  bool close(const std::vector<char>& out) const {
    const double allowed = case_.type == kF32 ? 4e-6 : std::ldexp(1.0, -7);
    bool good = true;
    for (int64_t s = 0; s < kNumSeqs; ++s) {
      for (int64_t q = 0; q < kQueries[s]; q += kComparedEvery) {
        for (int64_t h = 0; h < heads(); ++h) good = row_close(out, s, q, h, allowed) && good;
      }
    }
    return good;
  }

  // Whether every row computed alone has the bits it has in the batch, on one and on two threads.
  bool invariant(const std::vector<char>& whole) const {
    const int64_t row = heads() * case_.value_dim * element_bytes(case_.type);
    if (run(-1, 0, 0, 2) != whole) return false;
    for (int64_t s = 0; s < kNumSeqs; ++s) {
      for (int64_t q = 0; q < kQueries[s]; q += 13) {
        const std::vector<char> alone = run(s, q, q + 1, 1 + q % 2);
        if (std::memcmp(alone.data(), &whole[(starts_[s] + q) * row], row) != 0) return false;
      }
    }
    return true;
  }

 private:
  void fill(int64_t num_keys) {
    std::vector<int64_t> slots(num_keys);
    int64_t next = kNumSeqs * max_blocks_;  // blocks are handed out backwards, interleaved over the sequences
    for (int64_t b = 0; b < max_blocks_; ++b) {
      for (int64_t s = 0; s < kNumSeqs; ++s) {
        if (b * case_.block_size < kLengths[s]) tables_[s * max_blocks_ + b] = static_cast<int32_t>(--next);
      }
    }
    for (int64_t s = 0; s < kNumSeqs; ++s) {
      for (int64_t p = 0; p < kLengths[s]; ++p) {
        slots[first_key_[s] + p] =
            tables_[s * max_blocks_ + p / case_.block_size] * case_.block_size + p % case_.block_size;
      }
    }
    CacheWrite write{};
    write.key = key_[0].bytes.data();
    write.value = value_[0].bytes.data();
    write.key_cache = key_cache_.data();
    write.value_cache = value_cache_.data();
    write.slots = slots.data();
    write.key_head_stride = case_.key_dim;
    write.key_token_stride = case_.kv_heads * case_.key_dim;
    write.value_head_stride = case_.value_dim;
    write.value_token_stride = case_.kv_heads * case_.value_dim;
    write.key_block_stride = case_.kv_heads * case_.block_size * case_.key_dim;
    write.value_block_stride = case_.kv_heads * case_.block_size * case_.value_dim;
    write.num_kv_heads = case_.kv_heads;
    write.block_size = case_.block_size;
    write.key_dim = case_.key_dim;
    write.value_dim = case_.value_dim;
    write.type = case_.type;
    kernels().write_cache(write, 0, num_keys);
  }

  AttentionArgs arguments() const {
    AttentionArgs args{};
    args.query = query_[0].bytes.data();
    args.key_cache = key_cache_.data();
    args.value_cache = value_cache_.data();
    args.block_tables = tables_.data();
    args.sinks = case_.sinks ? sinks_.data() : nullptr;
    args.table_stride = max_blocks_;
    args.query_head_stride = case_.key_dim;
    args.query_token_stride = heads() * case_.key_dim;
    args.out_head_stride = case_.value_dim;
    args.out_token_stride = heads() * case_.value_dim;
    args.key_block_stride = case_.kv_heads * case_.block_size * case_.key_dim;
    args.value_block_stride = case_.kv_heads * case_.block_size * case_.value_dim;
    args.num_kv_heads = case_.kv_heads;
    args.group = case_.group;
    args.block_size = case_.block_size;
    args.key_dim = case_.key_dim;
    args.value_dim = case_.value_dim;
    args.window = case_.window;
    args.chunk = case_.chunk;
    args.scale = 1.0f / std::sqrt(static_cast<float>(case_.key_dim));
    args.softcap = case_.softcap;
    args.causal = true;
    args.type = case_.type;
    return args;
  }

  bool row_close(const std::vector<char>& out, int64_t s, int64_t q, int64_t h, double allowed) const {
    const int64_t position = kLengths[s] - kQueries[s] + q, kv_head = h / case_.group;
    int64_t begin = 0;
    if (case_.window > 0) begin = std::max(begin, position - case_.window + 1);
    if (case_.chunk > 0) begin = std::max(begin, position / case_.chunk * case_.chunk);
    const double* query = &query_[0].exact[((starts_[s] + q) * heads() + h) * case_.key_dim];
    std::vector<double> weights;
    double total = case_.sinks ? std::exp(static_cast<double>(sinks_[h])) : 0.0;
    for (int64_t p = begin; p <= position; ++p) {
      const double* key = &key_[0].exact[((first_key_[s] + p) * case_.kv_heads + kv_head) * case_.key_dim];
      double score = 0;
      for (int64_t d = 0; d < case_.key_dim; ++d) score += query[d] * key[d];
      score /= std::sqrt(static_cast<double>(case_.key_dim));
      if (case_.softcap > 0) score = std::tanh(score / case_.softcap) * case_.softcap;
      weights.push_back(std::exp(score));
      total += weights.back();
    }
    for (int64_t d = 0; d < case_.value_dim; ++d) {
      double exact = 0, size = 0;
      for (int64_t p = begin; p <= position; ++p) {
        const double v = value_[0].exact[((first_key_[s] + p) * case_.kv_heads + kv_head) * case_.value_dim + d];
        exact += weights[p - begin] * v / total;
        size += weights[p - begin] * std::fabs(v) / total;
      }
      const double got = element(out, ((starts_[s] + q) * heads() + h) * case_.value_dim + d, case_.type);
      if (!(std::fabs(got - exact) <= allowed * size + 1e-6)) return false;
    }
    return true;
  }

  Case case_;
  int64_t max_blocks_;
  std::vector<int32_t> tables_, starts_, lengths_;
  std::vector<int64_t> first_key_;
  std::vector<char> key_cache_, value_cache_;
  std::vector<Values> key_, value_, query_;
  std::vector<float> sinks_;
};

int run_level(const std::string& level) {
  if (!set_level(level)) {
    std::printf("level %s: not here\n", level.c_str());
    return 1;
  }
  int failed = 0, passed = 0;
  for (const Case& c : kCases) {
    const Fixture fixture(c);
    const std::vector<char> out = fixture.run(-1, 0, 0, 1);
    const bool close = fixture.close(out), invariant = fixture.invariant(out);
    if (!close) std::printf("%s: %s: differs from the exact answer\n", level.c_str(), c.name);
    if (!invariant) std::printf("%s: %s: a row's bits depend on its batch\n", level.c_str(), c.name);
    (close && invariant ? passed : failed) += 1;
  }
  const int layers_failed = run_layer_cases(level) + run_quant_cases(level) + run_decoder_cases(level);
  std::printf("level %s: %d passed, %d failed; layers: %d failed\n", level.c_str(), passed, failed, layers_failed);
  return failed + layers_failed;
}

}  // namespace

int main(int count, char** arguments) {
  int failed = pagemill::run_team_cases() + pagemill::run_plan_cases();
  for (int i = 1; i < count; ++i) failed += run_level(arguments[i]);
  const std::string levels = count > 1 ? "" : pagemill::available_levels();
  for (size_t begin = 0; begin < levels.size();) {
    const size_t end = std::min(levels.find(',', begin), levels.size());
    failed += run_level(levels.substr(begin, end - begin));
    begin = end + 1;
  }
  return std::min(failed, 100);
}
