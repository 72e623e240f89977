#include "cpu/decoder_wanted.h"

#include <algorithm>

#include "cpu/decoder.h"

namespace pagemill {
namespace {

// num_seqs: padding behind the last one.
int64_t sequence_of(const DecoderBatch& batch, int64_t token) {
  const int32_t* end = batch.query_start + batch.num_seqs + 1;
  return std::upper_bound(batch.query_start, end, token) - batch.query_start - 1;
}

}  // namespace

bool takes_all_rows(const DecoderBatch& batch) {
  if (!batch.wants_logits) return true;
  if (batch.num_wanted != batch.num_tokens) return false;
  for (int64_t i = 0; i < batch.num_wanted; ++i) {
    if (batch.wanted[i] != i) return false;
  }
  return true;
}

std::vector<AdapterSpan> wanted_spans(const DecoderBatch& batch) {
  std::vector<AdapterSpan> runs;
  for (int64_t row = 0; row < batch.num_wanted; ++row) {
    for (const AdapterSpan& span : batch.spans) {
      if (batch.wanted[row] < span.start || batch.wanted[row] >= span.stop) continue;
      if (!runs.empty() && runs.back().adapter == span.adapter && runs.back().stop == row) ++runs.back().stop;
      else runs.push_back({span.adapter, row, row + 1});
    }
  }
  return runs;
}

bool is_adapted(const Product& product, const std::vector<AdapterSpan>& spans) {
  return std::any_of(spans.begin(), spans.end(), [&](const AdapterSpan& span) {
    return !product.added.empty() && product.added[static_cast<size_t>(span.adapter)].a != nullptr;
  });
}

bool WantedQueries::find(const DecoderModel& model, const DecoderBatch& batch) {
  if (model.num_query_heads * model.head_dim % kPanelColumns != 0) return false;
  if (is_adapted(model.layers.back().qkv, batch.spans)) return false;
  count_queries(batch);
  if (start.back() * 2 > batch.num_tokens) return false;
  const int32_t* first = batch.query_start;
  tokens.clear();
  positions.clear();
  for (int64_t s = 0; s < batch.num_seqs; ++s) {
    for (int64_t token = first[s + 1] - (start[s + 1] - start[s]); token < first[s + 1]; ++token) {
      tokens.push_back(token);
      positions.push_back(batch.positions[token]);
    }
  }
  rows.clear();
  for (int64_t i = 0; i < batch.num_wanted; ++i) {
    const int64_t token = batch.wanted[i], s = sequence_of(batch, token);
    rows.push_back(s < batch.num_seqs ? start[s + 1] - (first[s + 1] - token) : token);
  }
  return true;
}

void WantedQueries::count_queries(const DecoderBatch& batch) {
  start.assign(static_cast<size_t>(batch.num_seqs + 1), 0);
  for (int64_t i = 0; i < batch.num_wanted; ++i) {
    const int64_t token = batch.wanted[i], s = sequence_of(batch, token);
    if (s == batch.num_seqs) continue;
    start[s + 1] = std::max(start[s + 1], static_cast<int32_t>(batch.query_start[s + 1] - token));
  }
  for (int64_t s = 0; s < batch.num_seqs; ++s) start[s + 1] += start[s];
}

Product columns_of(const Product& product, int64_t begin, int64_t end, bool bf16) {
  const int64_t bytes = product.is_quantised
                            ? quant_groups(product.in_features) * quant_group_bytes(product.format)
                            : packed_steps(product.in_features, bf16) * kPanelColumns * kWideBytes;
  Product part;
  part.packed = static_cast<const char*>(product.packed) + begin / kPanelColumns * bytes;
  part.bias = product.bias == nullptr ? nullptr : product.bias + begin;
  part.in_features = product.in_features;
  part.out_features = end - begin;
  part.is_quantised = product.is_quantised;
  part.format = product.format;
  return part;
}

}  // namespace pagemill
