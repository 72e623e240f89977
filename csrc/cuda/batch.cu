// The tensors of a forward, made on the device from the rows' state: positions, slots, lengths and tokens. With them a
// decode step follows the last one without the host, and can be captured as a graph.
//
// Tiling: prepare_batch takes one block per sequence, which adds up the counts before it (a thousand numbers from L2 are
// quicker than a launch of their own) and writes its own tokens; advance_batch and store_tokens take a thread per
// sequence.
// Floor: a few dozen bytes per token; launch latency is all there is.
#include "cuda/portable.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 128;

// State of every row, on the device.
struct RowState {
  const int32_t* token_ids;     // [num_rows, max_tokens]
  const int32_t* block_tables;  // [num_rows, max_blocks]
  int64_t token_stride, table_stride, block_size;
};

// What a forward reads. Padding is a sequence with a row of -1: its tokens have slot -1 and its length is 0, so it writes
// no key, sees none, and whatever its block table holds (zeros) is not read.
struct BatchTensors {
  int64_t* input_ids;         // [num_tokens]
  int64_t* positions;         // [num_tokens]
  int64_t* slot_mapping;      // [num_tokens]
  int32_t* query_start_loc;   // [num_seqs + 1]
  int32_t* seq_lens;          // [num_seqs]
  int32_t* block_tables;      // [num_seqs, width]
  int64_t* logits_indices;    // [num_seqs]: each sequence's last token
};

PAGEMILL_DEVICE int64_t slot_at(const RowState& state, int64_t row, int64_t position) {
  const uint32_t size = static_cast<uint32_t>(state.block_size), place = static_cast<uint32_t>(position);
  const int64_t block = state.block_tables[row * state.table_stride + place / size];
  return block * size + place % size;
}

__global__ void __launch_bounds__(kThreads)
    prepare(RowState state, const int64_t* rows, const int32_t* computed, const int32_t* counts, int64_t num_seqs,
            int64_t table_width, BatchTensors to) {
  PAGEMILL_SHARED(shared);
  int32_t* sums = reinterpret_cast<int32_t*>(shared);
  const auto thread = static_cast<int64_t>(threadIdx.x);
  const auto seq = static_cast<int64_t>(blockIdx.x);
  int32_t before = 0;
  for (int64_t i = thread; i < seq; i += kThreads) before += counts[i];
  before = warp_sum(before);
  if (lane_id() == 0) sums[warp_id()] = before;
  sync_block();
  int32_t start = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) start += sums[w];
  const int64_t row = rows[seq];
  const int32_t first = computed[seq], count = counts[seq];
  for (int64_t i = thread; i < count; i += kThreads) {
    const int64_t position = row < 0 ? 0 : first + i;
    to.input_ids[start + i] = row < 0 ? 0 : state.token_ids[row * state.token_stride + position];
    to.positions[start + i] = position;
    to.slot_mapping[start + i] = row < 0 ? -1 : slot_at(state, row, position);
  }
  for (int64_t i = thread; i < table_width; i += kThreads)
    to.block_tables[seq * table_width + i] = row < 0 ? 0 : state.block_tables[row * state.table_stride + i];
  if (thread == 0) {
    to.query_start_loc[seq] = start;
    if (seq == num_seqs - 1) to.query_start_loc[num_seqs] = start + count;
    to.seq_lens[seq] = row < 0 ? 0 : first + count;
    to.logits_indices[seq] = start + count - 1;
  }
}

__global__ void __launch_bounds__(kThreads)
    advance(RowState state, const int64_t* rows, const int64_t* drawn, const int32_t* num_seqs, int64_t capacity,
            int32_t* stored_ids, int64_t stored_stride, BatchTensors to) {
  const int64_t seq = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (seq >= capacity) return;
  if (seq >= *num_seqs || rows[seq] < 0) {
    to.input_ids[seq] = 0;
    to.positions[seq] = 0;
    to.slot_mapping[seq] = -1;
    to.seq_lens[seq] = 0;
    return;
  }
  const int64_t row = rows[seq], position = to.seq_lens[seq];
  const int64_t id = drawn[seq] < 0 ? 0 : drawn[seq];  // a failed row is told to the host with its id, and goes on
  stored_ids[row * stored_stride + position] = static_cast<int32_t>(id);
  to.input_ids[seq] = id;
  to.positions[seq] = position;
  to.slot_mapping[seq] = slot_at(state, row, position);
  to.seq_lens[seq] = static_cast<int32_t>(position + 1);
}

__global__ void __launch_bounds__(kThreads) store_ids(int32_t* token_ids, int64_t token_stride, const int64_t* rows,
                                                      const int64_t* positions, const int64_t* drawn, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count || rows[i] < 0) return;
  token_ids[rows[i] * token_stride + positions[i]] = static_cast<int32_t>(drawn[i] < 0 ? 0 : drawn[i]);
}

}  // namespace

// Sequence i computes tokens [computed[i], computed[i] + counts[i]) of row rows[i] (counts at least 1; a negative row:
// padding of counts[i] tokens). Writes all of input_ids, positions, slot_mapping [sum of counts], query_start_loc [num_seqs + 1], seq_lens and logits_indices
// [num_seqs] and block_tables [num_seqs, table_width], the first table_width entries of the rows' tables.
PAGEMILL_EXPORT int pagemill_prepare_batch(const int32_t* token_ids, int64_t token_stride, const int32_t* row_tables,
                                           int64_t table_stride, int64_t block_size, const int64_t* rows,
                                           const int32_t* computed, const int32_t* counts, int64_t num_seqs,
                                           int64_t table_width, int64_t* input_ids, int64_t* positions,
                                           int64_t* slot_mapping, int32_t* query_start_loc, int32_t* seq_lens,
                                           int32_t* block_tables, int64_t* logits_indices, void* stream) {
  if (block_size < 1 || table_width > table_stride) return kInvalidArgument;
  if (num_seqs == 0) return 0;
  const RowState state{token_ids, row_tables, token_stride, table_stride, block_size};
  const BatchTensors to{input_ids, positions, slot_mapping, query_start_loc, seq_lens, block_tables, logits_indices};
  PAGEMILL_LAUNCH(prepare, static_cast<unsigned>(num_seqs), kThreads, kThreads / kWarp * 4, stream)
  (state, rows, computed, counts, num_seqs, table_width, to);
  return launch_status();
}

// One decode step on: sequence i gets drawn[i] as its next token, at position seq_lens[i]. num_seqs lies on the device;
// sequences from there up to `capacity`, and those whose row is negative, become padding. The token is stored in
// token_ids; input_ids, positions, slot_mapping and seq_lens [capacity] are updated in place. The rows' tables already
// hold the block of the new token.
PAGEMILL_EXPORT int pagemill_advance_batch(int32_t* token_ids, int64_t token_stride, const int32_t* row_tables,
                                           int64_t table_stride, int64_t block_size, const int64_t* rows,
                                           const int64_t* drawn, const int32_t* num_seqs, int64_t capacity,
                                           int64_t* input_ids, int64_t* positions, int64_t* slot_mapping,
                                           int32_t* seq_lens, void* stream) {
  if (block_size < 1) return kInvalidArgument;
  if (capacity == 0) return 0;
  const RowState state{token_ids, row_tables, token_stride, table_stride, block_size};
  const BatchTensors to{input_ids, positions, slot_mapping, nullptr, seq_lens, nullptr, nullptr};
  PAGEMILL_LAUNCH(advance, static_cast<unsigned>(ceil_div(capacity, kThreads)), kThreads, 0, stream)
  (state, rows, drawn, num_seqs, capacity, token_ids, token_stride, to);
  return launch_status();
}

// token_ids[rows[i], positions[i]] = drawn[i], or 0 where that is negative; negative rows are skipped.
PAGEMILL_EXPORT int pagemill_store_tokens(int32_t* token_ids, int64_t token_stride, const int64_t* rows,
                                          const int64_t* positions, const int64_t* drawn, int64_t count, void* stream) {
  if (count == 0) return 0;
  PAGEMILL_LAUNCH(store_ids, static_cast<unsigned>(ceil_div(count, kThreads)), kThreads, 0, stream)
  (token_ids, token_stride, rows, positions, drawn, count);
  return launch_status();
}

}  // namespace pagemill::cuda
