// Cuts a ragged batch into work and runs it piece by piece; knows neither torch, nor threads, nor instruction sets.
//
// A plan depends on the batch (query_start, seq_lens, block_tables), on how a layer looks back (window, chunk, causal)
// and on its shape (heads, dims), not on what the layer holds: one plan per step serves all layers that agree on these,
// one layer after the other, as they share the plan's memory for partial results.
//
//   plan.make(args, num_seqs, num_threads, alone_below);    once per step and kind of layer
//   per layer, the layer's pointers in args:
//     run_piece(table, args, i, scratch)  for i < count_pieces(), in any order, from any threads
//     (all pieces done)                   nothing to wait for if count_pieces() is 0
//     run_merge(table, args, i, scratch)  for i < count_merges(), likewise
//
// Every thread brings scratch of scratch_bytes(), 64-byte aligned. How the work is cut changes no bit of the output.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"

namespace pagemill {

class AttentionPlan {
 public:
  // Reads of `args` everything but query, out, caches, sinks, strides (table_stride excepted), scale, softcap and type.
  // At least num_threads threads are kept busy if there is work for them; a batch of less than `alone_below`
  // multiply-adds is cut for one. Keeps its memory for the next step. Throws std::bad_alloc.
  void make(const AttentionArgs& args, int64_t num_seqs, int64_t num_threads, int64_t alone_below);

  int64_t count_pieces() const { return static_cast<int64_t>(pieces_.size()) * num_kv_heads_; }
  int64_t count_merges() const { return static_cast<int64_t>(tiles_.size()) * num_kv_heads_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  int64_t piece_work() const { return piece_work_; }  // multiply-adds, with what reading the keys costs
  int64_t merge_work() const { return merge_work_; }

  // `args` as given to make, for one layer.
  void run_piece(const KernelTable& table, const AttentionArgs& args, int64_t index, char* scratch) const;
  void run_merge(const KernelTable& table, const AttentionArgs& args, int64_t index, char* scratch) const;

 private:
  struct Tile {
    QueryTile queries;
    int32_t rows;
    int32_t split_begin, split_end;  // that hold a key of any row
    int32_t whole_begin, whole_end;  // all of whose keys every row sees
    int32_t parts_end;               // splits before it are computed by pieces
    int64_t first_part;              // in parts_
  };
  struct Piece {
    int32_t first_tile, num_tiles;  // in piece_tiles_
    int32_t split;
    int64_t partial;  // floats from the kv head's first
  };
  struct Shared {  // a split that several tiles read at once
    int32_t split, first_tile, num_tiles;  // in shared_tiles_
  };
  struct Reader {
    int32_t block, tile;  // the split's first block
  };
  struct Aligned {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };

  void make_tiles(const AttentionArgs& args, int64_t num_seqs);
  void find_shared(const AttentionArgs& args);
  void keep_sharing(const AttentionArgs& args, int32_t split, std::vector<Reader>& readers);
  void share(const AttentionArgs& args, int32_t split, const Reader* readers, size_t count);
  void cut_by_split(const AttentionArgs& args);
  void make_pieces(const AttentionArgs& args);
  void add_piece(const AttentionArgs& args, int32_t split, const int32_t* tiles, int64_t num_tiles);
  void size_up(const AttentionArgs& args);

  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
  std::vector<QueryTile> piece_tiles_;
  std::vector<PartialRows> parts_;
  std::vector<Shared> shared_;
  std::vector<int32_t> shared_tiles_;
  std::unique_ptr<float[], Aligned> partials_;
  int64_t partials_size_ = 0;  // floats
  int64_t shared_floats_ = 0;  // per kv head
  int64_t head_floats_ = 0;    // of partials, per kv head
  int64_t num_kv_heads_ = 0, scratch_bytes_ = 0, piece_work_ = 0, merge_work_ = 0;
};

// How loops run: body(begin, end, context) over disjoint ranges of [0, count), from up to num_threads threads.
struct Threads {
  int64_t num_threads;
  int64_t alone_below;  // multiply-adds: less is done by the calling thread before a second one is awake
  void (*parallel)(int64_t count, void (*body)(int64_t, int64_t, void*), void* context);
};

// Makes a plan and runs it, for one layer.
void run_attention(const KernelTable& table, const AttentionArgs& args, int64_t num_seqs, const Threads& threads);

}  // namespace pagemill
