// x and the weight on their way into shared memory: a ring of slots, each of kChunk elements of K of a tile's rows.
//
// Rows and elements of K past the end arrive as zeros and are not read. A gated weight's tile holds 8 rows of the gate,
// the same 8 of the up half, and so on: both numbers of an output end in the same thread.
#pragma once

#include "cuda/linear_plan.cuh"
#include "cuda/tensor_core.cuh"

namespace pagemill::cuda {

template <typename T, typename Shape>
class Feed {
 public:
  // Everything from chunk `begin` to chunk `end` of K.
  PAGEMILL_DEVICE Feed(const LinearParams& params, const TilePlace& place, int begin, int end, unsigned char* ring)
      : params_(params), ring_(ring), chunk_(begin), end_(end) {
    const int thread = static_cast<int>(threadIdx.x);
    row_ = thread / kPieces;
    piece_ = thread % kPieces;
    x_row_ = place.row + row_;
    column_ = place.column + (params.gated ? row_ / 16 * 8 + row_ % 8 : row_);
    up_ = params.gated && row_ % 16 >= 8 ? params.out_features : 0;
#pragma unroll
    for (int i = 0; i < Shape::kSlots - 1; ++i) issue();
  }

  // The next slot, when its bytes have arrived; the slot before it is free from now on.
  PAGEMILL_DEVICE SharedAddress next() {
    copy_async_wait<Shape::kSlots - 2>();
    sync_block();
    issue();
    const SharedAddress slot = shared_address(ring_) + read_ * Shape::kSlotBytes;
    read_ = read_ + 1 == Shape::kSlots ? 0 : read_ + 1;
    return slot;
  }

 private:
  static constexpr int kPieces = Shape::kChunk / 8;                // of 16 bytes, in a row of a slot
  static constexpr int kRowStep = Shape::kThreads / kPieces;       // rows that all threads copy at once
  static_assert(kRowStep % 16 == 0 && Shape::kM % kRowStep == 0 && Shape::kN % kRowStep == 0);

  // Starts the copy of the next chunk, and closes a group whether or not there is one.
  PAGEMILL_DEVICE void issue() {
    if (chunk_ < end_) {
      unsigned char* to = ring_ + write_ * Shape::kSlotBytes + row_ * Shape::kRowBytes + piece_ * 16;
      const int64_t k = static_cast<int64_t>(chunk_) * Shape::kChunk + piece_ * 8;
      const T* x = static_cast<const T*>(params_.x) + x_row_ * params_.x_stride;
#pragma unroll
      for (int i = 0; i < Shape::kM / kRowStep; ++i) {
        copy(to, x + i * kRowStep * params_.x_stride, k, x_row_ + i * kRowStep < params_.rows);
        to += kRowStep * Shape::kRowBytes;
      }
      const int column_step = params_.gated ? kRowStep / 2 : kRowStep;
      const T* weight = static_cast<const T*>(params_.weight) + (column_ + up_) * params_.weight_stride;
#pragma unroll
      for (int i = 0; i < Shape::kN / kRowStep; ++i) {
        copy(to, weight + i * column_step * params_.weight_stride, k, column_ + i * column_step < params_.out_features);
        to += kRowStep * Shape::kRowBytes;
      }
      ++chunk_;
    }
    copy_async_commit();
    write_ = write_ + 1 == Shape::kSlots ? 0 : write_ + 1;
  }

  PAGEMILL_DEVICE void copy(unsigned char* to, const T* row, int64_t k, bool row_exists) const {
    if (params_.in_pieces) {
      const bool valid = row_exists && k < params_.in_features;
      copy_async_16(shared_address(to), valid ? static_cast<const void*>(row + k) : params_.x, valid);
      return;
    }
    uint32_t halves[8];  // element by element; seen by others after the barrier of a later next()
#pragma unroll
    for (int i = 0; i < 8; ++i) halves[i] = row_exists && k + i < params_.in_features ? row[k + i].bits : 0u;
    store_16(to, {{halves[0] | halves[1] << 16, halves[2] | halves[3] << 16, halves[4] | halves[5] << 16,
                   halves[6] | halves[7] << 16}});
  }

  const LinearParams& params_;
  unsigned char* ring_;
  int chunk_, end_, row_, piece_, write_ = 0, read_ = 0;
  int64_t x_row_, column_, up_;
};

// sums += the slot's rows of x times its rows of the weight, in steps of 16 from left to right: this warp's share.
template <typename T, typename Shape>
PAGEMILL_DEVICE void multiply_slot(SharedAddress slot, float (&sums)[Shape::kMmaM][Shape::kMmaN][4]) {
  const int lane = lane_id(), warp_m = warp_id() / Shape::kWarpsN, warp_n = warp_id() % Shape::kWarpsN;
  const SharedAddress x = slot + (warp_m * Shape::kMmaM * 16 + (lane & 15)) * Shape::kRowBytes + (lane >> 4) * 16;
  const int weight_row = Shape::kM + warp_n * Shape::kMmaN * 8 + (lane & 7) + (lane >> 4) * 8;
  const SharedAddress weight = slot + weight_row * Shape::kRowBytes + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int step = 0; step < Shape::kChunk / 16; ++step) {
    uint32_t rows[Shape::kMmaM][4];
#pragma unroll
    for (int m = 0; m < Shape::kMmaM; ++m) load_matrix(rows[m], x + m * 16 * Shape::kRowBytes + step * 32);
#pragma unroll
    for (int n = 0; n < Shape::kMmaN; n += 2) {
      uint32_t columns[4];
      load_matrix(columns, weight + n * 8 * Shape::kRowBytes + step * 32);
      const uint32_t first[2] = {columns[0], columns[1]}, second[2] = {columns[2], columns[3]};
#pragma unroll
      for (int m = 0; m < Shape::kMmaM; ++m) {
        multiply_add<T>(sums[m][n], rows[m], first);
        multiply_add<T>(sums[m][n + 1], rows[m], second);
      }
    }
  }
}

}  // namespace pagemill::cuda
