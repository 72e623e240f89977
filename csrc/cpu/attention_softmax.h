// A row's scores of one split become probabilities; splits' results are merged; the last division.
#pragma once

#include "cpu/attention_rows.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
const float kNegativeInfinity = -__builtin_inff();

// What turns a score (or, with a softcap, the tanh of one) into an exponent of two.
inline float exponent_factor(const AttentionArgs& args) {
  return (args.softcap > 0 ? args.softcap : args.scale) * kLog2e;
}

inline float exp2_scalar(float x) { return exp2_nonpositive(splat(x))[0]; }

// Scores [0, columns) of one row become probabilities, in place; those outside [begin, end) become 0.
template <typename T>
void softmax_row(const AttentionArgs& args, float* row, int64_t columns, int64_t begin, int64_t end, float* maximum,
                 float* sum) {
  for (int64_t i = 0; i < begin; ++i) row[i] = kNegativeInfinity;
  for (int64_t i = end; i < columns; ++i) row[i] = kNegativeInfinity;
  if (args.softcap > 0) {
    const Vec inner = splat(args.scale / args.softcap);
    for (int64_t i = begin / kLanes * kLanes; i < end; i += kLanes) {
      const Vec raw = load(row + i);
      const Vec capped = tanh(raw * inner);
      store(row + i, raw == splat(kNegativeInfinity) ? raw : capped);
    }
  }
  Vec high = splat(kNegativeInfinity);
  for (int64_t i = 0; i < columns; i += kLanes) high = larger(load(row + i), high);
  float top = max_lanes(high);
  if (top == kNegativeInfinity) top = __builtin_nanf("");  // a row with keys and no finite score is broken, not empty
  *maximum = top;
  const Vec factor = splat(exponent_factor(args)), shift = splat(top);
  Vec total[16 / kLanes] = {};
  for (int64_t i = 0; i < columns; i += 16) {
    for (int64_t v = 0; v < 16 / kLanes; ++v) {
      const Vec p = exp2_nonpositive((load(row + i + v * kLanes) - shift) * factor);
      total[v] = total[v] + p;
      put_probabilities<T>(row, i + v * kLanes, p);
    }
  }
  for (int64_t v = 1; v < 16 / kLanes; ++v) total[0] = total[0] + total[v];
  *sum = sum_lanes(total[0]);
}

// Adds one split's rows to what the splits to its left gave.
void merge(int64_t rows, int64_t value_stride, float factor, const Results& split, const Results& merged) {
  for (int64_t row = 0; row < rows; ++row) {
    const float right = split.maximum[row], left = merged.maximum[row];
    if (right == kNegativeInfinity) continue;
    const float* from = split.value + row * value_stride;
    float* to = merged.value + row * value_stride;
    if (left == kNegativeInfinity) {
      __builtin_memcpy(to, from, value_stride * 4);
      merged.maximum[row] = right;
      merged.sum[row] = split.sum[row];
      continue;
    }
    const float top = right > left ? right : left;
    const float keep = exp2_scalar((left - top) * factor), add = exp2_scalar((right - top) * factor);
    merged.maximum[row] = top;
    merged.sum[row] = merged.sum[row] * keep + split.sum[row] * add;
    const Vec keeps = splat(keep), adds = splat(add);
    for (int64_t d = 0; d < value_stride; d += kLanes) {
      store(to + d, fused(load(from + d), adds, load(to + d) * keeps));
    }
  }
}

// Divides by the sum (with the sink in it) and writes the output rows; zeros where no key was seen.
void finish(const Item& item, const Results& merged) {
  const AttentionArgs& args = item.args;
  for (int64_t row = 0; row < item.num_rows; ++row) {
    float* value = merged.value + row * item.value_stride;
    float factor = 0.0f;
    const bool seen = merged.maximum[row] != kNegativeInfinity;
    if (seen) {
      float sum = merged.sum[row], rescale = 1.0f;
      if (args.sinks != nullptr) {
        const float sink = args.sinks[item.rows[row].head] * kLog2e;
        const float left = merged.maximum[row] * exponent_factor(args), top = sink > left ? sink : left;
        rescale = exp2_scalar(left - top);
        sum = sum * rescale + exp2_scalar(sink - top);
      }
      factor = rescale / sum;
    }
    const int64_t to = item.rows[row].out;
    for (int64_t d = 0; d < args.value_dim; ++d) {
      const float x = seen ? value[d] * factor + 0.0f : 0.0f;  // + 0: a zero is positive whoever computed it
      if (args.type == ElementType::f32) {
        reinterpret_cast<float*>(args.out)[to + d] = x;
      } else {
        reinterpret_cast<uint16_t*>(args.out)[to + d] = float_to_bf16(x);
      }
    }
  }
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
