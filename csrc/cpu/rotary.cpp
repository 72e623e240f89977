// Rotary position embedding (Su et al. 2021) by halves, and rows of an embedding table.
//
// The two products and their sum are rounded to the type one by one, as transformers does. A pair of elements
// depends on nothing but itself and its position's row of the tables.
#include "cpu/kernels.h"
#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

template <typename T>
PAGEMILL_INLINE Vec rotated(Vec x, Vec cos, Vec other, Vec sin, const T* type) {
  return round_to(x * cos, type) + round_to(other * sin, type);
}

// All heads of one token, a vector of every half at a time: the token's cosines and sines are read once.
template <typename T>
void rotate_token(const RotaryArgs& a, T* heads, const T* cos, const T* sin) {
  const int64_t half = a.rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Vec low_cos = load_up_to(cos + i, count), low_sin = load_up_to(sin + i, count);
    const Vec high_cos = load_up_to(cos + half + i, count), high_sin = load_up_to(sin + half + i, count);
    T* head = heads + i;
    for (int64_t h = 0; h < a.num_heads; ++h, head += a.dim) {
      const Vec low = load_up_to(head, count), high = load_up_to(head + half, count);
      store_up_to(head, rotated(low, low_cos, high, low_sin, head), count);
      store_up_to(head + half, rotated(high, high_cos, low, high_sin, head), count);
    }
  }
}

template <typename T>
void rotate_tokens(const RotaryArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = a.positions[token] * a.rotary_dim;
    rotate_token(a, reinterpret_cast<T*>(a.heads) + token * a.token_stride, reinterpret_cast<const T*>(a.cos) + row,
                 reinterpret_cast<const T*>(a.sin) + row);
  }
}

template <typename T>
void embed_tokens(const EmbedArgs& a, int64_t begin, int64_t end) {
  const Vec scale = splat(a.scale);
  for (int64_t token = begin; token < end; ++token) {
    const T* from = reinterpret_cast<const T*>(a.table) + a.ids[token] * a.dim;
    float* to = a.out + token * a.dim;
    for (int64_t i = 0; i < a.dim; i += kLanes) store_up_to(to + i, load_up_to(from + i, a.dim - i) * scale, a.dim - i);
  }
}

}  // namespace

void rotate(const RotaryArgs& args, int64_t token_begin, int64_t token_end) {
  if (args.type == ElementType::bf16) {
    rotate_tokens<uint16_t>(args, token_begin, token_end);
  } else {
    rotate_tokens<float>(args, token_begin, token_end);
  }
}

void embed(const EmbedArgs& args, int64_t token_begin, int64_t token_end) {
  if (args.type == ElementType::bf16) {
    embed_tokens<uint16_t>(args, token_begin, token_end);
  } else {
    embed_tokens<float>(args, token_begin, token_end);
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
