// A whole decoder of the Llama shape as one piece of work for a team of threads: what it is made of, what a step brings.
//
// Knows neither torch nor instruction sets: kernels come from the table, pointers from decoder_op.cpp. Every number is
// rounded where the single ops round it, so a step gives the bits that those ops called one by one would give.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "cpu/attention_plan.h"
#include "cpu/decoder_wanted.h"
#include "cpu/kernels.h"
#include "cpu/team.h"

namespace pagemill {

struct RowNorm {
  const char* weight = nullptr;  // null: there is no such norm
  float eps = 0;
  NormVariant variant = NormVariant::llama;
  int64_t dim = 0;                      // elements normalised together
  ElementType type = ElementType::f32;  // of the weight
};

// What an adapter adds to a product: (x @ a.T) @ b.T, both packed.
struct LowRank {
  const char* a = nullptr;  // [rank, in_features]; null: the adapter leaves the product alone
  const char* b = nullptr;  // [Product::panel_rows, rank]
  int64_t rank = 0;
};

// out = x @ weight.T + bias.
struct Product {
  const void* packed = nullptr;
  const float* bias = nullptr;  // [out_features] or null
  int64_t in_features = 0, out_features = 0;
  bool is_gated = false;  // packed so: the result is activation(first half) * second half
  bool is_quantised = false;
  QuantFormat format{};  // if quantised
  // With adapters the product is first a plain one, of the weight's rows as its panels hold them: gated, 16 of the gate and
  // then theirs of the up half, padding included.
  int64_t panel_rows = 0;
  const float* panel_bias = nullptr;  // [panel_rows] or null
  std::vector<LowRank> added{};       // by adapter, from 0
};

struct DecoderLayer {
  RowNorm input, behind_attention, middle, behind_mlp;  // those behind a half, in float32, stand before its sum
  RowNorm query, key;                                   // per head, or of all heads together
  Product qkv, output, gate_up, down;
  int64_t window = 0;  // tokens a query sees; 0: all
  int64_t rope = 0;    // negative: none
  char* key_cache = nullptr;    // [num_blocks, num_kv_heads, block_size, head_dim], as in cache.h
  char* value_cache = nullptr;  // likewise
  int64_t key_block_stride = 0, value_block_stride = 0;  // elements
};

struct RopeRows {
  const char* cos = nullptr;  // [num_positions, dim]
  const char* sin = nullptr;  // likewise, the first half negated
  int64_t dim = 0;            // at most head_dim
};

struct DecoderModel {
  ElementType type = ElementType::f32;  // of weights, activations and caches; the residual stream is float32
  int64_t hidden = 0, intermediate = 0, num_query_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 0, softcap = 0;  // of attention; softcap 0: none
  float embedding_scale = 1, residual_scale = 1, logits_scale = 1, logits_softcap = 0;
  ActivationKind activation = ActivationKind::silu;
  bool is_gated = true;      // the MLP: activation(gate) * up; else activation(up)
  bool is_parallel = false;  // the MLP reads what attention reads, through a middle norm of its own or the same
  const char* embedding = nullptr;  // [vocabulary, hidden], or packed as for embed_quant
  bool embedding_is_quantised = false;
  QuantFormat embedding_format{};  // if it is
  RowNorm final_norm;
  Product head;
  std::vector<DecoderLayer> layers;
  std::vector<RopeRows> ropes;
  int64_t block_size = 0;
  int64_t num_adapters = 0, most_rank = 0;  // the greatest rank of any product of theirs
};

// Rows [start, stop) have this adapter, counted from 0.
struct AdapterSpan {
  int64_t adapter, start, stop;
};

// What paged attention knows of a step (attention.h), and the tokens. Checked by who made it.
struct DecoderBatch {
  const int64_t* ids;        // [num_tokens]
  const int64_t* positions;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]; negative: K and V are not kept
  const int32_t* block_tables;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int64_t num_tokens, num_seqs, table_stride;
  bool wants_logits;      // of the tokens below; else the hidden states of all are asked for
  const int64_t* wanted;  // [num_wanted]
  int64_t num_wanted;
  std::vector<AdapterSpan> spans{};  // of tokens, ascending and disjoint; the others have no adapter
};

// The memory of steps, kept from one to the next, and the walk through one. One step at a time.
class DecoderSteps {
 public:
  // out: logits, float32 [num_wanted, head.out_features], or hidden states [num_tokens, hidden] behind the last norm.
  // Throws std::bad_alloc.
  void run(const DecoderModel& model, const DecoderBatch& batch, const KernelTable& table, int threads, char* out);

  // Of activations, in a step of so many tokens.
  static int64_t count_bytes(const DecoderModel& model, int64_t num_tokens, int64_t num_wanted);

  struct Kind {  // of layers: those that look back equally far share a plan
    int64_t window;
    AttentionPlan plan;
  };
  struct Rows {  // activations, all [num_tokens, ...]
    char *residual, *projected;  // float32
    char *x, *heads, *attended, *activated;
    char *wanted_residual, *wanted_x, *wanted_attended;  // [num_wanted, ...]
    char *summed, *rounded, *inner;  // with adapters: a product's rows in float32 and rounded, and x @ a.T
  };

 private:
  struct Aligned {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };

  Rows lay_out(const DecoderModel& model, const DecoderBatch& batch);

  std::vector<Kind> kinds_;
  WantedQueries queries_;    // of the last layer; if they are few:
  AttentionPlan few_plan_;
  std::unique_ptr<char[], Aligned> memory_;
  int64_t memory_bytes_ = 0;
  Stages stages_;
};

constexpr int64_t kWideBytes = sizeof(float);  // an element of the residual stream, or of a sum not yet rounded

// Stages of one layer at most: what bounds the number of layers. One layer's worth is kept for those at the start and the
// end and for the last layer's few queries.
constexpr int64_t kStagesPerLayer = 15;
constexpr int64_t kMostLayers = Stages::kMost / kStagesPerLayer - 1;

}  // namespace pagemill
