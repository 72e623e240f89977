// 16 query rows of one warp: their queries, their scores of a tile, and what they have gathered of a split.
//
// A thread holds of rows lane / 4 and lane / 4 + 8 (halves 0 and 1) what mma's layout gives it (tensor_core.cuh).
#pragma once

#include "cuda/attention_stream.cuh"

namespace pagemill::cuda {

template <typename C>
constexpr bool kIsFp8 = std::is_same_v<C, Fp8>;

// ---- queries --------------------------------------------------------------------------------------------------------

// The left operand of scores, per step of 16 dims. Against fp8 keys a thread's dims are 4 t to 4 t + 3 of a step, in the
// order in which one 32-bit word of a key row holds them; a sum over dims does not mind.
template <typename T, typename C, int D>
class Queries {
 public:
  static constexpr bool kInShared = D > 128 || (D > 96 && kIsFp8<C>);  // else in registers
  static constexpr int kSteps = D / 16;
  static constexpr int kSharedBytes = kInShared ? kSteps * kWarp * 16 : 0;  // per warp

  PAGEMILL_DEVICE Queries(const AttentionParams& params, const Row (&rows)[2], unsigned char* shared)
      : shared_(shared) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[half] = read(params, rows[half], step, 0);
        a[half + 2] = read(params, rows[half], step, 1);
      }
      if constexpr (kInShared) {
        store_16(shared_ + (step * kWarp + lane_id()) * 16, Bytes16{{a[0], a[1], a[2], a[3]}});
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) registers_[step][i] = a[i];
      }
    }
  }

  PAGEMILL_DEVICE void get(int step, uint32_t (&a)[4]) const {
    if constexpr (kInShared) {
      const Bytes16 bytes = load_16(shared_ + (step * kWarp + lane_id()) * 16);  // by the thread that wrote them
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = bytes.word[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = registers_[step][i];
    }
  }

 private:
  PAGEMILL_DEVICE static uint32_t read(const AttentionParams& params, const Row& row, int step, int second) {
    const int t = lane_id() % 4, dim = step * 16 + (kIsFp8<C> ? 4 * t + 2 * second : 2 * t + 8 * second);
    if (!row.exists() || dim >= params.key_dim) return 0;
    const T* from = static_cast<const T*>(params.query) + row.token * params.query_token_stride +
                    row.head * params.query_head_stride + dim;
    return *reinterpret_cast<const uint32_t*>(from);
  }

  unsigned char* shared_;
  uint32_t registers_[kInShared ? 1 : kSteps][4];
};

// ---- products of one piece (16 keys) ----------------------------------------------------------------------------------

template <typename T>
PAGEMILL_DEVICE void widen_keys(uint32_t word, uint32_t (&b)[2]) {
  b[0] = widen_2<T>(static_cast<uint16_t>(word));
  b[1] = widen_2<T>(static_cast<uint16_t>(word >> 16));
}

// scores[0]: keys 0 to 7 of the piece, scores[1]: keys 8 to 15.
template <typename T, typename C, int D>
PAGEMILL_DEVICE void score_piece(SharedAddress piece, const Queries<T, C, D>& queries, float (&low)[4],
                                 float (&high)[4]) {
  constexpr int kRowBytes = D * static_cast<int>(sizeof(C)) + 16;
  const int lane = lane_id();
  const SharedAddress mine = piece + ((lane & 7) + lane / 16 * 8) * kRowBytes + (lane / 8 & 1) * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) low[i] = high[i] = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < D * static_cast<int>(sizeof(C)) / 16; chunk += 2) {
    uint32_t words[4], a[4];
    load_matrix(words, mine + chunk * 16);
    if constexpr (kIsFp8<C>) {  // two steps of dims: words 0 and 1 of keys 0 to 7, 2 and 3 of keys 8 to 15
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t b[2];
        queries.get(chunk + step, a);
        widen_keys<T>(words[step], b);
        multiply_add<T>(low, a, b);
        widen_keys<T>(words[step + 2], b);
        multiply_add<T>(high, a, b);
      }
    } else {
      const uint32_t b_low[2] = {words[0], words[1]}, b_high[2] = {words[2], words[3]};
      queries.get(chunk / 2, a);
      multiply_add<T>(low, a, b_low);
      multiply_add<T>(high, a, b_high);
    }
  }
}

// Of two keys by two dims in one word (dims side by side), both keys' first or second dim.
template <typename T>
PAGEMILL_DEVICE uint32_t widen_values(uint32_t word, int second) {
  const uint32_t shifted = second != 0 ? word >> 8 : word;
  return widen_2<T>(static_cast<uint16_t>((shifted & 0xffu) | (shifted >> 8 & 0xff00u)));
}

// sums[j] += probabilities times values. The columns of sums[j] are dims 8 j + 2 t and the next; with fp8 values, those
// of sums[2 j] are dims 16 j + 4 t and 16 j + 4 t + 2, and those of sums[2 j + 1] the ones after them.
template <typename T, typename C, int D>
PAGEMILL_DEVICE void weigh_piece(SharedAddress piece, const uint32_t (&a)[4], float (&sums)[D / 8][4]) {
  constexpr int kRowBytes = D * static_cast<int>(sizeof(C)) + 16;
  const int lane = lane_id();
  const SharedAddress mine = piece + (lane & 15) * kRowBytes + lane / 16 * 16;
#pragma unroll
  for (int chunk = 0; chunk < D * static_cast<int>(sizeof(C)) / 16; chunk += 2) {
    uint32_t words[4];
    load_matrix_transposed(words, mine + chunk * 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kIsFp8<C>) {
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const uint32_t b[2] = {widen_values<T>(words[2 * i], second), widen_values<T>(words[2 * i + 1], second)};
          multiply_add<T>(sums[2 * (chunk + i) + second], a, b);
        }
      } else {
        const uint32_t b[2] = {words[2 * i], words[2 * i + 1]};
        multiply_add<T>(sums[chunk + i], a, b);
      }
    }
  }
}

// ---- what two rows have gathered --------------------------------------------------------------------------------------

template <typename C, int D>
struct Gathered {
  float sums[D / 8][4];  // see weigh_piece
  float top[2];          // largest score
  float total[2];        // of the probabilities; until complete(), of this thread's columns

  PAGEMILL_DEVICE void clear() {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = 0.0f;
    }
    top[0] = top[1] = kNothing;
    total[0] = total[1] = 0.0f;
  }

  PAGEMILL_DEVICE void complete() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = total[half] + shuffle_xor(total[half], 1);
      total[half] = total[half] + shuffle_xor(total[half], 2);
    }
  }

  // visit(dim, first, second): all of a half's sums, for dim and dim + 1.
  template <typename Visit>
  PAGEMILL_DEVICE void each_pair(int half, const Visit& visit) const {
    const int t = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      if constexpr (kIsFp8<C>) {
        visit(8 * j + 4 * t, sums[j][2 * half], sums[j + 1][2 * half]);
        visit(8 * j + 4 * t + 2, sums[j][2 * half + 1], sums[j + 1][2 * half + 1]);
      } else {
        visit(8 * j + 2 * t, sums[j][2 * half], sums[j][2 * half + 1]);
        visit(8 * j + 8 + 2 * t, sums[j + 1][2 * half], sums[j + 1][2 * half + 1]);
      }
    }
  }
};

}  // namespace pagemill::cuda
