// Shuffles, ballots, and conversions that the host's compiler may lack.
#include "tests/emulation/machine.h"

namespace emulation {
namespace {

struct Exchange {
  uint64_t bits;
  int lane;
  uint64_t result;
};

void finish_shuffle(void** lanes) {
  for (int i = 0; i < kLanes; ++i) {
    auto* exchange = static_cast<Exchange*>(lanes[i]);
    exchange->result = static_cast<const Exchange*>(lanes[exchange->lane])->bits;
  }
}

struct Vote {
  bool condition;
  uint32_t result;
};

void finish_ballot(void** lanes) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(static_cast<const Vote*>(lanes[i])->condition) << i;
  for (int i = 0; i < kLanes; ++i) static_cast<Vote*>(lanes[i])->result = bits;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

uint64_t shuffle_bits(uint64_t bits, int lane, const char* name) {
  Exchange exchange{bits, lane, 0};
  meet_warp(name, &exchange, &finish_shuffle);
  return exchange.result;
}

uint32_t ballot(bool condition) {
  Vote vote{condition, 0};
  meet_warp("ballot", &vote, &finish_ballot);
  return vote.result;
}

void sync_warp() {
  meet_warp("sync_warp", nullptr, [](void**) {});
}

float float_of_f16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  const float scaled = float_of(magnitude << 13) * 0x1p112f;  // moves the exponent's bias; exact, subnormals too
  return float_of(sign | bits_of(scaled));
}

uint16_t f16_of_float(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // rounds past 65504
  if (magnitude < 0x38800000u) {                                 // below 2^-14: multiples of 2^-24, the unit of 0.5
    const float shifted = float_of(magnitude) + 0.5f;
    return uint16_t(sign | (bits_of(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((rounded >> 13) - (112u << 10)));
}

uint16_t bf16_of_float(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000u) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulation
