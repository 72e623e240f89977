// Element types as plain bits, with their conversions. Kernels compute in float32.
#pragma once

#include <type_traits>

#include "cuda/portable.cuh"

namespace pagemill::cuda {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct Fp8 {  // e4m3: 4 bits of exponent, 3 of mantissa, no infinity, up to 448
  uint8_t bits;
};

// How launchers are told an element type.
enum ElementCode : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat8 = 3 };

// run(T{}) with T of float, Bf16 and F16; an error for any other code.
template <typename Run>
int with_type(int64_t code, const Run& run) {
  switch (code) {
    case kFloat32: return run(float{});
    case kBfloat16: return run(Bf16{});
    case kFloat16: return run(F16{});
    default: return kInvalidArgument;
  }
}

// run(T{}) with T of Bf16 and F16: what the tensor cores multiply.
template <typename Run>
int with_half_type(int64_t code, const Run& run) {
  switch (code) {
    case kBfloat16: return run(Bf16{});
    case kFloat16: return run(F16{});
    default: return kInvalidArgument;
  }
}

// ---- one value ----------------------------------------------------------------------------------------------------

PAGEMILL_DEVICE float to_float(float value) { return value; }

PAGEMILL_DEVICE float to_float(Bf16 value) { return bits_as<float>(static_cast<uint32_t>(value.bits) << 16); }

PAGEMILL_DEVICE float to_float(F16 value) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::float_of_f16(value.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#endif
}

// e4m3 bits moved into a float16's places are the value over 2^8, subnormals included; 0x7f is NaN.
PAGEMILL_DEVICE float to_float(Fp8 value) {
  const uint32_t bits = value.bits;
  const uint32_t half = (bits & 0x80u) << 8 | (bits & 0x7fu) << 7;
  const float scaled = to_float(F16{static_cast<uint16_t>(half)}) * 256.0f;
  return (bits & 0x7fu) == 0x7fu ? bits_as<float>(0x7fffffffu) : scaled;
}

// To the nearest, half to even.
template <typename T>
PAGEMILL_DEVICE T round_to(float value);

template <>
PAGEMILL_DEVICE float round_to<float>(float value) {
  return value;
}

template <>
PAGEMILL_DEVICE Bf16 round_to<Bf16>(float value) {
#ifdef PAGEMILL_EMULATION
  return {::emulation::bf16_of_float(value)};
#else
  Bf16 narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
#endif
}

template <>
PAGEMILL_DEVICE F16 round_to<F16>(float value) {
#ifdef PAGEMILL_EMULATION
  return {::emulation::f16_of_float(value)};
#else
  F16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
#endif
}

// Beyond 448 stays at 448; NaN stays NaN. sm_80 has no instruction for it, so all take this path.
template <>
PAGEMILL_DEVICE Fp8 round_to<Fp8>(float value) {
  const uint32_t bits = bits_as<uint32_t>(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};  // 448 and above
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9; adding 2^14 (unit 2^-9) rounds to them
    const float shifted = bits_as<float>(magnitude) + 16384.0f;
    return {static_cast<uint8_t>(sign | (bits_as<uint32_t>(shifted) - 0x46800000u))};
  }
  const uint32_t even = magnitude >> 20 & 1u;
  const uint32_t rounded = (magnitude + 0x7ffffu + even) >> 20;  // exponent and 3 bits of mantissa
  const uint32_t narrow = rounded - (120u << 3);                 // bias 127 to 7
  return {static_cast<uint8_t>(sign | (narrow > 0x7eu ? 0x7eu : narrow))};
}

// A float as T would keep it.
template <typename T>
PAGEMILL_DEVICE float rounded(float value) {
  return to_float(round_to<T>(value));
}

// ---- two values in a 32-bit register, the first in the low half: what mma takes -----------------------------------

template <typename T>
PAGEMILL_DEVICE uint32_t pack_2(float first, float second);

template <>
PAGEMILL_DEVICE uint32_t pack_2<Bf16>(float first, float second) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::bf16_of_float(first) | static_cast<uint32_t>(::emulation::bf16_of_float(second)) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

template <>
PAGEMILL_DEVICE uint32_t pack_2<F16>(float first, float second) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::f16_of_float(first) | static_cast<uint32_t>(::emulation::f16_of_float(second)) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#endif
}

template <typename T>
PAGEMILL_DEVICE float first_of(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair)});
}
template <typename T>
PAGEMILL_DEVICE float second_of(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair >> 16)});
}

// Two e4m3 (the first in the low byte) as two float16; exact. Chips before 8.9 have no instruction for it: e4m3 bits moved
// into a float16's places are the value over 2^8, and the one NaN is put back afterwards.
PAGEMILL_DEVICE uint32_t halves_of(uint16_t pair) {
#if !defined(PAGEMILL_EMULATION) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
#else
  const uint32_t high = (pair & 0xffu) << 8 | (pair & 0xff00u) << 16;  // in the upper byte of each half
  const uint32_t scaled = (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
  const uint32_t nan = ((high & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
#ifdef PAGEMILL_EMULATION
  const uint32_t halves = pack_2<F16>(first_of<F16>(scaled) * 256.0f, second_of<F16>(scaled) * 256.0f);
#else
  uint32_t halves;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(scaled), "r"(0x5c005c00u));
#endif
  return halves | (nan - (nan >> 5));
#endif
}

// The same as two T (Bf16 or F16).
template <typename T>
PAGEMILL_DEVICE uint32_t widen_2(uint16_t pair) {
  const uint32_t halves = halves_of(pair);
  if constexpr (std::is_same_v<T, F16>) {
    return halves;
  } else {
    return pack_2<T>(first_of<F16>(halves), second_of<F16>(halves));
  }
}

// ---- sixteen bytes of T -------------------------------------------------------------------------------------------

template <typename T>
constexpr int kPerLoad = 16 / static_cast<int>(sizeof(T));

template <typename T>
PAGEMILL_DEVICE void widen_16(Bytes16 bytes, float (&values)[kPerLoad<T>]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = bits_as<float>(bytes.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = first_of<T>(bytes.word[i]);
      values[2 * i + 1] = second_of<T>(bytes.word[i]);
    }
  }
}

template <typename T>
PAGEMILL_DEVICE Bytes16 narrow_16(const float (&values)[kPerLoad<T>]) {
  Bytes16 bytes;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes.word[i] = bits_as<uint32_t>(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes.word[i] = pack_2<T>(values[2 * i], values[2 * i + 1]);
  }
  return bytes;
}

// ---- approximations -----------------------------------------------------------------------------------------------

// 2^x within 2^-22 relative, results below 2^-126 as zero; 2^-infinity is 0.
PAGEMILL_DEVICE float exp2_approx(float x) {
#ifdef PAGEMILL_EMULATION
  return ::emulation::exp2_flushed(x);
#else
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#endif
}

}  // namespace pagemill::cuda
