// out = x @ weight.T + bias with weights of 8 or 4 bits in groups of 32: at few rows the weights stream through at
// memory speed, a half or a quarter of bfloat16's bytes; at many rows a byte product does twice the work of a
// bfloat16 one.
//
// Rows of x are brought to 8 bits per group of 32 with a scale of their own (linear_quant_rows.h), so that the products
// are integers and a group's sum is exact at every level. Batch invariance is then the order of the groups: ascending,
// into one float32 accumulator, whatever the number of rows (linear_quant_tiles.h). linear_driver.h cuts the work into
// tiles and finishes the sums; this file packs weights and reads single rows of them, which is what an embedding is.
#include "cpu/kernels.h"
#include "cpu/linear_driver.h"
#include "cpu/linear_quant_tiles.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

template <int BITS, bool MINIMUMS>
void run_types(const LinearArgs& a, int64_t* next) {
  if (!a.bf16) return Worker<QuantTiles<BITS, MINIMUMS, float>>(a).template run<float>(next);
  Worker<QuantTiles<BITS, MINIMUMS, uint16_t>> worker(a);
  if (a.out_bf16) return worker.template run<uint16_t>(next);
  worker.template run<float>(next);
}

// Which row of the weight a panel's column is; none: not below out_features.
int64_t row_of_column(const PackQuantArgs& a, int64_t panel, int64_t column) {
  if (!a.gated) return panel * kPanelColumns + column;
  const int64_t half = a.out_features / 2, within = panel * kGatedColumns + column % kGatedColumns;
  if (within >= half) return a.out_features;
  return column < kGatedColumns ? within : half + within;
}

uint32_t load_word(const uint8_t* from) {
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return word;
}

void pack_group(const PackQuantArgs& a, int64_t panel, int64_t group, uint8_t* to) {
  const int64_t groups = quant_groups(a.in_features);
  uint16_t* heads = reinterpret_cast<uint16_t*>(to);
  uint8_t* lines = to + quant_head_bytes(a.format);
  __builtin_memset(to, 0, size_t(quant_group_bytes(a.format)));
  const int64_t first = group * kQuantGroup, left = a.in_features - first;
  const int64_t count = left < kQuantGroup ? left : kQuantGroup;
  for (int64_t c = 0; c < kPanelColumns; ++c) {
    const int64_t n = row_of_column(a, panel, c);
    if (n >= a.out_features) continue;
    heads[c] = a.scales[n * groups + group];
    if (a.minimums != nullptr) heads[kPanelColumns + c] = a.minimums[n * groups + group];
    uint8_t values[kQuantGroup] = {};
    __builtin_memcpy(values, a.values + n * a.stride + first, size_t(count));
    for (int64_t s = 0; s < kWords * a.format.bits / 8; ++s) {
      uint32_t word = load_word(values + s * 4);
      if (a.format.bits == 4) word |= load_word(values + 16 + s * 4) << 4;
      __builtin_memcpy(lines + s * kQuantLine + c * 4, &word, sizeof word);
    }
  }
}

float half_to_float(const uint8_t* from) {
  uint16_t half;
  __builtin_memcpy(&half, from, sizeof half);
  const uint32_t bits = uint32_t(half & 0x7fff) << 13;
  float magnitude;
  __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
  magnitude *= 0x1p112f;  // moves the exponent's bias
  return half & 0x8000 ? -magnitude : magnitude;
}

// One column of a packed group, which is 32 features of one row of the weight.
template <int BITS, bool MINIMUMS>
void read_group(const uint8_t* group, int64_t column, float* out) {
  constexpr QuantFormat kFormat{BITS, MINIMUMS};
  const float scale = half_to_float(group + column * 2);
  const float minimum = MINIMUMS ? half_to_float(group + (kPanelColumns + column) * 2) : 0.0f;
  const uint8_t* line = group + quant_head_bytes(kFormat) + column * 4;
  for (int64_t s = 0; s < kWords * BITS / 8; ++s, line += kQuantLine) {
    for (int64_t i = 0; i < 4; ++i) {
      if (BITS == 8) {
        out[s * 4 + i] = float(line[i]);
      } else {
        out[s * 4 + i] = float(line[i] & 15);
        out[16 + s * 4 + i] = float(line[i] >> 4);
      }
    }
  }
  for (int64_t i = 0; i < kQuantGroup; ++i)
    out[i] = MINIMUMS ? out[i] * scale + minimum : (out[i] - (BITS == 8 ? 128.0f : 8.0f)) * scale;
}

template <int BITS, bool MINIMUMS, typename T>
void embed_rows(const EmbedQuantArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kBytes = quant_group_bytes({BITS, MINIMUMS});
  const int64_t groups = quant_groups(a.dim);
  alignas(64) float values[kQuantGroup];
  for (int64_t token = begin; token < end; ++token) {
    const uint8_t* panel = static_cast<const uint8_t*>(a.packed) + a.ids[token] / kPanelColumns * groups * kBytes;
    T* out = reinterpret_cast<T*>(a.out) + token * a.dim;
    for (int64_t g = 0; g < groups; ++g, panel += kBytes) {
      read_group<BITS, MINIMUMS>(panel, a.ids[token] % kPanelColumns, values);
      for (int64_t i = 0; i < kQuantGroup && g * kQuantGroup + i < a.dim; i += kLanes) {
        const int64_t at = g * kQuantGroup + i;
        store_up_to(out + at, round_to(load(values + i), out) * splat(a.scale), a.dim - at);
      }
    }
  }
}

template <int BITS, bool MINIMUMS>
void embed_types(const EmbedQuantArgs& a, int64_t begin, int64_t end) {
  if (a.type == ElementType::bf16) return embed_rows<BITS, MINIMUMS, uint16_t>(a, begin, end);
  embed_rows<BITS, MINIMUMS, float>(a, begin, end);
}

}  // namespace

void pack_linear_quant(const PackQuantArgs& a, int64_t begin, int64_t end) {
  const int64_t groups = quant_groups(a.in_features), bytes = quant_group_bytes(a.format);
  uint8_t* packed = static_cast<uint8_t*>(a.packed);
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t g = 0; g < groups; ++g) pack_group(a, panel, g, packed + (panel * groups + g) * bytes);
}

void linear_quant(const LinearArgs& args, QuantFormat format, int64_t* next) {
  if (format.bits == 8) return format.minimums ? run_types<8, true>(args, next) : run_types<8, false>(args, next);
  return format.minimums ? run_types<4, true>(args, next) : run_types<4, false>(args, next);
}

void embed_quant(const EmbedQuantArgs& a, int64_t begin, int64_t end) {
  if (a.format.bits == 8) return a.format.minimums ? embed_types<8, true>(a, begin, end) : embed_types<8, false>(a, begin, end);
  return a.format.minimums ? embed_types<4, true>(a, begin, end) : embed_types<4, false>(a, begin, end);
}

}  // namespace pagemill::PAGEMILL_LEVEL
