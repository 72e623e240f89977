// One head of one token in the registers of a warp: RMS norm over the head, rotary position embedding by halves, and
// the way back. What qk_norm, rotary and rope_and_cache share.
//
// A head of `dim` elements is dim / 2 pairs. With half = rotary_dim / 2, pair p < half is elements (p, p + half), which
// are rotated together; the others are neighbours (2 p, 2 p + 1) and pass through. A lane holds pairs 2 lane, 2 lane + 1
// of every 64, so it reads two neighbours at a time.
#pragma once

#include "cuda/numbers.cuh"

namespace pagemill::cuda {

constexpr int64_t kMaxHeadDim = 512;

struct NormWeights {
  const void* weight;  // [dim]; null: no norm
  float eps;
  int64_t variant;  // as in norm.cu
};

struct RotaryTables {
  const void* cos;           // [num_positions, rotary_dim]; null: no rotation
  const void* sin;           // likewise, the first half negated: the sign of the rotation is in the table
  const int64_t* positions;  // [num_tokens]
  int64_t rotary_dim;        // even, at most the head's dim
};

// Two neighbouring elements, in one access if `wide`.
template <typename T>
PAGEMILL_DEVICE void load_two(const T* from, bool wide, float (&values)[2]) {
  if constexpr (sizeof(T) == 2) {
    if (wide) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(from);
      values[0] = first_of<T>(pair);
      values[1] = second_of<T>(pair);
      return;
    }
  }
  values[0] = to_float(from[0]);
  values[1] = to_float(from[1]);
}

template <typename T>
PAGEMILL_DEVICE void store_two(T* to, bool wide, const float (&values)[2]) {
  if constexpr (sizeof(T) == 2) {
    if (wide) {
      *reinterpret_cast<uint32_t*>(to) = pack_2<T>(values[0], values[1]);
      return;
    }
  }
  to[0] = round_to<T>(values[0]);
  to[1] = round_to<T>(values[1]);
}

template <>
PAGEMILL_DEVICE void store_two<Fp8>(Fp8* to, bool, const float (&values)[2]) {
  to[0] = round_to<Fp8>(values[0]);
  to[1] = round_to<Fp8>(values[1]);
}

// STEPS * 64 pairs at most: heads of up to 128, 256 and 512 elements are 1, 2 and 4 steps.
template <typename T, int STEPS>
struct WarpHead {
  float first[STEPS][2], second[STEPS][2];  // of this lane's pairs; zero past the head's end

  // run(step, i, pair, element of first, element of second) for every pair of this lane.
  template <typename Run>
  static PAGEMILL_DEVICE void for_pairs(int64_t dim, int64_t half, const Run& run) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t pair = 2 * (lane_id() + kWarp * step) + i;
        if (pair < dim / 2) run(step, i, pair < half ? pair : 2 * pair, pair < half ? pair + half : 2 * pair + 1);
      }
    }
  }

  // Whether this lane's pairs of `step` are two neighbours in each half.
  static PAGEMILL_DEVICE bool neighbours(int step, int64_t half) { return 2 * (lane_id() + kWarp * step) + 1 < half; }

  PAGEMILL_DEVICE void load(const T* head, int64_t dim, int64_t half, bool wide) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) first[step][0] = first[step][1] = second[step][0] = second[step][1] = 0.0f;
    if (2 * half == dim && dim % 4 == 0) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (!neighbours(step, half)) continue;
        const int64_t at = 2 * (lane_id() + kWarp * step);
        load_two(head + at, wide, first[step]);
        load_two(head + half + at, wide, second[step]);
      }
    } else {
      for_pairs(dim, half, [&](int step, int i, int64_t a, int64_t b) {
        first[step][i] = to_float(head[a]);
        second[step][i] = to_float(head[b]);
      });
    }
  }

  // Values divided by `scale` on their way; To: T, or Fp8.
  template <typename To>
  PAGEMILL_DEVICE void store(To* head, int64_t dim, int64_t half, bool wide, float scale) const {
    if (2 * half == dim && dim % 4 == 0) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (!neighbours(step, half)) continue;
        const int64_t at = 2 * (lane_id() + kWarp * step);
        const float low[2] = {first[step][0] / scale, first[step][1] / scale};
        const float high[2] = {second[step][0] / scale, second[step][1] / scale};
        store_two(head + at, wide, low);
        store_two(head + half + at, wide, high);
      }
    } else {
      for_pairs(dim, half, [&](int step, int i, int64_t a, int64_t b) {
        head[a] = round_to<To>(first[step][i] / scale);
        head[b] = round_to<To>(second[step][i] / scale);
      });
    }
  }

  // All 32 lanes; the order of the sum depends on dim and rotary_dim alone.
  PAGEMILL_DEVICE void norm(const NormWeights& weights, int64_t dim, int64_t half) {
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum = fmaf(first[step][i], first[step][i], sum);
        sum = fmaf(second[step][i], second[step][i], sum);
      }
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(dim) + weights.eps);
    const T* weight = static_cast<const T*>(weights.weight);
    for_pairs(dim, half, [&](int step, int i, int64_t a, int64_t b) {
      first[step][i] = normed(first[step][i] * scale, to_float(weight[a]), weights.variant);
      second[step][i] = normed(second[step][i] * scale, to_float(weight[b]), weights.variant);
    });
  }

  // The two products and their sum are rounded to T one by one, as transformers does. cos, sin: the position's rows.
  PAGEMILL_DEVICE void rotate(const T* cos, const T* sin, int64_t dim, int64_t half) {
    for_pairs(dim, half, [&](int step, int i, int64_t a, int64_t b) {
      if (b != a + half || a >= half) return;
      const float low = first[step][i], high = second[step][i];
      first[step][i] = rounded<T>(rounded<T>(low * to_float(cos[a])) + rounded<T>(high * to_float(sin[a])));
      second[step][i] = rounded<T>(rounded<T>(high * to_float(cos[b])) + rounded<T>(low * to_float(sin[b])));
    });
  }

  static PAGEMILL_DEVICE float normed(float scaled, float weight, int64_t variant) {
    if (variant == 0) return rounded<T>(rounded<T>(scaled) * weight);
    return rounded<T>(scaled * (variant == 1 ? weight + 1.0f : weight));
  }
};

// run(a std::integral_constant of the steps that `dim` needs); an error for heads that are too wide or odd.
template <typename Run>
int with_steps(int64_t dim, const Run& run) {
  if (dim < 2 || dim % 2 != 0) return kInvalidArgument;
  if (dim <= 128) return run(std::integral_constant<int, 1>{});
  if (dim <= 256) return run(std::integral_constant<int, 2>{});
  if (dim <= kMaxHeadDim) return run(std::integral_constant<int, 4>{});
  return kInvalidArgument;
}

// Query and key heads side by side, token by token: what one launch works on.
struct HeadRows {
  void* query;  // [num_tokens, num_query_heads, dim], heads contiguous
  void* key;    // [num_tokens, num_kv_heads, dim], likewise
  int64_t num_tokens, num_query_heads, num_kv_heads, dim;
  int64_t query_token_stride, key_token_stride;  // elements
  NormWeights query_norm, key_norm;
  RotaryTables rotary;
  bool wide;  // two elements at a time
};

// Whether pairs of 2-byte elements can be accessed as one.
inline bool wide_heads(const HeadRows& r) {
  const auto bits = reinterpret_cast<uintptr_t>(r.query) | reinterpret_cast<uintptr_t>(r.key);
  return bits % 4 == 0 && r.query_token_stride % 2 == 0 && r.key_token_stride % 2 == 0 && r.dim % 4 == 0;
}

// Norm and rotation of head `index` (queries first, then keys) of `token`, in place; the head stays in `head`.
template <typename T, int STEPS>
PAGEMILL_DEVICE void process_head(const HeadRows& r, int64_t token, int64_t index, WarpHead<T, STEPS>& head) {
  const bool is_key = index >= r.num_query_heads;
  T* at = is_key ? static_cast<T*>(r.key) + token * r.key_token_stride + (index - r.num_query_heads) * r.dim
                 : static_cast<T*>(r.query) + token * r.query_token_stride + index * r.dim;
  const int64_t half = r.rotary.cos == nullptr ? r.dim / 2 : r.rotary.rotary_dim / 2;
  head.load(at, r.dim, half, r.wide);
  const NormWeights& weights = is_key ? r.key_norm : r.query_norm;
  if (weights.weight != nullptr) head.norm(weights, r.dim, half);
  if (r.rotary.cos != nullptr) {
    const int64_t row = r.rotary.positions[token] * r.rotary.rotary_dim;
    head.rotate(static_cast<const T*>(r.rotary.cos) + row, static_cast<const T*>(r.rotary.sin) + row, r.dim, half);
  }
  head.store(at, r.dim, half, r.wide, 1.0f);
}

}  // namespace pagemill::cuda
