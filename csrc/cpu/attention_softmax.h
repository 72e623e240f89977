// A row's scores of one split become probabilities; splits' results are merged; the last division.
#pragma once

#include "cpu/attention_rows.h"
#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
const float kNegativeInfinity = -__builtin_inff();

// What turns a score (or, with a softcap, the tanh of one) into an exponent of two.
inline float exponent_factor(const AttentionArgs& args) {
  return (args.softcap > 0 ? args.softcap : args.scale) * kLog2e;
}

inline float exp2_scalar(float x) { return exp2_nonpositive(splat(x))[0]; }

// Makes scores [0, columns) of one row ready: -inf outside [begin, end), the softcap's tanh. Returns the largest.
inline float prepare_row(const AttentionArgs& args, float* row, int64_t columns, int64_t begin, int64_t end) {
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
  constexpr int64_t kChains = 4;
  Vec high[kChains];
  for (int64_t c = 0; c < kChains; ++c) high[c] = splat(kNegativeInfinity);
  int64_t i = 0;
  for (; i + kChains * kLanes <= columns; i += kChains * kLanes) {
    for (int64_t c = 0; c < kChains; ++c) high[c] = larger(load(row + i + c * kLanes), high[c]);
  }
  for (; i < columns; i += kLanes) high[0] = larger(load(row + i), high[0]);
  const float top = largest_lane(larger(larger(high[0], high[1]), larger(high[2], high[3])));
  return top == kNegativeInfinity ? __builtin_nanf("") : top;  // keys and no finite score: broken, not empty
}

// Prepared scores [0, columns) become probabilities, in place; returns their sum.
template <typename T>
inline float exponentials(float* row, int64_t columns, float top, float exponent) {
  const Vec factor = splat(exponent), shift = splat(top);
  Vec total[16 / kLanes] = {};
  for (int64_t i = 0; i < columns; i += 16) {
    for (int64_t v = 0; v < 16 / kLanes; ++v) {
      const Vec p = exp2_nonpositive((load(row + i + v * kLanes) - shift) * factor);
      total[v] = total[v] + p;
      put_probabilities<T>(row, i + v * kLanes, p);
    }
  }
  for (int64_t v = 1; v < 16 / kLanes; ++v) total[0] = total[0] + total[v];
  return sum_lanes(total[0]);
}

// Scores of keys [origin, origin + columns) become probabilities, with each row's maximum and sum; those of keys that a
// row does not see, or from `end` on, become 0. Two passes over all rows, so that one row's fold hides another's.
template <typename T>
void softmax(const Item& item, int64_t origin, int64_t end, int64_t columns, const Results& result) {
  const float exponent = exponent_factor(item.args);
  for (int64_t row = 0; row < item.num_rows; ++row) {
    const int64_t from = item.rows[row].begin > origin ? item.rows[row].begin - origin : 0;
    const int64_t to = (item.rows[row].end < end ? item.rows[row].end : end) - origin;
    float* scores = item.scores + row * kSplitTokens;
    result.maximum[row] = to > from ? prepare_row(item.args, scores, columns, from, to) : kNegativeInfinity;
  }
  for (int64_t row = 0; row < item.num_rows; ++row) {
    float* scores = item.scores + row * kSplitTokens;
    if (result.maximum[row] == kNegativeInfinity) {
      __builtin_memset(scores, 0, columns * 4);
    } else {
      result.sum[row] = exponentials<T>(scores, columns, result.maximum[row], exponent);
    }
  }
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

// + 0: a zero is positive whoever computed it.
template <typename T>
inline void write_row(const float* value, float factor, bool seen, T* out, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    store_up_to(out + d, seen ? load(value + d) * factor + 0.0f : splat(0.0f), dim - d);
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
    if (args.type == ElementType::f32) {
      write_row(value, factor, seen, reinterpret_cast<float*>(args.out) + item.rows[row].out, args.value_dim);
    } else {
      write_row(value, factor, seen, reinterpret_cast<uint16_t*>(args.out) + item.rows[row].out, args.value_dim);
    }
  }
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
