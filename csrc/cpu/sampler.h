// What the sampling kernels take. docs/randomness.md defines the draw to the bit.
#pragma once

#include <cstdint>

namespace pagemill {

// How rows of logits are changed before the draw. Parts that are not there are null.
struct LogitEdits {
  const float* penalties = nullptr;  // [rows, 3]: repetition, presence, frequency; 1, 0, 0: none
  const int32_t* token_ids = nullptr;  // of all rows, one after the other
  const int64_t* token_starts = nullptr;  // [rows + 1]
  const int64_t* output_starts = nullptr;  // [rows]: where the prompt among them ends
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  const int64_t* bias_starts = nullptr;  // [rows + 1]
  const int32_t* masks = nullptr;  // [masks, mask_words], a bit per id that may follow
  int64_t mask_words = 0;
  const int64_t* mask_of = nullptr;  // [rows]; -1: no mask
};

struct SampleArgs {
  const float* logits;  // [logit rows, vocab], rows `stride` elements apart
  int64_t stride, vocab;
  const float* temperature;  // [rows]
  const int32_t* top_k;      // [rows]; <= 0: no limit
  const float* top_p;        // [rows]
  const float* min_p;        // [rows]
  const uint8_t* greedy;     // [rows]
  const int64_t* seed_keys;  // [rows], bits of a uint64
  const int64_t* positions;  // [rows]
  int64_t* ids;              // [rows]; -1: NaN, +inf, or nothing finite; -2: an edit names an id that is not there
  const int64_t* source = nullptr;  // [rows]: the logit row; null: the row's own number
  LogitEdits edits{};
  float* drawn = nullptr;  // [., vocab]: what rows were drawn from
  const int64_t* drawn_at = nullptr;  // [rows]; -1: not wanted
};

struct LogprobArgs {
  const float* logits;  // [logit rows, vocab], rows `stride` elements apart
  int64_t stride, vocab, num_ids, num_top;
  const int64_t* ids;     // [rows, num_ids]
  const int64_t* source;  // [rows]: the logit row; null: the row's own number
  float* logprobs;        // [rows, num_ids]
  int64_t* top_ids;       // [rows, num_top]
  float* top_logprobs;    // [rows, num_top]
  int32_t* ranks;         // [rows], of the first of ids; null: not wanted
};

}  // namespace pagemill
