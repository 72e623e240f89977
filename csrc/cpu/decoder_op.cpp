// decoder_attach and decoder_forward: caches and tables are checked when they come, a step checks what it brings.
#include <torch/csrc/stable/ops.h>

#include <limits>

#include "batch_check.h"
#include "cpu/decoder_handle.h"
#include "cpu/isa.h"
#include "op_list.h"

namespace pagemill {
namespace {

AttentionArgs batch_args(const DecoderModel& model, const DecoderBatch& batch, int64_t window) {
  AttentionArgs args{};
  args.block_tables = batch.block_tables;
  args.query_start = batch.query_start;
  args.seq_lens = batch.seq_lens;
  args.table_stride = batch.table_stride;
  args.block_size = model.block_size;
  args.window = window;
  args.causal = true;
  return args;
}

const int64_t* int64_rows(const char* op, const char* argument, const Tensor& tensor, int64_t count) {
  check_cpu(op, argument, tensor);
  check_dtype(op, argument, tensor, ScalarType::Long);
  check_shape(op, argument, tensor, "[rows]", {count});
  check_contiguous(op, argument, tensor);
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

const int32_t* int32_rows(const char* op, const char* argument, const Tensor& tensor) {
  check_cpu(op, argument, tensor);
  check_dtype(op, argument, tensor, ScalarType::Int);
  check_rows(op, argument, tensor);
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

void check_range(const char* op, const char* argument, const int64_t* values, int64_t count, int64_t least, int64_t end) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < least || values[i] >= end) {
      fail(op, argument, "wanted numbers below ", end, ", got ", values[i], " at ", i);
    }
  }
}

// spans: (adapter from 1, start, stop), one after another.
std::vector<AdapterSpan> spans_of(const char* op, const DecoderModel& model, const std::vector<int64_t>& spans,
                                  int64_t num_tokens) {
  if (spans.size() % 3 != 0) fail(op, "spans", "wanted three numbers for each, got ", spans.size());
  std::vector<AdapterSpan> read;
  int64_t reached = 0;
  for (size_t i = 0; i < spans.size(); i += 3) {
    const AdapterSpan span{spans[i] - 1, spans[i + 1], spans[i + 2]};
    if (span.adapter < 0 || span.adapter >= model.num_adapters) {
      fail(op, "spans", "wanted adapters from 1 to ", model.num_adapters, ", got ", spans[i]);
    }
    if (span.start < reached || span.stop <= span.start || span.stop > num_tokens) {
      fail(op, "spans", "wanted tokens in ascending order below ", num_tokens, ", got from ", span.start, " to ", span.stop);
    }
    reached = span.stop;
    read.push_back(span);
  }
  return read;
}

void check_step(const char* op, const Decoder& decoder, const DecoderBatch& batch, int64_t max_blocks) {
  check_range(op, "input_ids", batch.ids, batch.num_tokens, 0, decoder.vocabulary);
  check_range(op, "positions", batch.positions, batch.num_tokens, 0, decoder.num_positions);
  check_range(op, "slot_mapping", batch.slots, batch.num_tokens, std::numeric_limits<int64_t>::min(),
              decoder.num_blocks * decoder.model.block_size);
  check_range(op, "logits_indices", batch.wanted, batch.num_wanted, 0, batch.num_tokens);
  std::vector<int64_t> seen;  // windows
  for (const DecoderLayer& layer : decoder.model.layers) {
    bool is_new = true;
    for (int64_t window : seen) is_new = is_new && window != layer.window;
    if (!is_new) continue;
    seen.push_back(layer.window);
    check_batch(op, batch_args(decoder.model, batch, layer.window), batch.num_seqs, max_blocks, decoder.num_blocks,
                batch.num_tokens);
  }
}

}  // namespace

void decoder_attach(int64_t handle, const std::vector<Tensor> ropes, const std::vector<Tensor> key_caches,
                    const std::vector<Tensor> value_caches) {
  const char* op = "decoder_attach";
  const std::shared_ptr<Decoder> decoder = find_decoder(op, handle);
  std::lock_guard<std::mutex> step(decoder->one_step);
  DecoderModel& model = decoder->model;
  decoder->is_attached = false;  // until all is checked
  check_length(op, "key_caches", key_caches, model.layers.size());
  check_length(op, "value_caches", value_caches, model.layers.size());
  const ScalarType dtype = decoder->weights[0].scalar_type();
  std::vector<Tensor> kept;
  model.ropes.clear();
  decoder->num_positions = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < ropes.size(); ++i) {
    check_cpu(op, "ropes", ropes[i]);
    check_dtype(op, "ropes", ropes[i], dtype);
    check_shape(op, "ropes", ropes[i], "[num_positions, rotary_dim]", {-1, i % 2 == 0 ? -1 : model.ropes.back().dim});
    check_contiguous(op, "ropes", ropes[i]);
    const int64_t dim = ropes[i].size(1);
    if (dim < 2 || dim % 2 != 0 || dim > model.head_dim) {
      fail(op, "ropes", "wanted an even number of columns up to the head size ", model.head_dim, ", got ", dim);
    }
    if (ropes[i].size(0) < decoder->num_positions) decoder->num_positions = ropes[i].size(0);
    if (i % 2 == 0) model.ropes.push_back({bytes_of(ropes[i]), nullptr, dim});
    else model.ropes.back().sin = bytes_of(ropes[i]);
    kept.push_back(ropes[i]);
  }
  if (ropes.size() % 2 != 0) fail(op, "ropes", "wanted cos and sin alternately, got ", ropes.size(), " tensors");
  check_shape(op, "key_caches", key_caches[0], "[num_blocks, num_kv_heads, block_size, head_dim]",
              {-1, model.num_kv_heads, -1, model.head_dim});
  decoder->num_blocks = key_caches[0].size(0);
  model.block_size = key_caches[0].size(2);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    DecoderLayer& layer = model.layers[i];
    if (layer.rope >= static_cast<int64_t>(model.ropes.size())) {
      fail(op, "ropes", "wanted tables for rope ", layer.rope, ", got ", model.ropes.size());
    }
    for (const Tensor* cache : {&key_caches[i], &value_caches[i]}) {
      const char* argument = cache == &key_caches[i] ? "key_caches" : "value_caches";
      check_cpu(op, argument, *cache);
      check_dtype(op, argument, *cache, dtype);
      check_shape(op, argument, *cache, "[num_blocks, num_kv_heads, block_size, head_dim]",
                  {decoder->num_blocks, model.num_kv_heads, model.block_size, model.head_dim});
      check_blocks(op, argument, *cache);
      kept.push_back(*cache);
    }
    layer.key_cache = mutable_bytes_of(key_caches[i]);
    layer.value_cache = mutable_bytes_of(value_caches[i]);
    layer.key_block_stride = key_caches[i].stride(0);
    layer.value_block_stride = value_caches[i].stride(0);
  }
  decoder->attached = kept;
  decoder->is_attached = true;
}

Tensor decoder_forward(int64_t handle, const Tensor input_ids, const Tensor positions, const Tensor block_tables,
                       const Tensor query_start_loc, const Tensor seq_lens, const Tensor slot_mapping,
                       const std::optional<Tensor> logits_indices, const std::vector<int64_t> spans) {
  const char* op = "decoder_forward";
  const std::shared_ptr<Decoder> decoder = find_decoder(op, handle);
  std::lock_guard<std::mutex> step(decoder->one_step);
  if (!decoder->is_attached) fail(op, "handle", "wanted caches: call decoder_attach first");
  check_shape(op, "input_ids", input_ids, "[num_tokens]", {-1});
  check_shape(op, "seq_lens", seq_lens, "[num_seqs]", {-1});
  DecoderBatch batch{};
  batch.num_tokens = input_ids.size(0);
  batch.num_seqs = seq_lens.size(0);
  check_shape(op, "query_start_loc", query_start_loc, "[num_seqs + 1]", {batch.num_seqs + 1});
  check_shape(op, "block_tables", block_tables, "[num_seqs, max_blocks]", {batch.num_seqs, -1});
  batch.ids = int64_rows(op, "input_ids", input_ids, batch.num_tokens);
  batch.positions = int64_rows(op, "positions", positions, batch.num_tokens);
  batch.slots = int64_rows(op, "slot_mapping", slot_mapping, batch.num_tokens);
  batch.block_tables = int32_rows(op, "block_tables", block_tables);
  batch.table_stride = block_tables.stride(0);
  batch.query_start = int32_rows(op, "query_start_loc", query_start_loc);
  batch.seq_lens = int32_rows(op, "seq_lens", seq_lens);
  const DecoderModel& model = decoder->model;
  const Tensor& like = decoder->weights[0];
  if (logits_indices.has_value()) {
    check_shape(op, "logits_indices", *logits_indices, "[num_rows]", {-1});
    batch.wants_logits = true;
    batch.num_wanted = logits_indices->size(0);
    batch.wanted = int64_rows(op, "logits_indices", *logits_indices, batch.num_wanted);
  }
  batch.spans = spans_of(op, model, spans, batch.num_tokens);
  check_step(op, *decoder, batch, block_tables.size(1));
  Tensor out = logits_indices.has_value()
                   ? torch::stable::new_empty(like, {batch.num_wanted, model.head.out_features}, ScalarType::Float)
                   : torch::stable::new_empty(like, {batch.num_tokens, model.hidden});
  if (batch.num_tokens == 0) return out;
  decoder->steps.run(model, batch, kernels(), static_cast<int>(torch::stable::get_num_threads()), mutable_bytes_of(out));
  return out;
}

}  // namespace pagemill
