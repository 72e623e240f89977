// K and V on their way into shared memory: a ring of slots, each of 16 keys per warp of the team that shares the ring.
//
// A tile of 64 keys passes as its keys, then its values. Pieces (16 keys of one block) that no row of the team sees are
// not read; keys past the last visible one arrive as zeros, so that what unused slots hold never meets a product.
#pragma once

#include "cuda/attention_params.cuh"
#include "cuda/tensor_core.cuh"

namespace pagemill::cuda {

// C: the cache's elements. D: head size, rounded up to one that kernels exist for. TEAM: warps that share the ring.
template <typename C, int D, int TEAM, int SLOTS>
class Stream {
 public:
  static constexpr int kRowBytes = D * static_cast<int>(sizeof(C)) + 16;  // 16: so 8 rows lie in 8 different bank groups
  static constexpr int kPieceBytes = kPieceKeys * kRowBytes;
  static constexpr int kSlotBytes = TEAM * kPieceBytes;
  static constexpr int kRingBytes = SLOTS * kSlotBytes;
  static constexpr int kPiecesPerTile = kTileKeys / kPieceKeys;
  static constexpr int kSteps = kPiecesPerTile / TEAM;  // slots for the keys of a tile, and as many for its values

  // Everything that one team reads of one sequence's kv head: `keys`, not empty.
  PAGEMILL_DEVICE Stream(const AttentionParams& params, const Sequence& sequence, int kv_head, KeyRange keys,
                         SharedAddress ring, int warp_in_team)
      : params_(params),
        table_(params.block_tables + sequence.index * params.table_stride),
        kv_head_(kv_head),
        ring_(ring),
        warp_(warp_in_team),
        pieces_per_block_(params.block_size / kPieceKeys),
        keys_(keys),
        tile_(keys.begin / kTileKeys) {
    read_table(tile_ / kTilesPerSplit);
    if (TEAM > 1) read_table(tile_ / kTilesPerSplit + 1);
#pragma unroll
    for (int i = 0; i < SLOTS - 1; ++i) issue();
  }

  // The next slot's address, when its bytes have arrived; the slot before it is free from now on.
  PAGEMILL_DEVICE SharedAddress next() {
    copy_async_wait<SLOTS - 2>();
    if (TEAM == 1) {
      sync_warp();
    } else {
      sync_block();
    }
    issue();
    const SharedAddress slot = ring_ + read_ * kSlotBytes;
    read_ = read_ + 1 == SLOTS ? 0 : read_ + 1;
    return slot;
  }

 private:
  static constexpr int kTilesPerSplit = kSplitKeys / kTileKeys;

  // Lanes 0 to 15 keep the blocks of an even split's pieces, lanes 16 to 31 an odd one's.
  PAGEMILL_DEVICE void read_table(int split) {
    const int lane = lane_id(), piece = split * kPieceKeys + (lane & 15);
    const bool wanted = lane / 16 == (split & 1) && piece * kPieceKeys < keys_.end &&
                        (piece + 1) * kPieceKeys > keys_.begin;
    if (!wanted) return;
    block_ = table_[piece / pieces_per_block_];
    row_ = piece % pieces_per_block_ * kPieceKeys;
  }

  // Starts the copy of this warp's piece of the next slot, and closes a group whether or not there is one.
  PAGEMILL_DEVICE void issue() {
    const int piece = tile_ * kPiecesPerTile + step_ % kSteps * TEAM + warp_;
    const int block = shuffle(block_, piece & 31), row = shuffle(row_, piece & 31);
    const int first_key = piece * kPieceKeys;
    if (first_key < keys_.end && first_key + kPieceKeys > keys_.begin) {
      const SharedAddress to = ring_ + write_ * kSlotBytes + warp_ * kPieceBytes;
      if (step_ < kSteps) {
        copy_piece(to, params_.key_cache + block * params_.key_block_stride, row, params_.key_dim, first_key);
      } else {
        copy_piece(to, params_.value_cache + block * params_.value_block_stride, row, params_.value_dim, first_key);
      }
    }
    copy_async_commit();
    write_ = write_ + 1 == SLOTS ? 0 : write_ + 1;
    if (++step_ < 2 * kSteps) return;
    step_ = 0;
    ++tile_;
    if (TEAM > 1 && tile_ % kTilesPerSplit == 0) read_table(tile_ / kTilesPerSplit + 1);
  }

  PAGEMILL_DEVICE void copy_piece(SharedAddress to, const char* block, int row, int dim, int first_key) const {
    constexpr int kChunks = D * static_cast<int>(sizeof(C)) / 16;
    static_assert(kPieceKeys * kChunks % kWarp == 0);
    const int row_bytes = dim * static_cast<int>(sizeof(C));
    const char* rows = block + (static_cast<int64_t>(kv_head_) * params_.block_size + row) * row_bytes;
#pragma unroll 4
    for (int i = 0; i < kPieceKeys * kChunks / kWarp; ++i) {
      const int index = i * kWarp + lane_id(), key = index / kChunks, chunk = index % kChunks;
      const bool valid = first_key + key < keys_.end && chunk * 16 < row_bytes;
      copy_async_16(to + key * kRowBytes + chunk * 16, valid ? rows + key * row_bytes + chunk * 16 : rows, valid);
    }
  }

  const AttentionParams& params_;
  const int32_t* table_;
  int kv_head_;
  SharedAddress ring_;
  int warp_, pieces_per_block_;
  KeyRange keys_;
  int tile_, step_ = 0, write_ = 0, read_ = 0;  // what the next issue copies, and where
  int block_ = 0, row_ = 0;
};

}  // namespace pagemill::cuda
