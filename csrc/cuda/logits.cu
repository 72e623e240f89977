// What happens to logits before the draw: a model's factor and cap, penalties, biases and bans, the mask of a grammar; and the counts of tokens
// that penalties need, kept on the device so that a step need not wait for the host.
//
// Tiling: a thread takes one id of one row; rows with nothing to do leave at once. Counts of a row are written by one
// block.
// Floor: penalties read a logit, a count and a bit and write a logit, 12 bytes per id; the mask reads 1 bit per id and
// writes banned logits only. A few operations per id: bandwidth.
#include "cuda/portable.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256, kRowThreads = 1024;

struct Penalties {
  float* logits;  // [rows, vocab], rows `stride` elements apart
  int64_t stride, vocab;
  const int64_t* slots;           // [rows]: which row of counts and prompt_bits; null: its own number
  const int32_t* counts;          // [slots, vocab]: how often the output holds an id
  const uint32_t* prompt_bits;    // [slots, words]: which ids the prompt holds
  const float* presence;          // [rows]
  const float* frequency;         // [rows]
  const float* repetition;        // [rows]
};

PAGEMILL_DEVICE int64_t slot_of(const int64_t* slots, int64_t row) { return slots == nullptr ? row : slots[row]; }

__global__ void __launch_bounds__(kThreads) shape(float* logits, int64_t count, float inner, float softcap) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float value = logits[i] * inner;
  logits[i] = softcap > 0.0f ? tanhf(value) * softcap : value;
}

// As engine/sampling/logits.py, operation by operation.
__global__ void __launch_bounds__(kThreads) penalise(Penalties a) {
  const int64_t row = blockIdx.y, id = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const float presence = a.presence[row], frequency = a.frequency[row], repetition = a.repetition[row];
  if (id >= a.vocab || (presence == 0.0f && frequency == 0.0f && repetition == 1.0f)) return;
  const int64_t slot = slot_of(a.slots, row);
  if (slot < 0) return;
  const int32_t count = a.counts[slot * a.vocab + id];
  const uint32_t word = a.prompt_bits[slot * ceil_div(a.vocab, 32) + id / 32];
  if (count == 0 && (word >> (id % 32) & 1u) == 0) return;
  float* at = a.logits + row * a.stride + id;
  float logit = *at;
  if (repetition != 1.0f) logit = logit > 0.0f ? logit / repetition : logit * repetition;
  if (count > 0) logit = logit - (presence + frequency * static_cast<float>(count));
  *at = logit;
}

__global__ void __launch_bounds__(kThreads)
    add_bias(float* logits, int64_t stride, const int64_t* rows, const int64_t* ids, const float* values, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count && rows[i] >= 0) atomic_add(logits + rows[i] * stride + ids[i], values[i]);
}

__global__ void __launch_bounds__(kThreads) apply_mask(float* logits, int64_t stride, int64_t vocab,
                                                       const uint32_t* mask, int64_t words, const int64_t* mask_rows) {
  const int64_t row = blockIdx.y, id = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t mask_row = slot_of(mask_rows, row);
  if (id >= vocab || mask_row < 0) return;
  const bool allowed = id / 32 < words && (mask[mask_row * words + id / 32] >> (id % 32) & 1u) != 0;
  if (!allowed) logits[row * stride + id] = -__builtin_inff();
}

__global__ void __launch_bounds__(kThreads)
    count_ids(int32_t* counts, int64_t vocab, const int64_t* slots, const int64_t* ids, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows || ids[row] < 0 || slot_of(slots, row) < 0) return;
  atomic_add(counts + slot_of(slots, row) * vocab + ids[row], 1);
}

__global__ void __launch_bounds__(kRowThreads)
    load_row(int32_t* counts, uint32_t* prompt_bits, int64_t vocab, const int64_t* slots, const int32_t* token_ids,
             int64_t token_stride, const int32_t* num_prompt, const int32_t* num_tokens) {
  const int64_t slot = slots[blockIdx.x], words = ceil_div(vocab, 32);
  if (slot < 0) return;
  int32_t* own_counts = counts + slot * vocab;
  uint32_t* own_bits = prompt_bits + slot * words;
  for (int64_t i = threadIdx.x; i < vocab; i += kRowThreads) own_counts[i] = 0;
  for (int64_t i = threadIdx.x; i < words; i += kRowThreads) own_bits[i] = 0;
  sync_block();  // also orders this block's writes to global memory
  const int32_t* ids = token_ids + slot * token_stride;
  const int32_t prompt = num_prompt[blockIdx.x], tokens = num_tokens[blockIdx.x];
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < tokens; i += kRowThreads) {
    if (i < prompt) {
      atomic_or(own_bits + ids[i] / 32, 1u << ids[i] % 32);
    } else {
      atomic_add(own_counts + ids[i], 1);
    }
  }
}

}  // namespace

// logits: [count] float32: scale * logit, or softcap * tanh(scale * logit / softcap) unless softcap is 0.
PAGEMILL_EXPORT int pagemill_shape_logits(float* logits, int64_t count, float scale, float softcap, void* stream) {
  if (count == 0) return 0;
  PAGEMILL_LAUNCH(shape, static_cast<unsigned>(ceil_div(count, kThreads)), kThreads, 0, stream)
  (logits, count, softcap > 0.0f ? scale / softcap : scale, softcap);
  return launch_status();
}

// logits: [rows, vocab] float32, changed in place. slots: [rows], a negative one has no penalties; or null. counts: [slots, vocab] int32 of output ids;
// prompt_bits: [slots, ceil(vocab / 32)], bit id % 32 of word id / 32. Per row: presence, frequency (0: none) of output
// ids, repetition (1: none) of prompt and output ids.
PAGEMILL_EXPORT int pagemill_apply_penalties(float* logits, int64_t rows, int64_t vocab, int64_t stride,
                                             const int64_t* slots, const int32_t* counts, const uint32_t* prompt_bits,
                                             const float* presence, const float* frequency, const float* repetition,
                                             void* stream) {
  if (vocab < 1 || rows > 65535) return kInvalidArgument;
  if (rows == 0) return 0;
  const Penalties penalties{logits, stride, vocab, slots, counts, prompt_bits, presence, frequency, repetition};
  PAGEMILL_LAUNCH(penalise, dim3(static_cast<unsigned>(ceil_div(vocab, kThreads)), static_cast<unsigned>(rows)),
                  kThreads, 0, stream)(penalties);
  return launch_status();
}

// logits[rows[i], ids[i]] += values[i]; -infinity bans. An entry's row and id may repeat; a negative row is skipped.
PAGEMILL_EXPORT int pagemill_add_bias(float* logits, int64_t stride, const int64_t* rows, const int64_t* ids,
                                      const float* values, int64_t count, void* stream) {
  if (count == 0) return 0;
  PAGEMILL_LAUNCH(add_bias, static_cast<unsigned>(ceil_div(count, kThreads)), kThreads, 0, stream)
  (logits, stride, rows, ids, values, count);
  return launch_status();
}

// Ids whose bit (id % 32 of word id / 32) is not set become -infinity. mask: [mask rows, words]; mask_rows: [rows], the
// mask of each row or -1 for none; null: row i has mask i.
PAGEMILL_EXPORT int pagemill_apply_token_bitmask(float* logits, int64_t rows, int64_t vocab, int64_t stride,
                                                 const uint32_t* mask, int64_t words, const int64_t* mask_rows,
                                                 void* stream) {
  if (vocab < 1 || rows > 65535) return kInvalidArgument;
  if (rows == 0) return 0;
  PAGEMILL_LAUNCH(apply_mask, dim3(static_cast<unsigned>(ceil_div(vocab, kThreads)), static_cast<unsigned>(rows)),
                  kThreads, 0, stream)(logits, stride, vocab, mask, words, mask_rows);
  return launch_status();
}

// counts[slots[i], ids[i]] += 1 for drawn ids (a negative id or slot: skip).
PAGEMILL_EXPORT int pagemill_count_tokens(int32_t* counts, int64_t vocab, const int64_t* slots, const int64_t* ids,
                                          int64_t rows, void* stream) {
  if (rows == 0) return 0;
  PAGEMILL_LAUNCH(count_ids, static_cast<unsigned>(ceil_div(rows, kThreads)), kThreads, 0, stream)
  (counts, vocab, slots, ids, rows);
  return launch_status();
}

// Counts and prompt bits of slots[i] anew, from the first num_tokens[i] ids of row slots[i] of token_ids, of which
// num_prompt[i] are the prompt's. Slots are distinct; negative ones are skipped.
PAGEMILL_EXPORT int pagemill_load_counts(int32_t* counts, uint32_t* prompt_bits, int64_t vocab, const int64_t* slots,
                                         const int32_t* token_ids, int64_t token_stride, const int32_t* num_prompt,
                                         const int32_t* num_tokens, int64_t rows, void* stream) {
  if (rows == 0) return 0;
  PAGEMILL_LAUNCH(load_row, static_cast<unsigned>(rows), kRowThreads, 0, stream)
  (counts, prompt_bits, vocab, slots, token_ids, token_stride, num_prompt, num_tokens);
  return launch_status();
}

}  // namespace pagemill::cuda
