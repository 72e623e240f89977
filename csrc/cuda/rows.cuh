// Rows of memory in pieces of 16 bytes: one access each where alignment allows, element by element where not. Which
// elements a piece holds does not depend on that, so the bits of a result do not either.
#pragma once

#include "cuda/numbers.cuh"

namespace pagemill::cuda {

inline bool aligned_16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Whether `count` elements of T make whole pieces, as strides and lengths must for `wide` access.
template <typename T>
bool whole_pieces(int64_t count) {
  return count % kPerLoad<T> == 0;
}

// Elements [start, start + kPerLoad) of a row of `length`; what lies past its end is zero.
template <typename T>
PAGEMILL_DEVICE void load_piece(const T* row, int64_t start, int64_t length, bool wide, float (&values)[kPerLoad<T>]) {
  if (wide) {
    widen_16<T>(load_16(row + start), values);
  } else {
#pragma unroll
    for (int i = 0; i < kPerLoad<T>; ++i) values[i] = start + i < length ? to_float(row[start + i]) : 0.0f;
  }
}

template <typename T>
PAGEMILL_DEVICE void store_piece(T* row, int64_t start, int64_t length, bool wide,
                                 const float (&values)[kPerLoad<T>]) {
  if (wide) {
    store_16(row + start, narrow_16<T>(values));
  } else {
#pragma unroll
    for (int i = 0; i < kPerLoad<T>; ++i)
      if (start + i < length) row[start + i] = round_to<T>(values[i]);
  }
}

}  // namespace pagemill::cuda
