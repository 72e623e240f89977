// Why a kernel of its own: new K/V rows arrive token by token, the cache is laid out for reading (see cache.h), so
// this is a transpose by pairs. It touches one tile per token and head, which is small beside reading the context.
#include "cpu/kernels.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

template <typename Word>
void write_rows(const CacheWrite& args, int64_t token, int64_t slot) {
  constexpr int64_t pair = sizeof(Word) == 2 ? 2 : 1;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  const int64_t tile = offset / kTileTokens, lane = offset % kTileTokens;
  const int64_t key_dim = args.key_dim, value_dim = args.value_dim;
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    const Word* key =
        reinterpret_cast<const Word*>(args.key) + token * args.key_token_stride + head * args.key_head_stride;
    Word* key_tile = reinterpret_cast<Word*>(args.key_cache) + block * args.key_block_stride +
                     (head * args.block_size + tile * kTileTokens) * key_dim + lane * pair;
    for (int64_t d = 0; d < key_dim; d += pair) {
      __builtin_memcpy(key_tile + d * kTileTokens, key + d, sizeof(Word) * pair);
    }
    const Word* value =
        reinterpret_cast<const Word*>(args.value) + token * args.value_token_stride + head * args.value_head_stride;
    Word* value_tile = reinterpret_cast<Word*>(args.value_cache) + block * args.value_block_stride +
                       (head * args.block_size + tile * kTileTokens) * value_dim +
                       (lane / pair) * value_dim * pair + lane % pair;
    for (int64_t d = 0; d < value_dim; ++d) value_tile[d * pair] = value[d];
  }
}

}  // namespace

void write_cache(const CacheWrite& args, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) continue;
    if (args.type == ElementType::bf16) {
      write_rows<uint16_t>(args, token, slot);
    } else {
      write_rows<uint32_t>(args, token, slot);
    }
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
