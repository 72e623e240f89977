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

// Columns of one row outside [begin, end) become -inf, in the tiles that hold such.
inline void hide(float* row, int64_t tile_stride, int64_t num_tiles, int64_t begin, int64_t end) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    float* scores = row + tile * tile_stride;
    const int64_t first = tile * 16;
    if (begin <= first && first + 16 <= end) continue;
    for (int64_t i = 0; i < 16; ++i) {
      if (first + i < begin || first + i >= end) scores[i] = kNegativeInfinity;
    }
  }
}

// The softcap's tanh, of all but -inf.
inline void cap(const AttentionArgs& args, float* scores) {
  const Vec inner = splat(args.scale / args.softcap);
  for (int64_t i = 0; i < 16; i += kLanes) {
    const Vec raw = load(scores + i);
    const Vec capped = tanh(raw * inner);
    store(scores + i, raw == splat(kNegativeInfinity) ? raw : capped);
  }
}

// Scores of R rows and num_tiles tiles become probabilities, in place (tile by tile: what is written lies in front of
// what is still to be read). tops: each row's largest score; sums: what its probabilities add up to.
template <typename T, int R>
inline void exponentials(float* scores, const Grid& grid, int64_t num_tiles, float exponent, const float* tops,
                         float* sums) {
  constexpr int kCount = R * kVecsPerGroup;
  const Vec factor = splat(exponent);
  Vec total[kCount] = {};
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const float* from = scores + tile * grid.score_tile;
    float* to = scores + tile * grid.probability_tile;
    Vec before = {};
#pragma GCC unroll 48
    for (int n = 0; n < kCount; ++n) {
      const Vec score = load(from + n / kVecsPerGroup * grid.score_row + n % kVecsPerGroup * kLanes);
      const Vec x = (score - splat(tops[n / kVecsPerGroup])) * factor;  // exact where it matters: 0 for the largest
      const Vec p = T::is_rough ? exp2_roughly(x) : exp2_nonpositive(x);
      total[n] = total[n] + p;
      put_probabilities<T>(to, grid, n, kCount, before, p);
      before = p;
    }
  }
  for (int r = 0; r < R; ++r) {
    Vec all = total[r * kVecsPerGroup];
    for (int v = 1; v < kVecsPerGroup; ++v) all = all + total[r * kVecsPerGroup + v];
    sums[r] = sum_lanes(all);
  }
}

// Each row's largest score.
template <int R>
inline void maxima(const float* scores, const Grid& grid, int64_t num_tiles, float* tops) {
  Vec high[R];
  for (int r = 0; r < R; ++r) high[r] = splat(kNegativeInfinity);
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const float* from = scores + tile * grid.score_tile;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVecsPerGroup; ++v) high[r] = larger(load(from + r * grid.score_row + v * kLanes), high[r]);
    }
  }
  for (int r = 0; r < R; ++r) tops[r] = largest_lane(high[r]);
}

// Scores of rows [first, first + count), keys from `origin` on, become probabilities, with each row's maximum and sum;
// those of keys that a row does not see, or from `end` on, become 0.
template <typename T>
void softmax(const Item& item, float* scores, int64_t first, int64_t count, int64_t origin, int64_t end,
             int64_t num_tiles, const Results& result) {
  const Grid grid = grid_of<T>(count);
  const float exponent = exponent_factor(item.args);
  for (int64_t row = 0; row < count; ++row) {
    const Row& keys = item.rows[first + row];
    const int64_t from = keys.begin > origin ? keys.begin - origin : 0, to = (keys.end < end ? keys.end : end) - origin;
    float* here = scores + row * grid.score_row;
    if (from > 0 || to < num_tiles * 16) hide(here, grid.score_tile, num_tiles, from, to);
    if (item.args.softcap == 0) continue;
    for (int64_t tile = 0; tile < num_tiles; ++tile) cap(item.args, here + tile * grid.score_tile);
  }
  for (int64_t row = 0; row < count; row += T::max_rows) {
    const int64_t left = count - row < T::max_rows ? count - row : T::max_rows;
    with_rows<T::max_rows>(left, [&]<int R>() {
      float* here = scores + row * grid.score_row;
      float tops[R], shifts[R];
      maxima<R>(here, grid, num_tiles, tops);
      for (int r = 0; r < R; ++r) {
        const Row& keys = item.rows[first + row + r];
        const bool sees = (keys.begin > origin ? keys.begin : origin) < (keys.end < end ? keys.end : end);
        if (sees && tops[r] == kNegativeInfinity) tops[r] = __builtin_nanf("");  // keys and no finite score: broken
        result.maximum[first + row + r] = tops[r];
        shifts[r] = sees ? tops[r] : 0.0f;
      }
      exponentials<T, R>(here, grid, num_tiles, exponent, shifts, result.sum + first + row);
    });
  }
}

// Adds one split's rows to what the splits to its left gave. Lanes past the last row are computed and mean nothing.
void merge(int64_t rows, int64_t value_stride, float factor, const Results& split, const Results& merged) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const Vec right = load(split.maximum + first), left = load(merged.maximum + first);
    const Vec top = right > left ? right : left;
    float lefts[kLanes], rights[kLanes], keeps[kLanes], adds[kLanes];
    store(lefts, left);
    store(rights, right);
    store(keeps, exp2_nonpositive((left - top) * splat(factor)));
    store(adds, exp2_nonpositive((right - top) * splat(factor)));
    for (int64_t row = first; row < rows && row < first + kLanes; ++row) {
      const int64_t lane = row - first;
      if (rights[lane] == kNegativeInfinity) continue;
      const float* from = split.value + row * value_stride;
      float* to = merged.value + row * value_stride;
      if (lefts[lane] == kNegativeInfinity) {
        __builtin_memcpy(to, from, value_stride * 4);
        merged.maximum[row] = rights[lane];
        merged.sum[row] = split.sum[row];
        continue;
      }
      merged.maximum[row] = rights[lane] > lefts[lane] ? rights[lane] : lefts[lane];
      merged.sum[row] = merged.sum[row] * keeps[lane] + split.sum[row] * adds[lane];
      const Vec keep = splat(keeps[lane]), add = splat(adds[lane]);
      for (int64_t d = 0; d < value_stride; d += kLanes) {
        store(to + d, fused(load(from + d), add, load(to + d) * keep));
      }
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
