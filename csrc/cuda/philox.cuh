// The generator of docs/randomness.md: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), a function of a key and a
// position with no state.
#pragma once

#include "cuda/portable.cuh"

namespace pagemill::cuda {

struct Words4 {
  uint32_t word[4];
};

PAGEMILL_DEVICE Words4 philox(Words4 counter, uint32_t key_0, uint32_t key_1) {
  uint32_t* c = counter.word;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key_0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key_1;
    c[3] = static_cast<uint32_t>(p0);
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return counter;
}

// 53 random bits for the token at `position`.
PAGEMILL_DEVICE uint64_t random_bits(uint64_t key, uint64_t position) {
  const Words4 out = philox({{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0}},
                            static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  return (uint64_t{out.word[0]} << 32 | out.word[1]) >> 11;
}

// floor(bits * total / 2^53) for bits < 2^53 and total < 2^63: the draw's place in [0, total).
PAGEMILL_DEVICE uint64_t place_of(uint64_t bits, uint64_t total) {
  const uint64_t bits_low = bits & 0xffffffffu, bits_high = bits >> 32;
  const uint64_t total_low = total & 0xffffffffu, total_high = total >> 32;
  const uint64_t low = bits_low * total_low;
  const uint64_t middle = bits_high * total_low + (low >> 32);
  const uint64_t other = bits_low * total_high + (middle & 0xffffffffu);
  const uint64_t high = bits_high * total_high + (middle >> 32) + (other >> 32);  // the product's upper 64 bits
  return high << 11 | (other << 32 | (low & 0xffffffffu)) >> 53;
}

}  // namespace pagemill::cuda
