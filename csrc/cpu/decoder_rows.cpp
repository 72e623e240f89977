// Where a step's activations lie: one piece of memory, kept from step to step, the arrays one after another.
#include <algorithm>
#include <array>

#include "cpu/decoder.h"

namespace pagemill {
namespace {

struct Part {
  char** place;
  int64_t bytes;  // a multiple of 64
};

// One after another.
std::array<Part, 12> parts_of(DecoderSteps::Rows& rows, const DecoderModel& model, int64_t num_tokens,
                             int64_t num_wanted) {
  const int64_t attended = model.num_query_heads * model.head_dim, heads = attended + 2 * model.num_kv_heads * model.head_dim;
  const int64_t most = std::max(num_tokens, num_wanted);
  const auto wide = [&](char*& place, int64_t count) {
    return Part{&place, (count * model.hidden * kWideBytes + 127) / 64 * 64};
  };
  const auto part = [&](char*& place, int64_t count, int64_t width) {
    return Part{&place, (count * width * element_bytes(model.type) + 127) / 64 * 64};
  };
  int64_t widest = 0, widest_gated = 0;
  if (model.num_adapters > 0) {  // all layers have the same widths
    const DecoderLayer& layer = model.layers[0];
    widest = std::max(layer.qkv.panel_rows, layer.gate_up.panel_rows);  // of those that are rounded or gated
    if (model.is_gated) widest_gated = layer.gate_up.panel_rows;
  }
  return {wide(rows.residual, num_tokens),
          part(rows.x, most, model.hidden),
          part(rows.heads, num_tokens, heads),
          part(rows.attended, num_tokens, attended),
          wide(rows.projected, most),
          part(rows.activated, most, model.intermediate),
          wide(rows.wanted_residual, num_wanted),
          part(rows.wanted_x, model.is_parallel ? num_wanted : 0, model.hidden),
          part(rows.wanted_attended, num_wanted, attended),
          Part{&rows.summed, (most * widest * kWideBytes + 127) / 64 * 64},
          part(rows.rounded, most, widest_gated),
          part(rows.inner, most, model.most_rank)};
}

}  // namespace

int64_t DecoderSteps::count_bytes(const DecoderModel& model, int64_t num_tokens, int64_t num_wanted) {
  Rows rows{};
  int64_t total = 0;
  for (const Part& part : parts_of(rows, model, num_tokens, num_wanted)) total += part.bytes;
  return total;
}

DecoderSteps::Rows DecoderSteps::lay_out(const DecoderModel& model, const DecoderBatch& batch) {
  const int64_t total = count_bytes(model, batch.num_tokens, batch.num_wanted);
  if (total > memory_bytes_) {
    memory_.reset();
    memory_bytes_ = 0;
    memory_.reset(static_cast<char*>(::operator new[](static_cast<size_t>(total), std::align_val_t{64})));
    memory_bytes_ = total;
  }
  Rows rows{};
  char* next = memory_.get();
  for (const Part& part : parts_of(rows, model, batch.num_tokens, batch.num_wanted)) {
    *part.place = next;
    next += part.bytes;
  }
  return rows;
}

}  // namespace pagemill
