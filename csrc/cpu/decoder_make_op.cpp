// decoder_create, decoder_adapt and decoder_destroy: what stays is checked once, here.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <string>

#include "cpu/activation_kind.h"
#include "cpu/decoder_handle.h"
#include "cpu/norm_variant.h"
#include "linear_check.h"
#include "op_list.h"

namespace pagemill {
namespace {

// Handles are small numbers, never used twice. The table is never destroyed: torch may be gone by then.
struct Table {
  std::mutex lock;
  std::map<int64_t, std::shared_ptr<Decoder>> decoders;
  int64_t next = 1;
};

Table& handles() {
  static Table* const made = new Table;
  return *made;
}

// Reads the description that engine/models/native_decoder.py writes.
class Maker {
 public:
  Maker(Decoder& decoder, ScalarType dtype) : decoder_(decoder), dtype_(dtype) {}

  // is_wide: of float32 rows, in float32.
  RowNorm norm(const char* name, const Tensor& weight, int64_t dim, double eps, const std::string& variant,
               bool is_wide = false) {
    if (weight.numel() == 0) return {};
    check_cpu(kOp, name, weight);
    check_dtype(kOp, name, weight, is_wide ? ScalarType::Float : dtype_);
    const NormVariant kind = parse_variant(kOp, variant);
    check_norm_weight(kOp, name, weight, kind, dim);
    if (!(eps >= 0)) fail(kOp, "eps", "wanted numbers of at least 0, got ", eps, " for ", name);
    decoder_.weights.push_back(weight);
    return {bytes_of(weight), static_cast<float>(eps), kind, dim, element_type(kOp, name, weight)};
  }

  // gated: the weight has twice as many rows as the product has columns.
  Product product(const char* name, const Tensor& packed, const Tensor& bias, int64_t in, int64_t rows,
                  bool gated = false) {
    Product made{bytes_of(packed), nullptr, in, gated ? rows / 2 : rows, gated};
    made.panel_rows = gated ? packed_panels(rows, true) * kPanelColumns : rows;
    made.is_quantised = packed.scalar_type() == ScalarType::Byte;
    if (made.is_quantised) {
      made.format = check_packed_quant(kOp, name, packed, in, rows, gated);
    } else {
      check_dtype(kOp, name, packed, dtype_);
      check_packed(kOp, name, packed, packed_panels(rows, gated), packed_steps(in, dtype_ == ScalarType::BFloat16));
    }
    decoder_.weights.push_back(packed);
    if (bias.numel() == 0) return made;
    decoder_.biases.push_back(std::make_unique<std::vector<float>>(read_bias(kOp, name, bias, rows)));
    made.bias = made.panel_bias = decoder_.biases.back()->data();
    if (gated) made.panel_bias = in_panels(made);
    return made;
  }

  static constexpr const char* kOp = "decoder_create";

 private:
  // A gated product's bias as its panels hold the rows; 0 for padding.
  const float* in_panels(const Product& product) {
    std::vector<float> ordered(static_cast<size_t>(product.panel_rows));
    for (int64_t row = 0; row < product.panel_rows; ++row) {
      const int64_t column = row / kPanelColumns * kGatedColumns + row % kGatedColumns;
      const bool is_up = row % kPanelColumns >= kGatedColumns;
      if (column < product.out_features) {
        ordered[static_cast<size_t>(row)] = product.bias[column + (is_up ? product.out_features : 0)];
      }
    }
    decoder_.biases.push_back(std::make_unique<std::vector<float>>(std::move(ordered)));
    return decoder_.biases.back()->data();
  }

  Decoder& decoder_;
  ScalarType dtype_;
};

// The order in which tensors of a layer, and eps and variants of norms, are listed.
enum LayerTensor {
  kInputNorm, kBehindAttention, kMiddleNorm, kBehindMlp, kQueryNorm, kKeyNorm,  // an empty tensor: no such norm
  kQkv, kQkvBias, kOutput, kOutputBias, kGateUp, kGateUpBias, kDown, kDownBias, kLayerTensors
};
constexpr int kFinalNorm = kKeyNorm + 1, kNorms = kFinalNorm + 1;

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words(1);
  for (char c : text) {
    if (c == ',') words.emplace_back();
    else words.back() += c;
  }
  return words;
}

constexpr size_t kProducts = 4;

// To which adapters may add, in the order of LayerTensor.
std::array<Product*, kProducts> products_of(DecoderLayer& layer) {
  return {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
}

// ends: embedding, last norm, head, its bias or an empty tensor.
void read_embedding(Decoder& decoder, const std::vector<Tensor>& ends, int64_t head_rows) {
  const char* op = Maker::kOp;
  const Tensor &embedding = ends[0], &norm = ends[1];
  DecoderModel& model = decoder.model;
  if (norm.dim() != 2) check_shape(op, "final norm", norm, "[hidden_size]", {-1});
  model.type = element_type(op, "final norm", norm);
  model.hidden = norm.size(norm.dim() - 1);
  model.embedding_is_quantised = embedding.scalar_type() == ScalarType::Byte;
  if (model.embedding_is_quantised) {
    decoder.vocabulary = head_rows;
    model.embedding_format = check_packed_quant(op, "embedding", embedding, model.hidden, head_rows);
  } else {
    check_cpu(op, "embedding", embedding);
    check_dtype(op, "embedding", embedding, norm.scalar_type());
    check_shape(op, "embedding", embedding, "[vocabulary, hidden_size]", {-1, model.hidden});
    check_contiguous(op, "embedding", embedding);
    decoder.vocabulary = embedding.size(0);
  }
  if (decoder.vocabulary < 1 || model.hidden < 1) fail(op, "embedding", "wanted at least one element");
  model.embedding = bytes_of(embedding);
  decoder.weights = {norm, embedding};
}

void read_sizes(Decoder& decoder, const std::vector<int64_t>& sizes) {
  const char* op = Maker::kOp;
  check_length(op, "sizes", sizes, 7);
  for (size_t i = 0; i < 5; ++i) {
    if (sizes[i] < 1) fail(op, "sizes", "wanted positive numbers, got ", sizes[i]);
  }
  DecoderModel& model = decoder.model;
  model.num_query_heads = sizes[0];
  model.num_kv_heads = sizes[1];
  model.head_dim = sizes[2];
  model.intermediate = sizes[3];
  model.is_gated = sizes[5] != 0;
  model.is_parallel = sizes[6] != 0;
  if (model.num_query_heads % model.num_kv_heads != 0) {
    fail(op, "sizes", "wanted a multiple of ", model.num_kv_heads, " query heads, got ", model.num_query_heads);
  }
  if (model.head_dim % 2 != 0) fail(op, "sizes", "wanted an even head size, got ", model.head_dim);
}

void read_numbers(DecoderModel& model, const std::vector<double>& numbers) {
  const char* op = Maker::kOp;
  check_length(op, "numbers", numbers, 6);
  const auto number = [&](size_t index, const char* name, bool may_be_zero) {
    const double value = numbers[index];
    if (!(may_be_zero ? value >= 0 : value > 0) || value > std::numeric_limits<float>::max()) {
      fail(op, name, "wanted a positive number", may_be_zero ? " or 0 for none" : "", ", got ", value);
    }
    return static_cast<float>(value);
  };
  model.scale = number(0, "scale", false);
  model.softcap = number(1, "softcap", true);
  model.embedding_scale = number(2, "embedding_scale", false);
  model.residual_scale = number(3, "residual_scale", false);
  model.logits_scale = number(4, "logits_scale", false);
  model.logits_softcap = number(5, "logits_softcap", true);
}

}  // namespace

std::shared_ptr<Decoder> find_decoder(const char* op, int64_t handle) {
  std::lock_guard<std::mutex> lock(handles().lock);
  const auto found = handles().decoders.find(handle);
  if (found == handles().decoders.end()) fail(op, "handle", "wanted one from decoder_create, got ", handle);
  return found->second;
}

int64_t decoder_create(const std::vector<Tensor> ends, const std::vector<Tensor> layers,
                       const std::vector<int64_t> sizes, const std::vector<int64_t> windows,
                       const std::vector<int64_t> ropes, const std::vector<double> numbers,
                       const std::vector<double> eps, std::string variants, std::string activation) {
  const char* op = Maker::kOp;
  auto decoder = std::make_shared<Decoder>();
  DecoderModel& model = decoder->model;
  check_length(op, "ends", ends, 4);
  check_length(op, "layers", layers, windows.size() * kLayerTensors);
  check_length(op, "ropes", ropes, windows.size());
  check_length(op, "eps", eps, kNorms);
  const std::vector<std::string> names = words_of(variants);
  check_length(op, "variants", names, kNorms);
  if (windows.empty() || static_cast<int64_t>(windows.size()) > kMostLayers) {
    fail(op, "windows", "wanted from 1 to ", kMostLayers, " layers, got ", windows.size());
  }
  read_sizes(*decoder, sizes);
  read_embedding(*decoder, ends, sizes[4]);
  read_numbers(model, numbers);
  model.activation = parse_activation(op, "activation", activation);
  Maker make(*decoder, ends[1].scalar_type());
  const int64_t hidden = model.hidden, inner = model.num_query_heads * model.head_dim;
  const int64_t heads = inner + 2 * model.num_kv_heads * model.head_dim;
  for (size_t i = 0; i < windows.size(); ++i) {
    const Tensor* tensors = &layers[i * kLayerTensors];
    const auto norm = [&](const char* name, int which, int64_t dim) {
      const bool is_wide = which == kBehindAttention || which == kBehindMlp;
      return make.norm(name, tensors[which], dim, eps[which], names[which], is_wide);
    };
    DecoderLayer layer;
    layer.input = norm("input norm", kInputNorm, hidden);
    layer.behind_attention = norm("norm behind attention", kBehindAttention, hidden);
    layer.middle = norm("middle norm", kMiddleNorm, hidden);
    layer.behind_mlp = norm("norm behind the MLP", kBehindMlp, hidden);
    const int64_t keys = model.num_kv_heads * model.head_dim;
    const auto width = [&](int which, int64_t whole) {  // of all heads together, or of one
      const Tensor& weight = tensors[which];
      return weight.dim() > 0 && weight.size(weight.dim() - 1) == whole ? whole : model.head_dim;
    };
    layer.query = norm("query norm", kQueryNorm, width(kQueryNorm, inner));
    layer.key = norm("key norm", kKeyNorm, width(kKeyNorm, keys));
    layer.qkv = make.product("qkv", tensors[kQkv], tensors[kQkvBias], hidden, heads);
    layer.output = make.product("output", tensors[kOutput], tensors[kOutputBias], inner, hidden);
    layer.gate_up = make.product("gate_up", tensors[kGateUp], tensors[kGateUpBias], hidden,
                                 (model.is_gated ? 2 : 1) * model.intermediate, model.is_gated);
    if (model.is_parallel && layer.input.weight == nullptr) fail(op, "layers", "wanted an input norm in layer ", i);
    layer.down = make.product("down", tensors[kDown], tensors[kDownBias], model.intermediate, hidden);
    if (windows[i] < 0) fail(op, "windows", "wanted a positive number of tokens or 0 for none, got ", windows[i]);
    if (ropes[i] < -1) fail(op, "ropes", "wanted an index or -1 for none, got ", ropes[i]);
    layer.window = windows[i];
    layer.rope = ropes[i];
    model.layers.push_back(layer);
  }
  model.final_norm = make.norm("final norm", ends[1], hidden, eps[kFinalNorm], names[kFinalNorm]);
  if (model.final_norm.weight == nullptr) fail(op, "ends", "wanted a final norm");
  model.head = make.product("head", ends[2], ends[3], hidden, sizes[4]);
  std::lock_guard<std::mutex> lock(handles().lock);
  handles().decoders[handles().next] = decoder;
  return handles().next++;
}

void decoder_adapt(int64_t handle, const std::vector<Tensor> low_ranks, const std::vector<int64_t> ranks) {
  const char* op = "decoder_adapt";
  const std::shared_ptr<Decoder> decoder = find_decoder(op, handle);
  std::lock_guard<std::mutex> step(decoder->one_step);
  DecoderModel& model = decoder->model;
  const ScalarType dtype = decoder->weights[0].scalar_type();
  check_length(op, "ranks", ranks, model.layers.size() * kProducts);
  check_length(op, "low_ranks", low_ranks, 2 * ranks.size());
  std::vector<LowRank> read;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const Product& product = *products_of(model.layers[i / kProducts])[i % kProducts];
    if (ranks[i] < 0) fail(op, "ranks", "wanted positive numbers or 0 for none, got ", ranks[i]);
    read.emplace_back();
    if (ranks[i] == 0) continue;
    const bool bf16 = dtype == ScalarType::BFloat16;
    const Tensor &a = low_ranks[2 * i], &b = low_ranks[2 * i + 1];
    check_dtype(op, "low_ranks", a, dtype);
    check_dtype(op, "low_ranks", b, dtype);
    check_packed(op, "low_ranks", a, packed_panels(ranks[i], false), packed_steps(product.in_features, bf16));
    check_packed(op, "low_ranks", b, packed_panels(product.panel_rows, false), packed_steps(ranks[i], bf16));
    read.back() = {bytes_of(a), bytes_of(b), ranks[i]};
  }
  for (size_t i = 0; i < ranks.size(); ++i) {  // all was right
    products_of(model.layers[i / kProducts])[i % kProducts]->added.push_back(read[i]);
    model.most_rank = std::max(model.most_rank, ranks[i]);
  }
  decoder->weights.insert(decoder->weights.end(), low_ranks.begin(), low_ranks.end());
  ++model.num_adapters;
}

int64_t decoder_step_bytes(int64_t handle, int64_t num_tokens, int64_t num_wanted) {
  const char* op = "decoder_step_bytes";
  const std::shared_ptr<Decoder> decoder = find_decoder(op, handle);
  if (num_tokens < 0) fail(op, "num_tokens", "wanted a count, got ", num_tokens);
  if (num_wanted < 0) fail(op, "num_wanted", "wanted a count, got ", num_wanted);
  const int64_t logits = num_wanted * decoder->model.head.out_features * static_cast<int64_t>(sizeof(float));
  return DecoderSteps::count_bytes(decoder->model, num_tokens, num_wanted) + logits;
}

void decoder_destroy(int64_t handle) {
  std::shared_ptr<Decoder> last;  // dies behind the lock: the end of a tensor may run Python, and that another destroy
  std::lock_guard<std::mutex> lock(handles().lock);
  const auto found = handles().decoders.find(handle);
  if (found == handles().decoders.end()) return;
  last = std::move(found->second);
  handles().decoders.erase(found);
}

}  // namespace pagemill
