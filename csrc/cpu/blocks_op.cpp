// copy_blocks, gather_blocks, scatter_blocks: whole blocks as bytes, every layer in one call. They know nothing of
// heads or dtypes, so layers may differ in both; plain copies need no instruction-set level.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "op_list.h"

namespace pagemill {
namespace {

constexpr int64_t kBytesPerTask = 1 << 18;  // below this a second thread costs more than it brings

struct Layer {
  char* bytes;
  int64_t block_bytes;
};

// One layer per tensor: [num_blocks, ...], contiguous; the same num_blocks for all.
std::vector<Layer> layers_of(const char* op, const std::vector<Tensor>& caches, int64_t* num_blocks) {
  std::vector<Layer> layers;
  *num_blocks = caches.empty() || caches[0].dim() == 0 ? 0 : caches[0].size(0);
  for (const Tensor& cache : caches) {
    check_cpu(op, "caches", cache);
    check_contiguous(op, "caches", cache);
    if (cache.dim() < 2 || cache.size(0) != *num_blocks) {
      fail(op, "caches", "wanted [num_blocks = ", *num_blocks, ", ...] for every layer, got ", shape_text(cache));
    }
    const int64_t elements = *num_blocks == 0 ? 0 : cache.numel() / *num_blocks;
    layers.push_back({mutable_bytes_of(cache), elements * static_cast<int64_t>(cache.element_size())});
  }
  return layers;
}

const int64_t* block_ids(const char* op, const char* argument, const Tensor& ids, int64_t num_blocks) {
  check_cpu(op, argument, ids);
  check_dtype(op, argument, ids, ScalarType::Long);
  check_contiguous(op, argument, ids);
  const int64_t* id = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < ids.numel(); ++i) {
    if (id[i] < 0 || id[i] >= num_blocks) {
      fail(op, argument, "wanted block ids from 0 to ", num_blocks - 1, ", got ", id[i]);
    }
  }
  return id;
}

void check_unique(const char* op, const char* argument, std::vector<int64_t> ids, const char* what) {
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice != ids.end()) fail(op, argument, "wanted ", what, ", got block ", *twice, " twice");
}

// Runs copy(layer, i) for every layer and every i below count.
template <typename Copy>
void for_each_block(const std::vector<Layer>& layers, int64_t count, const Copy& copy) {
  const int64_t num_layers = static_cast<int64_t>(layers.size());
  if (num_layers == 0 || count == 0) return;
  const int64_t grain = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, layers[0].block_bytes));
  torch::stable::parallel_for(0, num_layers * count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) copy(i / count, i % count);
  });
}

// Where each layer's bytes start inside one staged block; the last entry is the staged block's size.
std::vector<int64_t> staging_offsets(const char* op, const std::vector<Layer>& layers, const Tensor& staging,
                                     int64_t count) {
  std::vector<int64_t> offsets{0};
  for (const Layer& layer : layers) offsets.push_back(offsets.back() + layer.block_bytes);
  check_cpu(op, "staging", staging);
  check_dtype(op, "staging", staging, ScalarType::Byte);
  check_shape(op, "staging", staging, "[num_ids, bytes of one block in all layers]", {count, offsets.back()});
  check_contiguous(op, "staging", staging);
  return offsets;
}

}  // namespace

void copy_blocks(const std::vector<Tensor> caches, const Tensor pairs) {
  const char* op = "copy_blocks";
  int64_t num_blocks;
  const std::vector<Layer> layers = layers_of(op, caches, &num_blocks);
  check_shape(op, "pairs", pairs, "[num_pairs, 2]", {-1, 2});
  const int64_t* pair = block_ids(op, "pairs", pairs, num_blocks);
  const int64_t count = pairs.size(0);
  std::vector<int64_t> sources, touched;
  for (int64_t i = 0; i < count; ++i) sources.push_back(pair[2 * i]);
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  touched = sources;
  for (int64_t i = 0; i < count; ++i) touched.push_back(pair[2 * i + 1]);
  check_unique(op, "pairs", touched, "destinations that are distinct and no source");
  for_each_block(layers, count, [&](int64_t layer, int64_t i) {
    const int64_t bytes = layers[layer].block_bytes;
    std::memcpy(layers[layer].bytes + pair[2 * i + 1] * bytes, layers[layer].bytes + pair[2 * i] * bytes, bytes);
  });
}

void gather_blocks(const std::vector<Tensor> caches, const Tensor ids, Tensor staging) {
  const char* op = "gather_blocks";
  int64_t num_blocks;
  const std::vector<Layer> layers = layers_of(op, caches, &num_blocks);
  check_shape(op, "ids", ids, "[num_ids]", {-1});
  const int64_t* id = block_ids(op, "ids", ids, num_blocks);
  const int64_t count = ids.size(0);
  const std::vector<int64_t> offsets = staging_offsets(op, layers, staging, count);
  char* staged = mutable_bytes_of(staging);
  for_each_block(layers, count, [&](int64_t layer, int64_t i) {
    const int64_t bytes = layers[layer].block_bytes;
    std::memcpy(staged + i * offsets.back() + offsets[layer], layers[layer].bytes + id[i] * bytes, bytes);
  });
}

void scatter_blocks(const std::vector<Tensor> caches, const Tensor ids, const Tensor staging) {
  const char* op = "scatter_blocks";
  int64_t num_blocks;
  const std::vector<Layer> layers = layers_of(op, caches, &num_blocks);
  check_shape(op, "ids", ids, "[num_ids]", {-1});
  const int64_t* id = block_ids(op, "ids", ids, num_blocks);
  const int64_t count = ids.size(0);
  check_unique(op, "ids", std::vector<int64_t>(id, id + count), "distinct destinations");
  const std::vector<int64_t> offsets = staging_offsets(op, layers, staging, count);
  const char* staged = bytes_of(staging);
  for_each_block(layers, count, [&](int64_t layer, int64_t i) {
    const int64_t bytes = layers[layer].block_bytes;
    std::memcpy(layers[layer].bytes + id[i] * bytes, staged + i * offsets.back() + offsets[layer], bytes);
  });
}

}  // namespace pagemill
