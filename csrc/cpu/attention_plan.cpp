// Work is cut into tiles of queries of one sequence, times kv heads. A tile walks its splits from left to right. Splits
// are computed apart, as pieces, where that is better: when several sequences share them, so that their keys are read
// once for all, and when there are too few tiles to keep the threads busy (one long decode). The merge that a tile's
// walk does split by split takes the pieces' results instead, to the same bits.
#include "cpu/attention_plan.h"

#include "cpu/scratch.h"

#include <algorithm>
#include <atomic>

namespace pagemill {
namespace {

constexpr int64_t kItemRows = 48;        // rows that share one pass over the keys
constexpr int64_t kTilesPerThread = 4;   // below this, tiles are cut by split
constexpr int64_t kMaxPartialBytes = int64_t(64) << 20;  // above this they are not: the results are the same

int64_t split_floats(int64_t rows, const AttentionArgs& args) {
  return padded_rows(rows) * partial_floats(args.value_dim);
}

// Multiply-adds of one split for so many rows of every kv head. 6: rows whose work takes as long as reading the keys.
int64_t split_work(int64_t rows, const AttentionArgs& args) {
  return (rows + 6) * kSplitTokens * (args.key_dim + args.value_dim) * args.num_kv_heads;
}

// Calls work(index, scratch) for every index, in order of the shared counter; one scratch per thread.
template <typename Work>
void drain(const Threads& threads, int64_t work_size, int64_t count, int64_t scratch_bytes, const Work& work) {
  struct Context {
    const Work* work;
    int64_t count, scratch_bytes;
    std::atomic<int64_t> next{0};
  } context{&work, count, scratch_bytes};
  if (count == 0) return;
  const int64_t workers = work_size < threads.alone_below ? 1 : std::min(threads.num_threads, count);
  threads.parallel(workers, [](int64_t, int64_t, void* pointer) {
    Context& shared = *static_cast<Context*>(pointer);
    char* scratch = static_cast<char*>(thread_scratch(shared.scratch_bytes));
    for (int64_t i = shared.next++; i < shared.count; i = shared.next++) (*shared.work)(i, scratch);
  }, &context);
}

}  // namespace

void AttentionPlan::make(const AttentionArgs& args, int64_t num_seqs, int64_t num_threads, int64_t alone_below) {
  num_kv_heads_ = args.num_kv_heads;
  head_floats_ = shared_floats_ = 0;
  pieces_.clear();
  piece_tiles_.clear();
  shared_.clear();
  shared_tiles_.clear();
  make_tiles(args, num_seqs);
  find_shared(args);
  int64_t work = 0;
  for (const Tile& tile : tiles_) work += (tile.split_end - tile.split_begin) * split_work(tile.rows, args);
  const bool few = count_merges() < kTilesPerThread * num_threads;
  if (num_threads > 1 && work >= alone_below && few) cut_by_split(args);
  make_pieces(args);
  size_up(args);
}

void AttentionPlan::make_tiles(const AttentionArgs& args, int64_t num_seqs) {
  const int64_t per_tile = std::max<int64_t>(1, kItemRows / args.group);
  const auto int32 = [](int64_t x) { return static_cast<int32_t>(x); };
  tiles_.clear();
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t queries = args.query_start[seq + 1] - args.query_start[seq], seq_len = args.seq_lens[seq];
    // Late queries see more keys: they go first, so that the threads end together.
    for (int64_t index = (queries + per_tile - 1) / per_tile - 1; index >= 0; --index) {
      const int64_t begin = index * per_tile, end = std::min(queries, begin + per_tile);
      const KeyRange first = visible_keys(args, seq_len - queries + begin, seq_len);
      const KeyRange last = visible_keys(args, seq_len - queries + end - 1, seq_len);
      Tile tile{};
      tile.queries = {int32(seq), int32(begin), int32(end)};
      tile.rows = int32((end - begin) * args.group);
      tile.split_begin = int32(first.begin / kSplitTokens);
      tile.split_end = int32((std::max<int64_t>(last.end, 0) + kSplitTokens - 1) / kSplitTokens);
      tile.whole_begin = int32((last.begin + kSplitTokens - 1) / kSplitTokens);
      tile.whole_end = int32(std::max<int64_t>(first.end, 0) / kSplitTokens);
      tile.parts_end = tile.split_begin;
      tiles_.push_back(tile);
    }
  }
}

// Finds splits that several tiles read: their block tables agree on all of it. As a rule sequences share from their
// first key on, so a tile takes part from its first whole split for as long as another still reads the same.
void AttentionPlan::find_shared(const AttentionArgs& args) {
  std::vector<int32_t> order;
  for (size_t i = 0; i < tiles_.size(); ++i) {
    const Tile& tile = tiles_[i];
    const bool small = tile.rows * 2 <= kItemRows;  // larger ones use the keys well by themselves
    if (small && tile.whole_begin < tile.whole_end) order.push_back(static_cast<int32_t>(i));
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return tiles_[a].whole_begin < tiles_[b].whole_begin; });
  std::vector<Reader> readers;
  size_t waiting = 0;
  for (int32_t split = 0; waiting < order.size() || !readers.empty(); ++split) {
    if (readers.empty()) split = tiles_[order[waiting]].whole_begin;
    if (shared_floats_ * args.num_kv_heads * 4 > kMaxPartialBytes) return;
    const auto ended = [&](const Reader& reader) { return tiles_[reader.tile].whole_end <= split; };
    readers.erase(std::remove_if(readers.begin(), readers.end(), ended), readers.end());
    for (; waiting < order.size() && tiles_[order[waiting]].whole_begin == split; ++waiting) {
      readers.push_back({0, order[waiting]});
    }
    keep_sharing(args, split, readers);
  }
}

// Shares `split` among those readers that agree on it and leaves only them.
void AttentionPlan::keep_sharing(const AttentionArgs& args, int32_t split, std::vector<Reader>& readers) {
  const int64_t first = split * kSplitTokens / args.block_size;
  const int64_t count = ((split + 1) * kSplitTokens - 1) / args.block_size + 1 - first;
  const auto blocks = [&](int32_t tile) {
    return args.block_tables + tiles_[tile].queries.seq * args.table_stride + first;
  };
  for (Reader& reader : readers) reader.block = *blocks(reader.tile);
  std::sort(readers.begin(), readers.end(), [](const Reader& a, const Reader& b) {
    return a.block != b.block ? a.block < b.block : a.tile < b.tile;
  });
  size_t kept = 0;
  for (size_t begin = 0, end; begin < readers.size(); begin = end) {
    const int32_t* wanted = blocks(readers[begin].tile);
    for (end = begin + 1; end < readers.size() && readers[end].block == readers[begin].block; ++end) {
      if (!std::equal(wanted, wanted + count, blocks(readers[end].tile))) break;
    }
    if (end - begin < 2) continue;
    share(args, split, &readers[begin], end - begin);
    for (size_t i = begin; i < end; ++i) readers[kept++] = readers[i];
  }
  readers.resize(kept);
}

// Cuts readers of one split into groups of about the same number of rows, at most kItemRows.
void AttentionPlan::share(const AttentionArgs& args, int32_t split, const Reader* readers, size_t count) {
  int64_t total = 0, rows = 0;
  for (size_t i = 0; i < count; ++i) total += tiles_[readers[i].tile].rows;
  const int64_t groups = (total + kItemRows - 1) / kItemRows, enough = (total + groups - 1) / groups;
  for (size_t i = 0; i < count; ++i) {
    Tile& tile = tiles_[readers[i].tile];
    if (i == 0 || rows >= enough || rows + tile.rows > kItemRows) {
      shared_floats_ += split_floats(rows, args);
      shared_.push_back({split, static_cast<int32_t>(shared_tiles_.size()), 0});
      rows = 0;
    }
    shared_tiles_.push_back(readers[i].tile);
    ++shared_.back().num_tiles;
    rows += tile.rows;
    tile.parts_end = split + 1;
  }
  shared_floats_ += split_floats(rows, args);
}

void AttentionPlan::cut_by_split(const AttentionArgs& args) {
  int64_t floats = shared_floats_;
  for (const Tile& tile : tiles_) floats += (tile.split_end - tile.split_begin) * split_floats(tile.rows, args);
  if (floats * args.num_kv_heads * 4 > kMaxPartialBytes) return;
  for (Tile& tile : tiles_) {
    if (tile.split_end - tile.split_begin > 1) tile.parts_end = tile.split_end;
  }
}

// A piece for every shared split, and for what else lies before a tile's parts_end.
void AttentionPlan::make_pieces(const AttentionArgs& args) {
  constexpr PartialRows kNone{-1, -1, -1};
  int64_t parts = 0;
  for (Tile& tile : tiles_) {
    tile.first_part = parts;
    parts += tile.parts_end - tile.split_begin;
  }
  parts_.assign(parts, kNone);
  for (const Shared& shared : shared_) {
    add_piece(args, shared.split, &shared_tiles_[shared.first_tile], shared.num_tiles);
  }
  for (size_t i = 0; i < tiles_.size(); ++i) {
    const Tile& tile = tiles_[i];
    const int32_t index = static_cast<int32_t>(i);
    for (int32_t split = tile.split_begin; split < tile.parts_end; ++split) {
      if (parts_[tile.first_part + split - tile.split_begin].value < 0) add_piece(args, split, &index, 1);
    }
  }
}

// A piece for `split` of `tiles`, whose parts must have their places in parts_.
void AttentionPlan::add_piece(const AttentionArgs& args, int32_t split, const int32_t* tiles, int64_t num_tiles) {
  Piece piece{static_cast<int32_t>(piece_tiles_.size()), static_cast<int32_t>(num_tiles), split, head_floats_};
  int64_t rows = 0, row = 0;
  for (int64_t i = 0; i < num_tiles; ++i) rows += tiles_[tiles[i]].rows;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const Tile& tile = tiles_[tiles[i]];
    const PartialRows at = partial_rows(row, rows, args.value_dim);
    parts_[tile.first_part + split - tile.split_begin] = {piece.partial + at.value, piece.partial + at.maximum,
                                                          piece.partial + at.sum};
    piece_tiles_.push_back(tile.queries);
    row += tile.rows;
  }
  head_floats_ += split_floats(rows, args);
  pieces_.push_back(piece);
}

// Memory for the partials, and what the callers want to know.
void AttentionPlan::size_up(const AttentionArgs& args) {
  if (head_floats_ * num_kv_heads_ > partials_size_) {
    partials_.reset();
    partials_size_ = 0;
    const int64_t wanted = head_floats_ * num_kv_heads_ * 3 / 2;
    void* memory = ::operator new[](static_cast<size_t>(wanted) * sizeof(float), std::align_val_t{64});
    partials_.reset(static_cast<float*>(memory));
    partials_size_ = wanted;
  }
  int64_t max_rows = 0;
  piece_work_ = merge_work_ = 0;
  for (const Piece& piece : pieces_) {
    int64_t rows = 0;
    for (int64_t i = 0; i < piece.num_tiles; ++i) {
      const QueryTile& queries = piece_tiles_[piece.first_tile + i];
      rows += (queries.query_end - queries.query_begin) * args.group;
    }
    max_rows = std::max(max_rows, rows);
    piece_work_ += split_work(rows, args);
  }
  for (const Tile& tile : tiles_) {
    max_rows = std::max<int64_t>(max_rows, tile.rows);
    merge_work_ += (tile.split_end - tile.parts_end) * split_work(tile.rows, args) +
                   (tile.parts_end - tile.split_begin) * tile.rows * args.value_dim * num_kv_heads_;
  }
  scratch_bytes_ = attention_scratch_bytes(max_rows, args.key_dim, args.value_dim);
}

void AttentionPlan::run_piece(const KernelTable& table, const AttentionArgs& args, int64_t index,
                              char* scratch) const {
  const Piece& piece = pieces_[index / num_kv_heads_];
  const int64_t head = index % num_kv_heads_;
  table.attend_piece(args, {&piece_tiles_[piece.first_tile], piece.num_tiles, static_cast<int32_t>(head), piece.split,
                            partials_.get() + head * head_floats_ + piece.partial}, scratch);
}

void AttentionPlan::run_merge(const KernelTable& table, const AttentionArgs& args, int64_t index,
                              char* scratch) const {
  const Tile& tile = tiles_[index / num_kv_heads_];
  const int64_t head = index % num_kv_heads_;
  table.attend_merge(args, {tile.queries, static_cast<int32_t>(head), tile.parts_end - tile.split_begin,
                            parts_.data() + tile.first_part, partials_.get() + head * head_floats_, tile.parts_end,
                            tile.split_end}, scratch);
}

void run_attention(const KernelTable& table, const AttentionArgs& args, int64_t num_seqs, const Threads& threads) {
  static thread_local AttentionPlan plan;  // keeps its memory from call to call
  plan.make(args, num_seqs, threads.num_threads, threads.alone_below);
  const AttentionPlan& made = plan;
  drain(threads, made.piece_work(), made.count_pieces(), made.scratch_bytes(),
        [&](int64_t i, char* scratch) { made.run_piece(table, args, i, scratch); });
  drain(threads, made.merge_work(), made.count_merges(), made.scratch_bytes(),
        [&](int64_t i, char* scratch) { made.run_merge(table, args, i, scratch); });
}

}  // namespace pagemill
