// The generator of docs/randomness.md: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011), a function of a key and
// a position with no state. engine/sampling/philox.py is the same in Python.
#pragma once

#include <cstdint>

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// 53 random bits for the token at `position`.
inline uint64_t random_bits(uint64_t key, uint64_t position) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (uint64_t(c0) << 32 | c1) >> 11;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
