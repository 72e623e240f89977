// Penalties, biases and the token bitmask on a copy of one row. engine/sampling/reference.py is the same in numpy.
#pragma once

#include "cpu/sampler_row.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

constexpr int32_t kSeen = int32_t(1) << 30;  // above any number of tokens

// The ids of 16 lanes and more whose bits are set in the mask.
PAGEMILL_INLINE Mask allowed(const int32_t* words, int64_t first) {
  const uint32_t bits = uint32_t(words[first / 32]) >> (first % 32);
#if defined(__AVX512F__)
  return Mask(bits);
#else
  IntVec chosen;
  for (int64_t i = 0; i < kLanes; ++i) chosen[i] = -int32_t(bits >> i & 1);
  return chosen;
#endif
}

// The row, and -inf where the mask (null: none) has no bit. An id past the mask's words has none.
inline void copy_allowed(const float* from, float* to, int64_t vocab, const int32_t* words, int64_t num_words) {
  const Vec banned = splat(-kInfinity);
  for (int64_t i = 0; i < vocab; i += kLanes) {
    Vec v = load_up_to(from + i, vocab - i);
    if (words != nullptr) v = i / 32 < num_words ? choose(allowed(words, i), v, banned) : banned;
    store_up_to(to + i, v, vocab - i);
  }
}

inline bool are_ids(const int32_t* ids, int64_t begin, int64_t end, int64_t vocab) {
  int32_t least = 0, most = 0;
  for (int64_t i = begin; i < end; ++i) {
    least = ids[i] < least ? ids[i] : least;
    most = ids[i] > most ? ids[i] : most;
  }
  return least >= 0 && most < vocab;
}

// counts: [vocab], zeros before and after.
inline void penalise(const LogitEdits& edits, int64_t r, float* logits, int32_t* counts) {
  const float* penalty = edits.penalties + r * 3;
  const int64_t begin = edits.token_starts[r], end = edits.token_starts[r + 1];
  const int64_t output = edits.output_starts[r];
  for (int64_t i = begin; i < end; ++i) {
    const int32_t id = edits.token_ids[i];
    if (counts[id] == 0 && penalty[0] != 1.0f) {
      logits[id] = logits[id] > 0 ? logits[id] / penalty[0] : logits[id] * penalty[0];
    }
    counts[id] = (counts[id] + (i >= output)) | kSeen;
  }
  for (int64_t i = output; i < end; ++i) {
    const int32_t id = edits.token_ids[i];
    const int32_t times = counts[id] & ~kSeen;
    if (times != 0) logits[id] -= penalty[1] + penalty[2] * float(times);
    counts[id] = kSeen;
  }
  for (int64_t i = begin; i < end; ++i) counts[edits.token_ids[i]] = 0;
}

inline bool has_penalty(const LogitEdits& edits, int64_t r) {
  return edits.penalties != nullptr && edits.token_starts[r] < edits.token_starts[r + 1];
}

inline bool has_bias(const LogitEdits& edits, int64_t r) {
  return edits.bias_starts != nullptr && edits.bias_starts[r] < edits.bias_starts[r + 1];
}

inline const int32_t* mask_of(const LogitEdits& edits, int64_t r) {
  if (edits.mask_of == nullptr || edits.mask_of[r] < 0) return nullptr;
  return edits.masks + edits.mask_of[r] * edits.mask_words;
}

inline bool is_edited(const LogitEdits& edits, int64_t r) {
  return has_penalty(edits, r) || has_bias(edits, r) || mask_of(edits, r) != nullptr;
}

// The edited row in `to`. False if an edit names an id outside the vocabulary.
inline bool edit(const LogitEdits& edits, int64_t r, const float* from, float* to, int64_t vocab, int32_t* counts) {
  copy_allowed(from, to, vocab, mask_of(edits, r), edits.mask_words);
  if (has_penalty(edits, r)) {
    if (!are_ids(edits.token_ids, edits.token_starts[r], edits.token_starts[r + 1], vocab)) return false;
    penalise(edits, r, to, counts);
  }
  if (has_bias(edits, r)) {
    const int64_t begin = edits.bias_starts[r], end = edits.bias_starts[r + 1];
    if (!are_ids(edits.bias_ids, begin, end, vocab)) return false;
    for (int64_t i = begin; i < end; ++i) to[edits.bias_ids[i]] += edits.bias_values[i];
  }
  return true;
}

}  // namespace
}  // namespace pagemill::PAGEMILL_LEVEL
