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

template <typename T>
void rotate_head(T* head, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const Vec low = load_up_to(head + i, count), high = load_up_to(head + half + i, count);
    const Vec first = rotated(low, load_up_to(cos + i, count), high, load_up_to(sin + i, count), head);
    const Vec second = rotated(high, load_up_to(cos + half + i, count), low, load_up_to(sin + half + i, count), head);
    store_up_to(head + i, first, count);
    store_up_to(head + half + i, second, count);
  }
}

template <typename T>
void rotate_tokens(const RotaryArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = a.positions[token] * a.rotary_dim;
    T* heads = reinterpret_cast<T*>(a.heads) + token * a.token_stride;
    for (int64_t head = 0; head < a.num_heads; ++head) {
      rotate_head(heads + head * a.dim, reinterpret_cast<const T*>(a.cos) + row,
                  reinterpret_cast<const T*>(a.sin) + row, a.rotary_dim / 2);
    }
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
