// A decoder of two layers that differ in all they can, fed three sequences in four steps: prompts, a chunk beside a
// decode, decodes; without adapters, and with others for two of the sequences. Expected numbers come from loops in double
// that know neither caches nor batches.
#include "decoder_cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cpu/decoder.h"
#include "cpu/isa.h"

namespace pagemill {
namespace {

constexpr int64_t kHidden = 48, kInner = 40, kQueryHeads = 8, kKvHeads = 2, kDim = 20, kVocabulary = 67;
constexpr int64_t kAttended = kQueryHeads * kDim, kHeads = kAttended + 2 * kKvHeads * kDim;
constexpr int64_t kBlock = 16, kMaxBlocks = 20, kPositions = 300, kLayers = 2;
constexpr double kEps = 1e-5, kSoftcap = 10, kEmbeddingScale = 2;
using Doubles = std::vector<double>;

struct Random {
  uint64_t state = 88172645463325252ull;
  double next() {  // uniform in [-1, 1)
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<double>(state >> 40) / (1 << 23) - 1.0;
  }
};

// Numbers in an element type, and the same in double.
struct Numbers {
  std::vector<char> bytes;
  Doubles exact;

  Numbers() = default;
  Numbers(Doubles values, ElementType type) : bytes(values.size() * element_bytes(type)), exact(std::move(values)) {
    for (size_t i = 0; i < exact.size(); ++i) {
      const float x = static_cast<float>(exact[i]);
      uint32_t word;
      std::memcpy(&word, &x, 4);
      if (type == ElementType::bf16) word = (word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000;
      float kept;
      std::memcpy(&kept, &word, 4);
      exact[i] = kept;
      if (type == ElementType::bf16) word >>= 16;
      std::memcpy(&bytes[i * element_bytes(type)], &word, element_bytes(type));
    }
  }
};

Doubles draw_numbers(Random& random, int64_t count, double scale, double middle = 0) {
  Doubles values(static_cast<size_t>(count));
  for (double& x : values) x = middle + random.next() * scale;
  return values;
}

struct Norm {
  Numbers weight;
  RowNorm row;

  void operator()(double* x, int64_t dim) const {
    if (row.weight == nullptr) return;
    double square = 0;
    for (int64_t i = 0; i < dim; ++i) square += x[i] * x[i];
    const double scale = 1 / std::sqrt(square / static_cast<double>(dim) + kEps);
    for (int64_t i = 0; i < dim; ++i) {
      x[i] *= scale * (weight.exact[i] + (row.variant == NormVariant::gemma ? 1 : 0));
    }
  }
};

struct Added {  // by an adapter
  Doubles a, b;  // [rank, in], [out, rank]; empty: nothing
  std::vector<char> packed_a, packed_b;
};

constexpr int64_t kAdapters = 2, kNone = -1;

struct Matrix {
  Doubles weight;  // [out, in]
  std::vector<float> bias, panel_bias;
  std::vector<char> packed;
  std::array<Added, kAdapters> added;
  Product product;

  Doubles operator()(const Doubles& x, int64_t adapter = kNone) const {
    const int64_t in = product.in_features, out = static_cast<int64_t>(weight.size()) / in;
    Doubles result(static_cast<size_t>(out));
    for (int64_t n = 0; n < out; ++n) {
      result[n] = bias.empty() ? 0 : bias[n];
      for (int64_t k = 0; k < in; ++k) result[n] += weight[n * in + k] * x[k];
    }
    if (adapter == kNone) return result;
    const Added& more = added[adapter];
    for (int64_t r = 0, rank = static_cast<int64_t>(more.a.size()) / in; r < rank; ++r) {
      double inner = 0;
      for (int64_t k = 0; k < in; ++k) inner += more.a[r * in + k] * x[k];
      for (int64_t n = 0; n < out; ++n) result[n] += more.b[n * rank + r] * inner;
    }
    return result;
  }
};

struct Layer {
  Norm input, behind_attention, middle, behind_mlp, query, key;
  Matrix qkv, output, gate_up, down;
};

double silu(double x) { return x / (1 + std::exp(-x)); }

class Tiny {
 public:
  // `other`: no gate, a scaled residual stream, and the second half's product quantised.
  Tiny(ElementType type, bool other, bool adapted) : type_(type), is_gated_(!other), is_adapted_(adapted) {
    model_.type = type;
    model_.hidden = kHidden;
    model_.intermediate = kInner;
    model_.num_query_heads = kQueryHeads;
    model_.num_kv_heads = kKvHeads;
    model_.head_dim = kDim;
    model_.scale = 1 / std::sqrt(static_cast<float>(kDim));
    model_.softcap = kSoftcap;
    model_.embedding_scale = kEmbeddingScale;
    model_.block_size = kBlock;
    model_.is_gated = is_gated_;
    model_.residual_scale = other ? 0.5f : 1.0f;
    embedding_ = Numbers(draw_numbers(random_, kVocabulary * kHidden, 1), type);
    model_.embedding = embedding_.bytes.data();
    fill_norm(final_norm_, kHidden, NormVariant::llama);
    model_.final_norm = final_norm_.row;
    fill(head_, kHidden, kVocabulary, false);
    model_.head = head_.product;
    fill_layers(other);
    fill_ropes();
  }

  int64_t adapter_of(int64_t sequence) const { return is_adapted_ ? sequence - 1 : kNone; }

  // Rows of `ids` behind the last norm, and their logits.
  void expect(const std::vector<int64_t>& ids, int64_t adapter, std::vector<Doubles>& states, std::vector<Doubles>& logits) const {
    std::vector<Doubles> residual;
    for (int64_t id : ids) {
      const auto row = embedding_.exact.begin() + id * kHidden;
      residual.emplace_back(row, row + kHidden);
      for (double& x : residual.back()) x *= kEmbeddingScale;
    }
    for (int64_t i = 0; i < kLayers; ++i) run_layer(layers_[i], i, adapter, residual);
    states = residual;
    for (Doubles& row : states) {
      final_norm_(row.data(), kHidden);
      logits.push_back(head_(row));
    }
  }

  // With caches of its own; what is not written in them is NaN.
  DecoderModel attach(std::vector<std::vector<char>>& caches, int64_t num_blocks) const {
    DecoderModel model = model_;
    caches.assign(2 * kLayers, std::vector<char>(num_blocks * kKvHeads * kBlock * kDim * element_bytes(type_), '\xff'));
    for (int64_t i = 0; i < kLayers; ++i) {
      model.layers[i].key_cache = caches[2 * i].data();
      model.layers[i].value_cache = caches[2 * i + 1].data();
      model.layers[i].key_block_stride = model.layers[i].value_block_stride = kKvHeads * kBlock * kDim;
    }
    return model;
  }

 private:
  void fill_norm(Norm& norm, int64_t dim, NormVariant variant, bool is_float32 = false) {
    const ElementType type = is_float32 ? ElementType::f32 : type_;
    norm.weight = Numbers(draw_numbers(random_, dim, 0.3, variant == NormVariant::gemma ? 0 : 1), type);
    norm.row = {norm.weight.bytes.data(), static_cast<float>(kEps), variant, dim, type};
  }

  void fill(Matrix& matrix, int64_t in, int64_t out, bool has_bias, bool gated = false) {
    const bool bf16 = type_ == ElementType::bf16;
    const Numbers weight(draw_numbers(random_, out * in, 2 / std::sqrt(static_cast<double>(in))), type_);
    const int64_t panels = packed_panels(out, gated);
    matrix.weight = weight.exact;
    matrix.packed.resize(static_cast<size_t>(panels * packed_steps(in, bf16) * kPanelColumns * 4));
    kernels().pack_linear({weight.bytes.data(), in, matrix.packed.data(), out, in, bf16, gated}, 0, panels);
    matrix.product = {matrix.packed.data(), nullptr, in, gated ? out / 2 : out};
    matrix.product.is_gated = gated;
    if (has_bias) fill_bias(matrix, out);
  }

  void fill_quantised(Matrix& matrix, int64_t in, int64_t out) {
    constexpr QuantFormat kFormat{8, false};
    std::vector<uint8_t> values(static_cast<size_t>(out * in));
    const std::vector<uint16_t> scales(static_cast<size_t>(out * quant_groups(in)), 0x1c00);  // 2^-8
    for (uint8_t& value : values) value = static_cast<uint8_t>(128 + random_.next() * 127);
    for (uint8_t value : values) matrix.weight.push_back((value - 128) / 256.0);
    const int64_t panels = (out + kPanelColumns - 1) / kPanelColumns;
    matrix.packed.resize(static_cast<size_t>(panels * quant_groups(in) * quant_group_bytes(kFormat)));
    kernels().pack_linear_quant({values.data(), in, scales.data(), nullptr, matrix.packed.data(), out, in, kFormat, false}, 0,
                                panels);
    matrix.product = {matrix.packed.data(), nullptr, in, out};
    matrix.product.is_quantised = true;
    matrix.product.format = kFormat;
  }

  void fill_bias(Matrix& matrix, int64_t out) {
    for (int64_t n = 0; n < out; ++n) matrix.bias.push_back(static_cast<float>(random_.next()));
    matrix.product.bias = matrix.bias.data();
  }

  // After the weight and the bias.
  void fill_added(Matrix& matrix, int64_t rank) {
    if (!is_adapted_) return;
    Product& product = matrix.product;
    const int64_t in = product.in_features, out = static_cast<int64_t>(matrix.weight.size()) / in;
    std::vector<int64_t> order;  // the weight's row at each place of the panels; past its end: padding
    product.panel_rows = product.is_gated ? packed_panels(out, true) * kPanelColumns : out;
    for (int64_t place = 0; place < product.panel_rows; ++place) {
      const int64_t column = place / kPanelColumns * kGatedColumns + place % kGatedColumns;
      const bool is_padding = column >= product.out_features, is_up = place % kPanelColumns >= kGatedColumns;
      order.push_back(!product.is_gated ? place : is_padding ? out : column + (is_up ? product.out_features : 0));
    }
    if (product.bias != nullptr) {
      for (int64_t row : order) matrix.panel_bias.push_back(row < out ? matrix.bias[row] : 0);
      product.panel_bias = matrix.panel_bias.data();
    }
    for (int64_t adapter = 0; adapter < kAdapters; ++adapter) {
      const int64_t own = rank + adapter;
      product.added.push_back({});
      if (adapter == 1 && rank % 2 == 0) continue;  // this one leaves some products alone
      Added& added = matrix.added[adapter];
      const Numbers a(draw_numbers(random_, own * in, 1 / std::sqrt(static_cast<double>(in))), type_);
      const Numbers b(draw_numbers(random_, out * own, 0.5), type_);
      Doubles rows;
      for (int64_t row : order) {
        for (int64_t r = 0; r < own; ++r) rows.push_back(row < out ? b.exact[row * own + r] : 0);
      }
      added.a = a.exact;
      added.b = b.exact;
      pack(a, in, own, added.packed_a);
      pack(Numbers(rows, type_), own, product.panel_rows, added.packed_b);
      product.added.back() = {added.packed_a.data(), added.packed_b.data(), own};
      model_.most_rank = std::max(model_.most_rank, own);
    }
    model_.num_adapters = kAdapters;
  }

  void pack(const Numbers& weight, int64_t in, int64_t out, std::vector<char>& packed) {
    const bool bf16 = type_ == ElementType::bf16;
    const int64_t panels = packed_panels(out, false);
    packed.resize(static_cast<size_t>(panels * packed_steps(in, bf16) * kPanelColumns * 4));
    kernels().pack_linear({weight.bytes.data(), in, packed.data(), out, in, bf16, false}, 0, panels);
  }

  void fill_layers(bool is_quantised) {
    for (int64_t i = 0; i < kLayers; ++i) {
      const bool second = i == 1;
      Layer& layer = layers_[i];
      fill_norm(layer.input, kHidden, second ? NormVariant::gemma : NormVariant::llama);
      fill_norm(layer.middle, kHidden, NormVariant::float32);
      if (second) {
        fill_norm(layer.behind_attention, kHidden, NormVariant::gemma, true);
        fill_norm(layer.behind_mlp, kHidden, NormVariant::llama, true);
      } else {
        fill_norm(layer.query, kDim, NormVariant::llama);
        fill_norm(layer.key, kDim, NormVariant::gemma);
      }
      fill(layer.qkv, kHidden, kHeads, true);
      fill(layer.output, kAttended, kHidden, second);
      fill(layer.gate_up, kHidden, is_gated_ ? 2 * kInner : kInner, true, is_gated_);
      if (is_quantised) fill_quantised(layer.down, kInner, kHidden);
      else fill(layer.down, kInner, kHidden, !second);
      fill_added(layer.qkv, 5);
      fill_added(layer.output, 4);
      fill_added(layer.gate_up, 7 + i);
      fill_added(layer.down, 3);
      DecoderLayer made;
      made.input = layer.input.row;
      made.behind_attention = layer.behind_attention.row;
      made.middle = layer.middle.row;
      made.behind_mlp = layer.behind_mlp.row;
      made.query = layer.query.row;
      made.key = layer.key.row;
      made.qkv = layer.qkv.product;
      made.output = layer.output.product;
      made.gate_up = layer.gate_up.product;
      made.down = layer.down.product;
      made.window = second ? 5 : 0;
      made.rope = 1 - i;
      model_.layers.push_back(made);
    }
  }

  void fill_ropes() {
    for (int64_t rope = 0; rope < 2; ++rope) {
      Doubles cos, sin;
      for (int64_t position = 0; position < kPositions; ++position) {
        for (int64_t d = 0; d < kDim; ++d) {
          const double turn = static_cast<double>(d % (kDim / 2)) / (kDim / 2);
          const double angle = static_cast<double>(position) * std::pow(rope ? 100.0 : 10000.0, -turn);
          cos.push_back(std::cos(angle));
          sin.push_back(d < kDim / 2 ? -std::sin(angle) : std::sin(angle));
        }
      }
      ropes_[rope] = {Numbers(cos, type_), Numbers(sin, type_)};
      model_.ropes.push_back({ropes_[rope][0].bytes.data(), ropes_[rope][1].bytes.data(), kDim});
    }
  }

  void run_layer(const Layer& layer, int64_t index, int64_t adapter, std::vector<Doubles>& residual) const {
    std::vector<Doubles> heads;
    for (size_t position = 0; position < residual.size(); ++position) {
      Doubles x = residual[position];
      layer.input(x.data(), kHidden);
      heads.push_back(layer.qkv(x, adapter));
      for (int64_t head = 0; head < kQueryHeads + kKvHeads; ++head) {
        double* values = &heads.back()[head * kDim];
        (head < kQueryHeads ? layer.query : layer.key)(values, kDim);
        turn(values, ropes_[1 - index], static_cast<int64_t>(position));
      }
    }
    for (size_t position = 0; position < residual.size(); ++position) {
      const Doubles attended = attend(heads, static_cast<int64_t>(position), index == 1 ? 5 : kPositions);
      add(residual[position], layer.output(attended, adapter), layer.behind_attention);
      Doubles x = residual[position];
      layer.middle(x.data(), kHidden);
      const Doubles both = layer.gate_up(x, adapter);
      Doubles inner(kInner);
      for (int64_t i = 0; i < kInner; ++i) inner[i] = silu(both[i]) * (is_gated_ ? both[kInner + i] : 1);
      add(residual[position], layer.down(inner, adapter), layer.behind_mlp);
    }
  }

  void add(Doubles& residual, Doubles x, const Norm& behind) const {
    behind(x.data(), kHidden);
    for (int64_t i = 0; i < kHidden; ++i) residual[i] += model_.residual_scale * x[i];
  }

  static void turn(double* head, const std::array<Numbers, 2>& rope, int64_t position) {
    const double *cos = &rope[0].exact[position * kDim], *sin = &rope[1].exact[position * kDim];
    for (int64_t d = 0, half = kDim / 2; d < half; ++d) {
      const double low = head[d], high = head[d + half];
      head[d] = low * cos[d] + high * sin[d];
      head[d + half] = high * cos[d + half] + low * sin[d + half];
    }
  }

  static Doubles attend(const std::vector<Doubles>& heads, int64_t position, int64_t window) {
    Doubles attended(kAttended);
    for (int64_t head = 0; head < kQueryHeads; ++head) {
      const int64_t key = kAttended + head / (kQueryHeads / kKvHeads) * kDim, value = key + kKvHeads * kDim;
      double total = 0;
      for (int64_t p = std::max<int64_t>(0, position - window + 1); p <= position; ++p) {
        double score = 0;
        for (int64_t d = 0; d < kDim; ++d) score += heads[position][head * kDim + d] * heads[p][key + d];
        const double weight = std::exp(std::tanh(score / std::sqrt(double{kDim}) / kSoftcap) * kSoftcap);
        total += weight;
        for (int64_t d = 0; d < kDim; ++d) attended[head * kDim + d] += weight * heads[p][value + d];
      }
      for (int64_t d = 0; d < kDim; ++d) attended[head * kDim + d] /= total;
    }
    return attended;
  }

  ElementType type_;
  bool is_gated_, is_adapted_;
  Random random_;
  Numbers embedding_;
  Norm final_norm_;
  Matrix head_;
  std::array<Layer, kLayers> layers_;
  std::array<std::array<Numbers, 2>, 2> ropes_;  // cos, sin
  DecoderModel model_;
};

constexpr int64_t kSequences = 3;
constexpr int64_t kLengths[kSequences] = {293, 35, 9};

int64_t id_of(int64_t sequence, int64_t position) { return (sequence * 31 + position * position * 7 + 3) % kVocabulary; }

// What one step computes: so many tokens of each sequence, from where the last step ended; then padding, then whose
// logits are wanted (indices of tokens; none: the states of all).
struct Feed {
  int64_t counts[kSequences];
  int64_t padding;
  std::vector<int64_t> wanted;
};

const Feed kFeeds[] = {
    {{290, 20, 0}, 0, {289, 300, 309}},
    {{1, 13, 7}, 0, {}},
    {{1, 1, 1}, 0, {0, 1, 2}},
    {{1, 1, 1}, 2, {2, 0}},
};

struct Row {
  int64_t sequence, position;
  bool is_logits;
};

// Runs all steps on a fresh cache. Rows of results, one behind the other; `rows` says what each is.
std::vector<std::vector<char>> run_feeds(const Tiny& tiny, ElementType type, int threads, std::vector<Row>& rows) {
  std::vector<std::vector<char>> caches, results;
  const DecoderModel model = tiny.attach(caches, kSequences * kMaxBlocks);
  DecoderSteps steps;
  int64_t done[kSequences] = {};
  for (const Feed& feed : kFeeds) {
    std::vector<int64_t> ids, positions, slots;
    std::vector<int32_t> tables, starts{0}, lengths;
    std::vector<Row> tokens;
    std::vector<AdapterSpan> spans;
    for (int64_t s = 0; s < kSequences; ++s) {
      if (feed.counts[s] == 0) continue;
      for (int64_t block = 0; block < kMaxBlocks; ++block) tables.push_back(static_cast<int32_t>(block * kSequences + s));
      for (int64_t i = 0; i < feed.counts[s]; ++i, ++done[s]) {
        ids.push_back(id_of(s, done[s]));
        positions.push_back(done[s]);
        slots.push_back((done[s] / kBlock * kSequences + s) * kBlock + done[s] % kBlock);
        tokens.push_back({s, done[s], !feed.wanted.empty()});
      }
      const int64_t stop = static_cast<int64_t>(ids.size()), adapter = tiny.adapter_of(s);
      if (adapter != kNone) spans.push_back({adapter, stop - feed.counts[s], stop});
      starts.push_back(static_cast<int32_t>(stop));
      lengths.push_back(static_cast<int32_t>(done[s]));
    }
    for (int64_t i = 0; i < feed.padding; ++i) {
      ids.push_back(0);
      positions.push_back(0);
      slots.push_back(-1);
    }
    const int64_t num_wanted = static_cast<int64_t>(feed.wanted.size());
    const DecoderBatch batch{ids.data(), positions.data(), slots.data(), tables.data(), starts.data(), lengths.data(),
                             static_cast<int64_t>(ids.size()), static_cast<int64_t>(lengths.size()), kMaxBlocks,
                             num_wanted > 0, feed.wanted.data(), num_wanted, spans};
    const int64_t bytes = num_wanted > 0 ? kVocabulary * 4 : kHidden * element_bytes(type);
    const int64_t num_rows = num_wanted > 0 ? num_wanted : batch.num_tokens;
    std::vector<char> out(static_cast<size_t>(num_rows * bytes));
    steps.run(model, batch, kernels(), threads, out.data());
    for (int64_t i = 0; i < num_rows; ++i) {
      rows.push_back(tokens[static_cast<size_t>(num_wanted > 0 ? feed.wanted[i] : i)]);
      results.emplace_back(out.begin() + i * bytes, out.begin() + (i + 1) * bytes);
    }
  }
  return results;
}

double value_at(const std::vector<char>& bytes, int64_t index, bool bf16) {
  uint32_t word = 0;
  std::memcpy(&word, &bytes[index * (bf16 ? 2 : 4)], bf16 ? 2 : 4);
  if (bf16) word <<= 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// Root of the mean square of the differences, over that of the values.
double relative_error(const Tiny& tiny, ElementType type, const std::vector<std::vector<char>>& results,
                      const std::vector<Row>& rows) {
  std::vector<Doubles> states[kSequences], logits[kSequences];
  for (int64_t s = 0; s < kSequences; ++s) {
    std::vector<int64_t> ids;
    for (int64_t p = 0; p < kLengths[s]; ++p) ids.push_back(id_of(s, p));
    tiny.expect(ids, tiny.adapter_of(s), states[s], logits[s]);
  }
  double difference = 0, size = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const Row& row = rows[r];
    const Doubles& expected = (row.is_logits ? logits : states)[row.sequence][row.position];
    for (size_t i = 0; i < expected.size(); ++i) {
      const double got = value_at(results[r], static_cast<int64_t>(i), type == ElementType::bf16 && !row.is_logits);
      difference += (got - expected[i]) * (got - expected[i]);
      size += expected[i] * expected[i];
    }
  }
  return std::sqrt(difference / size);
}

}  // namespace

int run_decoder_cases(const std::string& level) {
  struct Case {
    const char* name;
    ElementType type;
    bool other, adapted;
    double allowed;
  };
  int failed = 0;
  for (const Case& c : {Case{"decoder f32", ElementType::f32, false, false, 1e-5},
                        Case{"decoder bf16", ElementType::bf16, false, false, 2e-2},
                        Case{"decoder f32, no gate, quantised", ElementType::f32, true, false, 2e-2},
                        Case{"decoder f32, adapters", ElementType::f32, false, true, 1e-5},
                        Case{"decoder bf16, adapters", ElementType::bf16, false, true, 2e-2},
                        Case{"decoder f32, no gate, quantised, adapters", ElementType::f32, true, true, 2e-2}}) {
    const Tiny tiny(c.type, c.other, c.adapted);
    std::vector<Row> rows, same;
    const std::vector<std::vector<char>> results = run_feeds(tiny, c.type, 1, rows);
    const double error = relative_error(tiny, c.type, results, rows);
    if (!(error < c.allowed)) std::printf("%s: %s: off by %.1e\n", level.c_str(), c.name, error);
    bool equal = true;
    for (int threads : {2, 3}) equal = run_feeds(tiny, c.type, threads, same) == results && equal;
    if (!equal) std::printf("%s: %s: bits depend on the number of threads\n", level.c_str(), c.name);
    failed += !(error < c.allowed) || !equal;
  }
  return failed;
}

}  // namespace pagemill
