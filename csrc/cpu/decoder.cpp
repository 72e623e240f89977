// The walk through one step. Every thread of the team runs the same code over the same stages; within a stage pieces are
// drawn from a counter, so a thread that lost its core holds up the others by one piece at most.
//
// Per layer: product (q, k, v), heads (norm, rotation, cache write), attention, product (output), residual sum and norm,
// product (gate, up; with the activation), product (down), residual sum and norm. A stage
// costs well under a microsecond when there is nothing to do, so what is tiny stands on its own instead of being computed
// by every thread for itself. A product to which adapters add is two stages: the plain product in float32, then row by row
// what the row's adapter adds, the rounding and the gate. Rows without an adapter are rounded from the same sums as ever.
// In the last layer a prompt's queries are few: K and V come first, queries on their own (decoder_wanted.h).
#include "cpu/decoder.h"

#include "cpu/scratch.h"

#include <algorithm>
#include <cstring>

namespace pagemill {
namespace {

constexpr int64_t kElementsPerPiece = 4096;  // of element-wise work: about a microsecond
constexpr int64_t kAdaptedRows = 32;         // at most, in a piece: how often an adapter's weights are read
constexpr int64_t kCutAbove = 500000;        // multiply-adds of attention that are worth a second thread

int64_t rows_per_piece(int64_t width) { return 1 + kElementsPerPiece / width; }

// Of `most` rows at most, and as many pieces for every thread.
int64_t even_piece(int64_t rows, int64_t most, int64_t threads) {
  const int64_t pieces = (1 + (rows - 1) / (most * threads)) * threads;
  return (rows + pieces - 1) / pieces;
}

// One step as its threads share it.
struct Step {
  const DecoderModel& model;
  const DecoderBatch& batch;
  const KernelTable& table;
  int threads;
  char* out;
  const std::vector<DecoderSteps::Kind>& kinds;
  DecoderSteps::Rows rows;
  Stages& stages;
  bool is_narrowed;  // fewer rows than tokens pass the last layer's second half
  std::vector<AdapterSpan> narrowed;  // spans of these
  const WantedQueries& queries;       // of the last layer; where they are few:
  const AttentionPlan& few_plan;
  Product few_product, keys_product;  // the last layer's qkv
};

// One thread's way through it.
class Walk {
 public:
  explicit Walk(Step& step)
      : step_(step), model_(step.model), batch_(step.batch), rows_(step.rows), num_rows_(step.batch.num_tokens),
        bytes_(element_bytes(step.model.type)), spans_(&step.batch.spans) {}

  void run() {
    embed();
    for (size_t index = 0; index < model_.layers.size(); ++index) {
      const DecoderLayer& layer = model_.layers[index];
      const bool is_last = index + 1 == model_.layers.size();
      const bool is_few = is_last && step_.queries.are_few;
      multiply(is_few ? step_.keys_product : layer.qkv, rows_.x, rows_.heads);
      prepare_heads(layer, is_few ? 0 : model_.num_query_heads);
      if (is_last && batch_.wants_logits && batch_.num_wanted == 0) return;
      if (is_few) compute_few_queries(layer);
      attend(layer, is_few ? step_.few_plan : plan_of(layer), is_few ? &step_.queries : nullptr);
      if (is_last && step_.is_narrowed) narrow();
      multiply(layer.output, rows_.attended, rows_.projected, true);
      if (model_.is_parallel) add_and_norm(layer.behind_attention, RowNorm{}, nullptr, layer.middle);
      else add_and_norm(layer.behind_attention, layer.middle, rows_.x);
      multiply(layer.gate_up, rows_.x, rows_.activated);
      if (!model_.is_gated) activate();
      multiply(layer.down, rows_.activated, rows_.projected, true);
      const RowNorm& next = is_last ? model_.final_norm : model_.layers[index + 1].input;
      add_and_norm(layer.behind_mlp, next, is_last && !batch_.wants_logits ? step_.out : rows_.x);
    }
    if (batch_.wants_logits) {
      multiply(model_.head, rows_.x, step_.out, true);
      shape_logits();
    }
  }

 private:
  template <typename Work>
  void stage(const Work& work) {
    step_.stages.run(stage_++, work);
  }

  void embed() {
    const EmbedArgs args{model_.embedding, batch_.ids, reinterpret_cast<float*>(rows_.residual), model_.hidden,
                         model_.embedding_scale, model_.type};
    const EmbedQuantArgs packed{model_.embedding, batch_.ids, rows_.residual, model_.hidden, model_.embedding_scale,
                                model_.embedding_format, ElementType::f32};
    const NormArgs norm = wide_norm(model_.layers[0].input, rows_.residual, rows_.x);
    stage([&](int64_t* next) {
      draw(next, num_rows_, rows_per_piece(model_.hidden), [&](int64_t begin, int64_t end) {
        if (model_.embedding_is_quantised) step_.table.embed_quant(packed, begin, end);
        else step_.table.embed(args, begin, end);
        step_.table.rms_norm(norm, begin, end);
      });
    });
  }

  void multiply(const Product& product, const char* x, char* out, bool float32_out = false) {
    if (is_adapted(product, *spans_)) return multiply_adapted(product, x, out, float32_out);
    const bool bf16 = model_.type == ElementType::bf16, bf16_out = bf16 && !float32_out;
    const int64_t in = product.in_features;
    LinearArgs args{x, in, product.packed, product.bias, out, num_rows_, in, product.out_features, bf16, bf16_out,
                    step_.threads};
    if (product.is_gated) {
      args.epilogue = Epilogue::gated;
      args.activation = model_.activation;
    }
    stage([&](int64_t* next) {
      if (product.is_quantised) step_.table.linear_quant(args, product.format, next);
      else step_.table.linear(args, next);
    });
  }

  void multiply_adapted(const Product& product, const char* x, char* out, bool float32_out) {
    const bool bf16 = model_.type == ElementType::bf16;
    const bool is_last_word = !product.is_gated && (float32_out || !bf16);  // the sums themselves are wanted
    char* sums = is_last_word ? out : rows_.summed;
    const int64_t in = product.in_features;
    const LinearArgs args{x, in, product.packed, product.panel_bias, sums, num_rows_, in, product.panel_rows, bf16, false,
                          step_.threads};
    stage([&](int64_t* next) {
      if (product.is_quantised) step_.table.linear_quant(args, product.format, next);
      else step_.table.linear(args, next);
    });
    const int64_t shares = 2 * step_.threads;
    const int64_t piece = std::clamp<int64_t>((num_rows_ + shares - 1) / shares, 1, kAdaptedRows);
    stage([&](int64_t* next) {
      draw(next, num_rows_, piece, [&](int64_t begin, int64_t end) {
        add_low_ranks(product, x, sums, begin, end);
        if (!is_last_word) finish(product, sums, out, begin, end);
      });
    });
  }

  // sums += (x @ a.T) @ b.T in rows [begin, end), each with its adapter's a and b.
  void add_low_ranks(const Product& product, const char* x, char* sums, int64_t begin, int64_t end) {
    const bool bf16 = model_.type == ElementType::bf16;
    const int64_t in = product.in_features, width = product.panel_rows;
    for (const AdapterSpan& span : *spans_) {
      const LowRank& low = product.added[static_cast<size_t>(span.adapter)];
      const int64_t first = std::max(begin, span.start), count = std::min(end, span.stop) - first;
      if (count <= 0 || low.a == nullptr) continue;
      char* inner = rows_.inner + first * model_.most_rank * bytes_;
      char* rows = sums + first * width * kWideBytes;
      int64_t drawn_a = 0, drawn_b = 0;  // all by this thread
      const LinearArgs a{x + first * in * bytes_, in, low.a, nullptr, inner, count, in, low.rank, bf16, bf16, 1};
      step_.table.linear(a, &drawn_a);
      LinearArgs b{inner, low.rank, low.b, nullptr, rows, count, low.rank, width, bf16, false, 1};
      b.epilogue = Epilogue::add;
      b.residual = rows;
      step_.table.linear(b, &drawn_b);
    }
  }

  // From float32 sums in the order of panels to what the product gives: rounded, and through the gate.
  void finish(const Product& product, char* sums, char* out, int64_t begin, int64_t end) {
    const bool bf16 = model_.type == ElementType::bf16;
    const int64_t width = product.panel_rows;
    char* rounded = !bf16 ? sums : product.is_gated ? rows_.rounded : out;
    if (bf16) {
      NormArgs round = norm_args(RowNorm{}, sums, rounded, width);
      round.type = model_.type;
      round.is_wide = true;
      step_.table.rms_norm(round, begin, end);
    }
    if (!product.is_gated) return;
    const int64_t panels = width / kPanelColumns, bytes = product.out_features * bytes_;
    const bool is_padded = product.out_features != panels * kGatedColumns;
    for (int64_t row = begin; row < end; ++row) {
      char* from = rounded + row * width * bytes_;
      char* to = out + row * bytes;
      const ActivationArgs args{from, is_padded ? from : to, kGatedColumns, model_.activation, model_.type};
      // In place a panel's result ends before the next panel begins.
      step_.table.gated_activation(args, 0, panels);
      if (is_padded) std::memcpy(to, from, static_cast<size_t>(bytes));
    }
  }

  // In place: norms and rotation of the query and key heads, then K and V into the cache. query_heads: 0 where queries
  // come later.
  void prepare_heads(const DecoderLayer& layer, int64_t query_heads) {
    const int64_t dim = model_.head_dim, kv_heads = model_.num_kv_heads, width = (query_heads + 2 * kv_heads) * dim;
    char* key = rows_.heads + query_heads * dim * bytes_;
    const RotaryArgs rotary = rotary_args(layer, rows_.heads, batch_.positions, query_heads + kv_heads, width);
    const CacheWrite write{key, key + kv_heads * dim * bytes_, layer.key_cache, layer.value_cache, batch_.slots,
                           width, dim, width, dim, layer.key_block_stride, layer.value_block_stride,
                           kv_heads, model_.block_size, dim, dim, model_.type};
    // Of many rows a tile's tokens together: its lines would else go from one core to the other and back.
    const bool is_many = num_rows_ >= 4 * kTileTokens * step_.threads;
    const int64_t piece = is_many ? kTileTokens : even_piece(num_rows_, rows_per_piece(width), step_.threads);
    stage([&](int64_t* next) {
      draw(next, num_rows_, piece, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          norm_heads(layer.query, rows_.heads + token * width * bytes_, query_heads);
          norm_heads(layer.key, key + token * width * bytes_, kv_heads);
        }
        if (layer.rope >= 0) step_.table.rotate(rotary, begin, end);
        step_.table.write_cache(write, begin, end);
      });
    });
  }

  // Only of those tokens that lead to a wanted row: the product, norms and rotation.
  void compute_few_queries(const DecoderLayer& layer) {
    const WantedQueries& queries = step_.queries;
    const int64_t count = queries.count(), row_bytes = model_.hidden * bytes_;
    if (count == 0) return;
    char *x = rows_.projected, *heads = few_heads(model_, batch_, rows_);  // projected: free until attention is over
    stage([&](int64_t* next) {
      draw(next, count, rows_per_piece(model_.hidden), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const char* from = rows_.x + queries.tokens[static_cast<size_t>(row)] * row_bytes;
          std::memcpy(x + row * row_bytes, from, static_cast<size_t>(row_bytes));
        }
      });
    });
    num_rows_ = count;
    multiply(step_.few_product, x, heads);
    num_rows_ = batch_.num_tokens;
    const int64_t query_heads = model_.num_query_heads, width = query_heads * model_.head_dim;
    const RotaryArgs rotary = rotary_args(layer, heads, queries.positions.data(), query_heads, width);
    stage([&](int64_t* next) {
      draw(next, count, rows_per_piece(width), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) norm_heads(layer.query, heads + row * width * bytes_, query_heads);
        if (layer.rope >= 0) step_.table.rotate(rotary, begin, end);
      });
    });
  }

  RotaryArgs rotary_args(const DecoderLayer& layer, char* heads, const int64_t* positions, int64_t count,
                         int64_t width) const {
    const RopeRows rope = layer.rope >= 0 ? model_.ropes[static_cast<size_t>(layer.rope)] : RopeRows{};
    return {heads, rope.cos, rope.sin, positions, width, count, model_.head_dim, rope.dim, model_.type};
  }

  void norm_heads(const RowNorm& norm, char* heads, int64_t count) {
    if (norm.weight == nullptr) return;
    step_.table.rms_norm(norm_args(norm, heads, heads, norm.dim), 0, count * model_.head_dim / norm.dim);
  }

  // few: only these queries, for which the plan was made.
  void attend(const DecoderLayer& layer, const AttentionPlan& plan, const WantedQueries* few) {
    const AttentionArgs args = attention_args(model_, batch_, rows_, layer, few);
    if (plan.count_pieces() > 0) {
      stage([&](int64_t* next) {
        char* scratch = static_cast<char*>(thread_scratch(static_cast<size_t>(plan.scratch_bytes())));
        draw(next, plan.count_pieces(), 1,
             [&](int64_t index, int64_t) { plan.run_piece(step_.table, args, index, scratch); });
      });
    }
    stage([&](int64_t* next) {
      char* scratch = static_cast<char*>(thread_scratch(static_cast<size_t>(plan.scratch_bytes())));
      draw(next, plan.count_merges(), 1,
           [&](int64_t index, int64_t) { plan.run_merge(step_.table, args, index, scratch); });
    });
  }

  const AttentionPlan& plan_of(const DecoderLayer& layer) const {
    for (const DecoderSteps::Kind& kind : step_.kinds) {
      if (kind.window == layer.window) return kind.plan;
    }
    return step_.kinds.front().plan;  // not reached: run() made one for every window
  }

  // From here on only the rows whose logits are wanted.
  void narrow() {
    const int64_t attended = model_.num_query_heads * model_.head_dim * bytes_, hidden = model_.hidden * bytes_;
    const int64_t residual = model_.hidden * kWideBytes;
    stage([&](int64_t* next) {
      draw(next, batch_.num_wanted, rows_per_piece(model_.hidden), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t from = batch_.wanted[row];
          const int64_t place = step_.queries.are_few ? step_.queries.rows[static_cast<size_t>(row)] : from;
          std::memcpy(rows_.wanted_attended + row * attended, rows_.attended + place * attended,
                      static_cast<size_t>(attended));
          std::memcpy(rows_.wanted_residual + row * residual, rows_.residual + from * residual,
                      static_cast<size_t>(residual));
          if (model_.is_parallel) {
            std::memcpy(rows_.wanted_x + row * hidden, rows_.x + from * hidden, static_cast<size_t>(hidden));
          }
        }
      });
    });
    rows_.attended = rows_.wanted_attended;
    rows_.residual = rows_.wanted_residual;
    if (model_.is_parallel) rows_.x = rows_.wanted_x;
    num_rows_ = batch_.num_wanted;
    spans_ = &step_.narrowed;
  }

  // residual += projected, normed first where a norm stands behind the half; out, if any: the next norm of the sum, or
  // the sum. before: a norm of what the residual stream was, if there is one, into x, which nobody reads any more.
  void add_and_norm(const RowNorm& behind, const RowNorm& following, char* out, const RowNorm& before = {}) {
    const NormArgs earlier = wide_norm(before, rows_.residual, rows_.x);
    const NormArgs inner = norm_args(behind, rows_.projected, rows_.projected, model_.hidden);
    NormArgs outer = wide_norm(following, rows_.projected, out);
    outer.residual = rows_.residual;
    outer.factor = model_.residual_scale;
    stage([&](int64_t* next) {
      draw(next, num_rows_, even_piece(num_rows_, rows_per_piece(model_.hidden), step_.threads),
           [&](int64_t begin, int64_t end) {
        if (before.weight != nullptr) step_.table.rms_norm(earlier, begin, end);
        if (behind.weight != nullptr) step_.table.rms_norm(inner, begin, end);
        step_.table.rms_norm(outer, begin, end);
      });
    });
  }

  // In place, where no gate does it within the product.
  void activate() {
    const ActivationArgs args{rows_.activated, rows_.activated, 0, model_.activation, model_.type};
    stage([&](int64_t* next) {
      draw(next, num_rows_ * model_.intermediate, kElementsPerPiece,
           [&](int64_t begin, int64_t end) { step_.table.activation(args, begin, end); });
    });
  }

  void shape_logits() {
    if (model_.logits_scale == 1 && model_.logits_softcap == 0) return;
    const LogitArgs args{reinterpret_cast<float*>(step_.out), model_.logits_scale, model_.logits_softcap};
    stage([&](int64_t* next) {
      draw(next, num_rows_ * model_.head.out_features, kElementsPerPiece,
           [&](int64_t begin, int64_t end) { step_.table.shape_logits(args, begin, end); });
    });
  }

  NormArgs norm_args(const RowNorm& norm, const char* x, char* out, int64_t dim) const {
    return {x, norm.weight, nullptr, out, 1, dim, 0, dim, norm.eps, norm.variant, norm.type};
  }

  // From float32 to the model's type.
  NormArgs wide_norm(const RowNorm& norm, const char* x, char* out) const {
    NormArgs args = norm_args(norm, x, out, model_.hidden);
    args.type = model_.type;
    args.is_wide = true;
    return args;
  }

 public:
  // Where few queries lie: behind K and V of all tokens.
  static char* few_heads(const DecoderModel& model, const DecoderBatch& batch, const DecoderSteps::Rows& rows) {
    return rows.heads + batch.num_tokens * 2 * model.num_kv_heads * model.head_dim * element_bytes(model.type);
  }

  // few: of the last layer, where its queries are.
  static AttentionArgs attention_args(const DecoderModel& model, const DecoderBatch& batch,
                                      const DecoderSteps::Rows& rows, const DecoderLayer& layer,
                                      const WantedQueries* few) {
    AttentionArgs args{};
    args.query = few == nullptr ? rows.heads : few_heads(model, batch, rows);
    args.out = rows.attended;
    args.key_cache = layer.key_cache;
    args.value_cache = layer.value_cache;
    args.block_tables = batch.block_tables;
    args.query_start = few == nullptr ? batch.query_start : few->start.data();
    args.seq_lens = batch.seq_lens;
    args.table_stride = batch.table_stride;
    args.query_head_stride = args.out_head_stride = model.head_dim;
    args.out_token_stride = model.num_query_heads * model.head_dim;
    args.query_token_stride = args.out_token_stride + (few == nullptr ? 2 * model.num_kv_heads * model.head_dim : 0);
    args.key_block_stride = layer.key_block_stride;
    args.value_block_stride = layer.value_block_stride;
    args.num_kv_heads = model.num_kv_heads;
    args.group = model.num_query_heads / model.num_kv_heads;
    args.block_size = model.block_size;
    args.key_dim = args.value_dim = model.head_dim;
    args.window = layer.window;
    args.scale = model.scale;
    args.softcap = model.softcap;
    args.causal = true;
    args.type = model.type;
    return args;
  }

 private:
  Step& step_;
  const DecoderModel& model_;
  const DecoderBatch& batch_;
  DecoderSteps::Rows rows_;
  int64_t num_rows_, bytes_;
  const std::vector<AdapterSpan>* spans_;  // of the rows that are computed now
  int64_t stage_ = 0;
};

}  // namespace

void DecoderSteps::run(const DecoderModel& model, const DecoderBatch& batch, const KernelTable& table, int threads,
                       char* out) {
  Step step{model, batch, table, threads, out, kinds_, lay_out(model, batch), stages_, !takes_all_rows(batch),
            wanted_spans(batch), queries_, few_plan_, {}, {}};
  const auto plan = [&](AttentionPlan& made, const DecoderLayer& layer, const WantedQueries* few) {
    made.make(Walk::attention_args(model, batch, step.rows, layer, few), batch.num_seqs, threads, kCutAbove);
  };
  size_t num_kinds = 0;
  for (const DecoderLayer& layer : model.layers) {
    const auto end = kinds_.begin() + static_cast<int64_t>(num_kinds);
    if (std::any_of(kinds_.begin(), end, [&](const Kind& kind) { return kind.window == layer.window; })) continue;
    if (num_kinds == kinds_.size()) kinds_.emplace_back();
    Kind& kind = kinds_[num_kinds++];
    kind.window = layer.window;
    plan(kind.plan, layer, nullptr);
  }
  queries_.are_few = step.is_narrowed && queries_.find(model, batch);
  const int64_t width = model.num_query_heads * model.head_dim;
  if (queries_.are_few) {
    const DecoderLayer& last = model.layers.back();
    plan(few_plan_, last, &queries_);
    step.few_product = columns_of(last.qkv, 0, width, model.type == ElementType::bf16);
    step.keys_product = columns_of(last.qkv, width, last.qkv.out_features, model.type == ElementType::bf16);
  }
  // Tokens past the last sequence attend to nothing, in any layer.
  const int64_t used = batch.query_start[batch.num_seqs], bytes = width * element_bytes(model.type);
  std::memset(step.rows.attended + used * bytes, 0, static_cast<size_t>((batch.num_tokens - used) * bytes));
  stages_.reset();
  run_team(threads, [](void* shared) { Walk(*static_cast<Step*>(shared)).run(); }, &step);
  stages_.rethrow();
}

}  // namespace pagemill
