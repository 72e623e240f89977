// How the decode kernel's work is numbered: every block counts it anew from the lengths on the device, so neither the
// host nor another kernel has to know them, and the grid is a constant.
#pragma once

#include "cuda/attention_params.cuh"

namespace pagemill::cuda {

// What one sequence asks of the decode kernel.
struct DecodeWork {
  int row_tiles;           // of 16 rows; 0: none
  int first_split, num_splits;
  int num_groups;          // of splits, as many as a block has warps; at least 1, as zeros must be written, too
  int partial_rows;        // if the groups go to different blocks: results to keep until all are there

  PAGEMILL_DEVICE DecodeWork(const AttentionParams& params, const Sequence& sequence, int warps) {
    const int rows = sequence.rows(params);
    row_tiles = sequence.is_decode(params) ? ceil_div_int(rows, 16) : 0;
    const KeyRange keys = sequence.visible_rows(params, 0, rows);
    const bool any = row_tiles > 0 && keys.end > keys.begin;
    first_split = any ? keys.begin / kSplitKeys : 0;
    num_splits = any ? ceil_div_int(keys.end, kSplitKeys) - first_split : 0;
    num_groups = num_splits > warps ? ceil_div_int(num_splits, warps) : 1;
    partial_rows = num_groups > 1 ? num_splits * rows : 0;
  }
};

// A unit of work: 16 rows of a sequence and kv head, and either one group of splits or all of them in turn.
struct DecodeItem {
  int sequence, kv_head, row_tile, group;
  int base;  // the sequence's first partial row; -1: all groups in turn, no partial results
};

// Kept in shared memory: per sequence, the items up to and with it, and its base.
class DecodePlan {
 public:
  static constexpr int64_t bytes(int num_seqs) { return int64_t{8} * num_seqs + 8 * kMaxWarps; }

  // By all threads of the block.
  PAGEMILL_DEVICE DecodePlan(const AttentionParams& params, unsigned char* shared)
      : ends_(reinterpret_cast<int*>(shared) + 2 * kMaxWarps), bases_(ends_ + params.num_seqs) {
    int* warp_sums = reinterpret_cast<int*>(shared);
    const int num_seqs = params.num_seqs, threads = static_cast<int>(blockDim.x);
    int items = 0, rows = 0;  // of the sequences before this round
    for (int first = 0; first < num_seqs; first += threads) {
      const int index = first + static_cast<int>(threadIdx.x);
      int my_items = 0, my_rows = 0, groups = 0, tiles = 0;
      if (index < num_seqs) {
        const DecodeWork work(params, Sequence(params, index), num_warps());
        groups = work.num_groups;
        tiles = work.row_tiles;
        my_rows = work.partial_rows;
      }
      int rows_end = my_rows, all_rows = 0, all_items = 0;
      scan(rows_end, all_rows, warp_sums);
      const bool fits = my_rows > 0 && rows + rows_end <= params.capacity;
      my_items = tiles * (fits ? groups : 1);
      int items_end = my_items;
      scan(items_end, all_items, warp_sums);
      if (index < num_seqs) {
        ends_[index] = items + items_end;
        bases_[index] = fits ? rows + rows_end - my_rows : -1;
      }
      items += all_items;
      rows += all_rows;
    }
    num_items_ = items * params.num_kv_heads;
    sync_block();
  }

  PAGEMILL_DEVICE int num_items() const { return num_items_; }
  PAGEMILL_DEVICE int base(int sequence) const { return bases_[sequence]; }

  PAGEMILL_DEVICE DecodeItem item(const AttentionParams& params, int index) const {
    const int flat = index / params.num_kv_heads;
    int low = 0, high = params.num_seqs - 1;  // the first sequence that ends after `flat`
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends_[middle] > flat) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int local = flat - (low > 0 ? ends_[low - 1] : 0);
    const int tiles = ceil_div_int(Sequence(params, low).rows(params), 16);
    return {low, index % params.num_kv_heads, local % tiles, local / tiles, bases_[low]};
  }

 private:
  static constexpr int kMaxWarps = 4;

  // value: its inclusive sum over the block's threads; all: the sum of all of them.
  PAGEMILL_DEVICE static void scan(int& value, int& all, int* warp_sums) {
#pragma unroll
    for (int delta = 1; delta < kWarp; delta *= 2) {
      const int other = shuffle_up(value, delta);
      if (lane_id() >= delta) value += other;
    }
    sync_block();  // the last scan's readers
    if (lane_id() == kWarp - 1) warp_sums[warp_id()] = value;
    sync_block();
    for (int warp = 0; warp < num_warps(); ++warp) {
      if (warp < warp_id()) value += warp_sums[warp];
      all += warp_sums[warp];
    }
  }

  int* ends_;
  int* bases_;
  int num_items_;
};

}  // namespace pagemill::cuda
