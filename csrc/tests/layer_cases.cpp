// Linear, norms, activations and sampling against plain loops in double, and the rule that a row does not know its
// neighbours. A fraction of what tests/ops checks: enough to find a level that is wrong on a machine without Python.
#include "layer_cases.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/isa.h"

#define PAGEMILL_LEVEL layer_cases  // philox.h lives in a level's namespace; here it is the test's own copy
#include "cpu/philox.h"

namespace pagemill {
namespace {

struct Random {
  uint64_t state = 88172645463325252ull;
  float next() {  // uniform in [-1, 1)
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<float>(state >> 40) / static_cast<float>(1 << 23) - 1.0f;
  }
  std::vector<float> values(int64_t count, float scale) {
    std::vector<float> result(static_cast<size_t>(count));
    for (float& x : result) x = next() * scale;
    return result;
  }
};

std::vector<uint16_t> to_halves(std::vector<float>& values) {  // rounds `values` too
  std::vector<uint16_t> halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    halves[i] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    bits = static_cast<uint32_t>(halves[i]) << 16;
    std::memcpy(&values[i], &bits, 4);
  }
  return halves;
}

bool linear_case(int64_t rows, int64_t n, int64_t k, bool bf16) {
  Random random;
  std::vector<float> x = random.values(rows * k, 1), weight = random.values(n * k, 1), bias = random.values(n, 1);
  const std::vector<uint16_t> x_halves = to_halves(x), weight_halves = to_halves(weight);
  const int64_t panels = (n + kPanelColumns - 1) / kPanelColumns;
  std::vector<char> packed(static_cast<size_t>(panels * packed_steps(k, bf16) * kPanelColumns * 4));
  const void* weight_data = bf16 ? static_cast<const void*>(weight_halves.data()) : weight.data();
  kernels().pack_linear({weight_data, k, packed.data(), n, k, bf16}, 0, panels);
  auto run = [&](int64_t first, int64_t count) {
    std::vector<float> out(static_cast<size_t>(count * n));
    const void* data = bf16 ? static_cast<const void*>(&x_halves[first * k]) : &x[first * k];
    int64_t next = 0;
    kernels().linear({data, k, packed.data(), bias.data(), out.data(), count, k, n, bf16, false, 1}, &next);
    return out;
  };
  const std::vector<float> whole = run(0, rows);
  for (int64_t m = 0; m < rows; ++m) {
    const std::vector<float> alone = run(m, 1);
    if (std::memcmp(alone.data(), &whole[m * n], n * sizeof(float)) != 0) return false;
    for (int64_t c = 0; c < n; ++c) {
      double exact = bias[c];
      for (int64_t i = 0; i < k; ++i) exact += static_cast<double>(x[m * k + i]) * weight[c * k + i];
      if (!(std::fabs(whole[m * n + c] - exact) < 1e-6 * static_cast<double>(k + 8))) return false;
    }
  }
  return true;
}

bool norm_case(int64_t dim, NormVariant variant) {
  Random random;
  const std::vector<float> x = random.values(dim, 3), weight = random.values(dim, 1);
  std::vector<float> out(x.size());
  NormArgs args{};
  args.x = reinterpret_cast<const char*>(x.data());
  args.weight = reinterpret_cast<const char*>(weight.data());
  args.out = reinterpret_cast<char*>(out.data());
  args.inner = 1;
  args.dim = args.outer_stride = dim;
  args.eps = 1e-5f;
  args.variant = variant;
  args.type = ElementType::f32;
  kernels().rms_norm(args, 0, 1);
  double square = 0;
  for (float v : x) square += static_cast<double>(v) * v;
  const double scale = 1 / std::sqrt(square / static_cast<double>(dim) + 1e-5);
  for (size_t i = 0; i < x.size(); ++i) {
    const double factor = variant == NormVariant::gemma ? 1.0 + weight[i] : weight[i];
    if (!(std::fabs(out[i] - x[i] * scale * factor) < 4e-6)) return false;
  }
  return true;
}

bool activation_case(ActivationKind kind) {
  std::vector<float> x, out;
  for (int i = -9000; i <= 9000; ++i) x.push_back(static_cast<float>(i) * 1e-3f);
  out.resize(x.size());
  const ActivationArgs args{reinterpret_cast<const char*>(x.data()), reinterpret_cast<char*>(out.data()), 0, kind,
                            ElementType::f32};
  kernels().activation(args, 0, static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i], cubic = 2 * std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v);
    double exact = v / (1 + std::exp(-v));
    if (kind == ActivationKind::gelu) exact = v * 0.5 * std::erfc(-v / std::sqrt(2.0));
    if (kind == ActivationKind::gelu_tanh) exact = v / (1 + std::exp(-cubic));
    if (!(std::fabs(out[i] - exact) <= 2e-5 * std::fabs(exact))) return false;
  }
  return true;
}

// The definition in double, by sorting.
int64_t expected_id(const std::vector<float>& logits, double temperature, int64_t top_k, double top_p, uint64_t bits) {
  std::vector<int64_t> ranking(logits.size());
  std::iota(ranking.begin(), ranking.end(), 0);
  std::stable_sort(ranking.begin(), ranking.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  if (top_k > 0) ranking.resize(static_cast<size_t>(std::min<int64_t>(top_k, ranking.size())));
  auto mass = [&](int64_t id) { return std::exp((logits[id] - static_cast<double>(logits[ranking[0]])) / temperature); };
  double total = 0, sum = 0;
  for (int64_t id : ranking) total += mass(id);
  size_t kept = 0;
  while (kept < ranking.size() && (kept == 0 || sum < top_p * total)) sum += mass(ranking[kept++]);
  ranking.resize(kept);
  const double place = static_cast<double>(bits) * std::ldexp(1.0, -53) * sum;
  std::vector<int64_t> ids = ranking;
  std::sort(ids.begin(), ids.end());
  double running = 0;
  for (int64_t id : ids)
    if ((running += mass(id)) > place) return id;
  return ids.back();
}

bool sampler_case(float temperature, int32_t top_k, float top_p) {
  Random random;
  for (int64_t position = 0; position < 40; ++position) {
    const std::vector<float> logits = random.values(3001, 8);
    const float min_p = 0;
    const uint8_t greedy = 0;
    const int64_t key = 1234567 * position;
    int64_t id = -2;
    kernels().sample({logits.data(), 3001, 3001, &temperature, &top_k, &top_p, &min_p, &greedy, &key, &position, &id}, 0, 1);
    const uint64_t bits = layer_cases::random_bits(static_cast<uint64_t>(key), static_cast<uint64_t>(position));
    if (id != expected_id(logits, temperature, top_k, top_p, bits)) return false;
  }
  return layer_cases::random_bits(0, 0) == 0x6627E8D5E169C58Dull >> 11;  // Random123's known answer
}

}  // namespace

int run_layer_cases(const std::string& level) {
  int failed = 0;
  auto check = [&](bool good, const char* name) {
    if (!good) std::printf("%s: %s: wrong\n", level.c_str(), name);
    failed += !good;
  };
  for (bool bf16 : {false, true}) {
    check(linear_case(1, 33, 7, bf16), bf16 ? "linear 1 bf16" : "linear 1 f32");
    check(linear_case(29, 100, 61, bf16), bf16 ? "linear 29 bf16" : "linear 29 f32");
    check(linear_case(70, 64, 200, bf16), bf16 ? "linear 70 bf16" : "linear 70 f32");
  }
  for (int64_t dim : {60, 576}) {
    check(norm_case(dim, NormVariant::llama), "norm llama");
    check(norm_case(dim, NormVariant::gemma), "norm gemma");
  }
  check(activation_case(ActivationKind::silu), "silu");
  check(activation_case(ActivationKind::gelu), "gelu");
  check(activation_case(ActivationKind::gelu_tanh), "gelu_tanh");
  check(sampler_case(1.0f, 0, 1.0f), "sample");
  check(sampler_case(0.7f, 40, 1.0f), "sample top_k");
  check(sampler_case(1.0f, 0, 0.9f), "sample top_p");
  check(sampler_case(2.0f, 900, 0.5f), "sample top_k top_p");
  return failed;
}

}  // namespace pagemill
