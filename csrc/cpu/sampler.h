// What the sampling kernels take. docs/randomness.md defines the draw to the bit.
#pragma once

#include <cstdint>

namespace pagemill {

struct SampleArgs {
  const float* logits;  // [rows, vocab], rows `stride` elements apart
  int64_t stride, vocab;
  const float* temperature;  // [rows]
  const int32_t* top_k;      // [rows]; <= 0: no limit
  const float* top_p;        // [rows]
  const float* min_p;        // [rows]
  const uint8_t* greedy;     // [rows]
  const int64_t* seed_keys;  // [rows], bits of a uint64
  const int64_t* positions;  // [rows]
  int64_t* ids;              // [rows]; -1: NaN, +inf, or nothing finite
};

struct LogprobArgs {
  const float* logits;  // [rows, vocab], rows `stride` elements apart
  int64_t stride, vocab, num_ids;
  const int64_t* ids;  // [rows, num_ids]
  float* logprobs;     // [rows, num_ids]
};

}  // namespace pagemill
