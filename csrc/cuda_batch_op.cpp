// Batches on CUDA tensors: argument checks and the launches of cuda/batch.cu and cuda/blocks.cu.
#include <vector>

#include "cuda/launchers.h"
#include "cuda_check.h"
#include "cuda_op_list.h"

namespace pagemill::cuda {
namespace {

// A contiguous tensor of one dimension, which is written to.
template <typename T>
T* written(const char* op, const char* argument, const Tensor& tensor, int64_t size, ScalarType type) {
  check_shape(op, argument, tensor, size < 0 ? "[num_tokens]" : "[num_seqs]", {size});
  return const_cast<T*>(device_data<T>(op, argument, tensor, type));
}

template <typename T>
const T* read(const char* op, const char* argument, const Tensor& tensor, int64_t size, ScalarType type) {
  check_shape(op, argument, tensor, "[num_seqs]", {size});
  return device_data<T>(op, argument, tensor, type);
}

// token_ids or row_tables: [num_rows, width], rows at a stride.
int32_t* rows_of(const char* op, const char* argument, const Tensor& tensor) {
  check_cuda(op, argument, tensor);
  check_dtype(op, argument, tensor, ScalarType::Int);
  check_shape(op, argument, tensor, "[num_rows, width]", {-1, -1});
  check_rows(op, argument, tensor);
  return static_cast<int32_t*>(tensor.mutable_data_ptr());
}

void check_block_size(const char* op, int64_t block_size) {
  if (block_size < 1) fail(op, "block_size", "wanted at least 1, got ", block_size);
}

// The layers of a cache as the launchers want them: [num_blocks, ...] each, contiguous.
struct LayerList {
  std::vector<void*> bases;
  std::vector<int64_t> offsets{0};

  LayerList(const char* op, const std::vector<Tensor>& caches) {
    for (const Tensor& cache : caches) {
      check_cuda(op, "caches", cache);
      check_contiguous(op, "caches", cache);
      if (cache.dim() < 2 || cache.size(0) != caches[0].size(0)) {
        fail(op, "caches", "wanted [num_blocks, ...] of one num_blocks for every layer, got ", shape_text(cache));
      }
      bases.push_back(cache.mutable_data_ptr());
      const int64_t elements = cache.size(0) == 0 ? 0 : cache.numel() / cache.size(0);
      offsets.push_back(offsets.back() + elements * static_cast<int64_t>(cache.element_size()));
    }
  }

  int64_t count() const { return static_cast<int64_t>(bases.size()); }
};

using StageLauncher = int (*)(void* const*, const int64_t*, int64_t, const int64_t*, int64_t, void*, void*);

// staging may be memory of the host that the device reads and writes by itself: then it is pinned, as the caller says.
void stage_blocks(const char* op, StageLauncher launch, const std::vector<Tensor>& caches, const Tensor& ids,
                  const Tensor& staging) {
  if (caches.empty()) return;
  const LayerList layers(op, caches);
  check_shape(op, "ids", ids, "[num_ids]", {-1});
  check_dtype(op, "staging", staging, ScalarType::Byte);
  check_shape(op, "staging", staging, "[num_ids, bytes of one block in all layers]",
              {ids.size(0), layers.offsets.back()});
  check_contiguous(op, "staging", staging);
  const DeviceCall call(op, caches[0]);
  call.check(launch(layers.bases.data(), layers.offsets.data(), layers.count(),
                    device_data<int64_t>(op, "ids", ids, ScalarType::Long), ids.size(0), staging.mutable_data_ptr(),
                    call.stream()));
}

}  // namespace

void prepare_batch(const Tensor token_ids, const Tensor row_tables, int64_t block_size, const Tensor rows,
                   const Tensor computed, const Tensor counts, Tensor input_ids, Tensor positions, Tensor slot_mapping,
                   Tensor query_start_loc, Tensor seq_lens, Tensor block_tables, Tensor logits_indices) {
  const char* op = "prepare_batch";
  const int32_t* ids = rows_of(op, "token_ids", token_ids);
  const int32_t* tables = rows_of(op, "row_tables", row_tables);
  check_block_size(op, block_size);
  check_shape(op, "rows", rows, "[num_seqs]", {-1});
  const int64_t seqs = rows.size(0);
  check_shape(op, "block_tables", block_tables, "[num_seqs, width]", {seqs, -1});
  if (block_tables.size(1) > row_tables.size(1)) {
    fail(op, "block_tables", "wanted at most ", row_tables.size(1), " columns, got ", shape_text(block_tables));
  }
  check_shape(op, "positions", positions, "[num_tokens]", {input_ids.size(0)});
  check_shape(op, "slot_mapping", slot_mapping, "[num_tokens]", {input_ids.size(0)});
  check_shape(op, "query_start_loc", query_start_loc, "[num_seqs + 1]", {seqs + 1});
  const DeviceCall call(op, token_ids);
  call.check(pagemill_prepare_batch(
      ids, token_ids.stride(0), tables, row_tables.stride(0), block_size,
      device_data<int64_t>(op, "rows", rows, ScalarType::Long),
      read<int32_t>(op, "computed", computed, seqs, ScalarType::Int),
      read<int32_t>(op, "counts", counts, seqs, ScalarType::Int), seqs, block_tables.size(1),
      written<int64_t>(op, "input_ids", input_ids, -1, ScalarType::Long),
      written<int64_t>(op, "positions", positions, -1, ScalarType::Long),
      written<int64_t>(op, "slot_mapping", slot_mapping, -1, ScalarType::Long),
      written<int32_t>(op, "query_start_loc", query_start_loc, seqs + 1, ScalarType::Int),
      written<int32_t>(op, "seq_lens", seq_lens, seqs, ScalarType::Int),
      const_cast<int32_t*>(device_data<int32_t>(op, "block_tables", block_tables, ScalarType::Int)),
      written<int64_t>(op, "logits_indices", logits_indices, seqs, ScalarType::Long), call.stream()));
}

void advance_batch(Tensor token_ids, const Tensor row_tables, int64_t block_size, const Tensor rows, const Tensor drawn,
                   const Tensor num_seqs, Tensor input_ids, Tensor positions, Tensor slot_mapping, Tensor seq_lens) {
  const char* op = "advance_batch";
  int32_t* ids = rows_of(op, "token_ids", token_ids);
  const int32_t* tables = rows_of(op, "row_tables", row_tables);
  check_block_size(op, block_size);
  check_shape(op, "rows", rows, "[num_seqs]", {-1});
  check_shape(op, "num_seqs", num_seqs, "[1]", {1});
  const int64_t seqs = rows.size(0);
  const DeviceCall call(op, token_ids);
  call.check(pagemill_advance_batch(ids, token_ids.stride(0), tables, row_tables.stride(0), block_size,
                                    device_data<int64_t>(op, "rows", rows, ScalarType::Long),
                                    read<int64_t>(op, "drawn", drawn, seqs, ScalarType::Long),
                                    device_data<int32_t>(op, "num_seqs", num_seqs, ScalarType::Int), seqs,
                                    written<int64_t>(op, "input_ids", input_ids, seqs, ScalarType::Long),
                                    written<int64_t>(op, "positions", positions, seqs, ScalarType::Long),
                                    written<int64_t>(op, "slot_mapping", slot_mapping, seqs, ScalarType::Long),
                                    written<int32_t>(op, "seq_lens", seq_lens, seqs, ScalarType::Int), call.stream()));
}

void store_tokens(Tensor token_ids, const Tensor rows, const Tensor positions, const Tensor drawn) {
  const char* op = "store_tokens";
  int32_t* ids = rows_of(op, "token_ids", token_ids);
  check_shape(op, "rows", rows, "[n]", {-1});
  const int64_t count = rows.size(0);
  const DeviceCall call(op, token_ids);
  call.check(pagemill_store_tokens(ids, token_ids.stride(0), device_data<int64_t>(op, "rows", rows, ScalarType::Long),
                                   read<int64_t>(op, "positions", positions, count, ScalarType::Long),
                                   read<int64_t>(op, "drawn", drawn, count, ScalarType::Long), count, call.stream()));
}

void copy_blocks(const std::vector<Tensor> caches, const Tensor pairs) {
  const char* op = "copy_blocks";
  if (caches.empty()) return;
  const LayerList layers(op, caches);
  check_shape(op, "pairs", pairs, "[num_pairs, 2]", {-1, 2});
  const DeviceCall call(op, caches[0]);
  call.check(pagemill_copy_blocks(layers.bases.data(), layers.offsets.data(), layers.count(),
                                  device_data<int64_t>(op, "pairs", pairs, ScalarType::Long), pairs.size(0),
                                  call.stream()));
}

void gather_blocks(const std::vector<Tensor> caches, const Tensor ids, Tensor staging) {
  stage_blocks("gather_blocks", &pagemill_gather_blocks, caches, ids, staging);
}

void scatter_blocks(const std::vector<Tensor> caches, const Tensor ids, const Tensor staging) {
  stage_blocks("scatter_blocks", &pagemill_scatter_blocks, caches, ids, staging);
}

}  // namespace pagemill::cuda
