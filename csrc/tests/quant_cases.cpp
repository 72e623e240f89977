// The quantised linear layer against a loop in double over rounded rows, and the rule that a row does not know its
// neighbours.
#include "quant_cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/isa.h"

namespace pagemill {
namespace {

struct Random {
  uint64_t state = 88172645463325252ull;
  uint32_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 32);
  }
};

constexpr uint16_t kHalves[] = {0x3c00, 0x2e66, 0xb400, 0x0400, 0x0003};  // 1, 0.1, -0.25, 2^-14, 3 * 2^-24
constexpr double kHalfValues[] = {1.0, 0.0999755859375, -0.25, 6.103515625e-05, 1.78813934326171875e-07};

bool quant_case(int64_t rows, int64_t n, int64_t k, QuantFormat format) {
  Random random;
  const int64_t groups = quant_groups(k), panels = (n + kPanelColumns - 1) / kPanelColumns;
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (float& value : x) value = static_cast<float>(static_cast<int32_t>(random.next())) * 0x1p-31f;
  std::vector<uint8_t> values(static_cast<size_t>(n * k));
  for (uint8_t& value : values) value = static_cast<uint8_t>(random.next() % (1u << format.bits));
  std::vector<uint16_t> scales(static_cast<size_t>(n * groups)), minimums(scales.size());
  std::vector<double> scale_values(scales.size()), minimum_values(scales.size());
  for (size_t i = 0; i < scales.size(); ++i) {
    const uint32_t one = random.next() % 5, other = random.next() % 5;
    scales[i] = kHalves[one];
    minimums[i] = kHalves[other];
    scale_values[i] = kHalfValues[one];
    minimum_values[i] = format.minimums ? kHalfValues[other] : -(format.bits == 8 ? 128 : 8) * kHalfValues[one];
  }
  std::vector<char> packed(static_cast<size_t>(panels * groups * quant_group_bytes(format)));
  kernels().pack_linear_quant({values.data(), k, scales.data(), format.minimums ? minimums.data() : nullptr,
                               packed.data(), n, k, format, false}, 0, panels);
  auto run = [&](int64_t first, int64_t count) {
    std::vector<float> out(static_cast<size_t>(count * n));
    int64_t next = 0;
    kernels().linear_quant({&x[static_cast<size_t>(first * k)], k, packed.data(), nullptr, out.data(), count, k, n, false,
                            false, 1}, format, &next);
    return out;
  };
  const std::vector<int64_t> ids{n - 1, 0, n / 2};
  std::vector<float> table(ids.size() * static_cast<size_t>(k));
  kernels().embed_quant({packed.data(), ids.data(), reinterpret_cast<char*>(table.data()), k, 1.0f, format,
                         ElementType::f32}, 0, static_cast<int64_t>(ids.size()));
  for (size_t i = 0; i < table.size(); ++i) {
    const int64_t row = ids[i / static_cast<size_t>(k)], column = static_cast<int64_t>(i % static_cast<size_t>(k));
    const size_t group = static_cast<size_t>(row * groups + column / kQuantGroup);
    const double exact = scale_values[group] * values[static_cast<size_t>(row * k + column)] + minimum_values[group];
    if (!(std::fabs(table[i] - exact) <= 1e-7 * (256 * std::fabs(scale_values[group]) + std::fabs(exact)))) return false;
  }
  const std::vector<float> whole = run(0, rows);
  for (int64_t m = 0; m < rows; ++m) {
    const std::vector<float> alone = run(m, 1);
    if (std::memcmp(alone.data(), &whole[static_cast<size_t>(m * n)], static_cast<size_t>(n) * 4) != 0) return false;
    for (int64_t c = 0; c < n; ++c) {
      double exact = 0, size = 1;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * kQuantGroup, end = std::min(k, first + kQuantGroup);
        float largest = 0;
        for (int64_t i = first; i < end; ++i) largest = std::max(largest, std::fabs(x[m * k + i]));
        const float factor = 127.0f / largest;
        for (int64_t i = first; i < end; ++i) {
          const double rounded = std::nearbyint(x[m * k + i] * factor) * (largest / 127.0);
          const double term = rounded * (scale_values[c * groups + g] * values[c * k + i] + minimum_values[c * groups + g]);
          exact += term;
          size += std::fabs(rounded) * 256;
        }
      }
      if (!(std::fabs(whole[m * n + c] - exact) < 1e-6 * size)) return false;
    }
  }
  return true;
}

}  // namespace

int run_quant_cases(const std::string& level) {
  int failed = 0;
  for (const QuantFormat format : {QuantFormat{8, false}, QuantFormat{8, true}, QuantFormat{4, false}, QuantFormat{4, true}}) {
    for (const auto& [rows, n, k] : {std::array<int64_t, 3>{1, 33, 7}, {29, 100, 61}, {7, 64, 200}}) {
      if (quant_case(rows, n, k, format)) continue;
      std::printf("%s: linear_quant %d bits%s, %d rows: wrong\n", level.c_str(), format.bits,
                  format.minimums ? " with minimums" : "", static_cast<int>(rows));
      ++failed;
    }
  }
  return failed;
}

}  // namespace pagemill
