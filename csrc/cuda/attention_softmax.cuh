// Scores into probabilities tile by tile, the fold of splits, the last division.
//
// Every place where two kernels must agree to the bit is here once, and fuses only where it says fmaf.
#pragma once

#include "cuda/attention_rows.cuh"

namespace pagemill::cuda {

// A NaN never becomes the largest score; it reaches the sums through its own probability.
PAGEMILL_DEVICE float larger(float a, float b) { return b > a ? b : a; }

// The largest score as a number to subtract: nothing minus nothing would be NaN.
PAGEMILL_DEVICE float finite_top(float top) { return top == kNothing ? 0.0f : top; }

// tanh from exp(-2 |x|), within 2e-7.
PAGEMILL_DEVICE float tanh_of(float x) {
  const float size = x < 0 ? -x : x, e = exp2_approx(size * (-2.0f * kLog2e));
  const float far = (1.0f - e) / (1.0f + e);
  const float square = x * x;
  float p = fmaf(square, 62.0f / 2835.0f, -17.0f / 315.0f);
  p = fmaf(p, square, 2.0f / 15.0f);
  p = fmaf(p, square, -1.0f / 3.0f);
  const float near = fmaf(p * square, size, size);
  const float result = size < 0.25f ? near : far;
  return x < 0 ? -result : result;
}

// What this warp's rows see, to skip and to mask.
struct WarpKeys {
  KeyRange any;     // keys that some row sees
  KeyRange all;     // keys that every existing row sees
  KeyRange own[2];  // keys that this thread's rows see

  PAGEMILL_DEVICE WarpKeys(const AttentionParams& params, const Sequence& sequence, int first_row) {
    const int num_rows = sequence.rows(params), row = first_row + lane_id() / 4;
    own[0] = sequence.visible_rows(params, row, row + 1);
    own[1] = sequence.visible_rows(params, row + 8, row + 9);
    any = sequence.visible_rows(params, first_row, first_row + 16);
    if (any.end <= any.begin) any = {0, 0};
    const int last_row = (first_row + 16 < num_rows ? first_row + 16 : num_rows) - 1;
    const KeyRange first = sequence.visible_rows(params, first_row, first_row + 1);
    const KeyRange last = sequence.visible_rows(params, last_row, last_row + 1);
    all = {last.begin, first.end};
  }

  PAGEMILL_DEVICE bool touches(int begin, int end) const { return begin < any.end && end > any.begin; }
};

// Scores of tile `tile`: softcap, then -infinity where a row does not see the key.
PAGEMILL_DEVICE void prepare_scores(float (&scores)[kTileKeys / 8][4], int tile, const WarpKeys& keys,
                                    const Exponent& exponent) {
  const int first = tile * kTileKeys;
  if (exponent.inner > 0) {
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = tanh_of(scores[n][i] * exponent.inner);
    }
  }
  if (first >= keys.all.begin && first + kTileKeys <= keys.all.end) return;
#pragma unroll
  for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + n * 8 + lane_id() % 4 * 2 + (i & 1);
      const KeyRange& range = keys.own[i / 2];
      if (key < range.begin || key >= range.end) scores[n][i] = kNothing;
    }
  }
}

// Prepared scores become probabilities, and what was gathered is scaled to the new largest score.
template <typename C, int D>
PAGEMILL_DEVICE void soften(float (&scores)[kTileKeys / 8][4], Gathered<C, D>& gathered, const Exponent& exponent) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = kNothing;
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) top = larger(top, larger(scores[n][2 * half], scores[n][2 * half + 1]));
    top = larger(top, shuffle_xor(top, 1));
    top = larger(top, shuffle_xor(top, 2));
    top = larger(gathered.top[half], top);
    const float shift = finite_top(top), keep = exp2_approx((gathered.top[half] - shift) * exponent.factor);
    const float offset = -(shift * exponent.factor);
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[n][i] = exp2_approx(fmaf(scores[n][i], exponent.factor, offset));
        total = total + scores[n][i];
      }
    }
    gathered.top[half] = top;
    gathered.total[half] = fmaf(gathered.total[half], keep, total);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      gathered.sums[j][2 * half] = gathered.sums[j][2 * half] * keep;
      gathered.sums[j][2 * half + 1] = gathered.sums[j][2 * half + 1] * keep;
    }
  }
}

// One tile of one warp's rows. The stream yields the tile's slots whether or not the warp needs them.
template <typename T, typename C, int D, int TEAM, int SLOTS>
PAGEMILL_DEVICE void attend_tile(Stream<C, D, TEAM, SLOTS>& stream, int tile, const Queries<T, C, D>& queries,
                                 const WarpKeys& keys, const Exponent& exponent, Gathered<C, D>& gathered) {
  using Tiles = Stream<C, D, TEAM, SLOTS>;
  float scores[kTileKeys / 8][4];
  const int first = tile * kTileKeys;
#pragma unroll
  for (int step = 0; step < Tiles::kSteps; ++step) {
    const SharedAddress slot = stream.next();
#pragma unroll
    for (int i = 0; i < TEAM; ++i) {
      const int piece = step * TEAM + i;
      if (keys.touches(first + piece * kPieceKeys, first + (piece + 1) * kPieceKeys)) {
        score_piece<T, C, D>(slot + i * Tiles::kPieceBytes, queries, scores[2 * piece],
                                scores[2 * piece + 1]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[2 * piece][e] = scores[2 * piece + 1][e] = kNothing;
      }
    }
  }
  const bool wanted = keys.touches(first, first + kTileKeys);
  if (wanted) {
    prepare_scores(scores, tile, keys, exponent);
    soften(scores, gathered, exponent);
  }
#pragma unroll
  for (int step = 0; step < Tiles::kSteps; ++step) {
    const SharedAddress slot = stream.next();
#pragma unroll
    for (int i = 0; i < TEAM; ++i) {
      const int piece = step * TEAM + i;
      if (!keys.touches(first + piece * kPieceKeys, first + (piece + 1) * kPieceKeys)) continue;
      const float(&low)[4] = scores[2 * piece], (&high)[4] = scores[2 * piece + 1];
      const uint32_t a[4] = {pack_2<T>(low[0], low[1]), pack_2<T>(low[2], low[3]), pack_2<T>(high[0], high[1]),
                             pack_2<T>(high[2], high[3])};
      weigh_piece<T, C, D>(slot + i * Tiles::kPieceBytes, a, gathered.sums);
    }
  }
}

// ---- folding splits, from left to right -------------------------------------------------------------------------------

// sum = sum of the left * keep + sum of the right * add, for totals and values alike. A side without keys (largest score
// -infinity, sums 0) leaves the other as it is.
struct Fold {
  float top, keep, add;

  PAGEMILL_DEVICE Fold(float left, float right, const Exponent& exponent) : top(larger(left, right)) {
    const float shift = finite_top(top);
    keep = exp2_approx((left - shift) * exponent.factor);
    add = exp2_approx((right - shift) * exponent.factor);
  }

  PAGEMILL_DEVICE float operator()(float left, float right) const { return fmaf(right, add, left * keep); }
};

// What the folded values of a row are multiplied by: one over the total, the sink's share in it.
PAGEMILL_DEVICE float last_factor(const AttentionParams& params, const Exponent& exponent, int head, int kv_head,
                                  float top, float total) {
  float rescale = 1.0f;
  if (params.sinks != nullptr) {
    const float sink = params.sinks[head] * kLog2e, row = top * exponent.factor, higher = larger(row, sink);
    rescale = exp2_approx(row - higher);
    total = fmaf(total, rescale, exp2_approx(sink - higher));
  }
  return rescale / total * value_scale_of(params, kv_head);
}

// Where a row's output begins.
template <typename T>
PAGEMILL_DEVICE T* out_row(const AttentionParams& params, int token, int head) {
  return static_cast<T*>(params.out) + token * params.out_token_stride + head * params.out_head_stride;
}

// Dims dim and dim + 1 of an output row. + 0: a zero is positive whoever computed it.
template <typename T>
PAGEMILL_DEVICE void write_pair(T* row, int dim, float first, float second) {
  *reinterpret_cast<uint32_t*>(row + dim) = pack_2<T>(first + 0.0f, second + 0.0f);
}

}  // namespace pagemill::cuda
