// decoder_create and decoder_destroy: what stays is checked once, here.
#include <torch/csrc/stable/ops.h>

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

  RowNorm norm(const char* name, const Tensor& weight, int64_t dim, double eps, const std::string& variant) {
    if (weight.numel() == 0) return {};
    check_cpu(kOp, name, weight);
    check_dtype(kOp, name, weight, dtype_);
    check_shape(kOp, name, weight, "[dim]", {dim});
    check_contiguous(kOp, name, weight);
    if (!(eps >= 0)) fail(kOp, "eps", "wanted numbers of at least 0, got ", eps, " for ", name);
    decoder_.weights.push_back(weight);
    return {bytes_of(weight), static_cast<float>(eps), parse_variant(kOp, variant)};
  }

  // gated: the weight has twice as many rows as the product has columns.
  Product product(const char* name, const Tensor& packed, const Tensor& bias, int64_t in, int64_t rows,
                  bool gated = false) {
    Product made{bytes_of(packed), nullptr, in, gated ? rows / 2 : rows, gated};
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
    made.bias = decoder_.biases.back()->data();
    return made;
  }

  static constexpr const char* kOp = "decoder_create";

 private:
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

// ends: embedding, last norm, head.
void read_embedding(Decoder& decoder, const std::vector<Tensor>& ends, int64_t head_rows) {
  const char* op = Maker::kOp;
  const Tensor &embedding = ends[0], &norm = ends[1];
  DecoderModel& model = decoder.model;
  check_shape(op, "final norm", norm, "[hidden_size]", {-1});
  model.type = element_type(op, "final norm", norm);
  model.hidden = norm.size(0);
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
  check_length(op, "sizes", sizes, 5);
  for (int64_t size : sizes) {
    if (size < 1) fail(op, "sizes", "wanted positive numbers, got ", size);
  }
  DecoderModel& model = decoder.model;
  model.num_query_heads = sizes[0];
  model.num_kv_heads = sizes[1];
  model.head_dim = sizes[2];
  model.intermediate = sizes[3];
  if (model.num_query_heads % model.num_kv_heads != 0) {
    fail(op, "sizes", "wanted a multiple of ", model.num_kv_heads, " query heads, got ", model.num_query_heads);
  }
  if (model.head_dim % 2 != 0) fail(op, "sizes", "wanted an even head size, got ", model.head_dim);
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
                       const std::vector<int64_t> ropes, double scale, double softcap, double embedding_scale,
                       const std::vector<double> eps, std::string variants, std::string activation) {
  const char* op = Maker::kOp;
  auto decoder = std::make_shared<Decoder>();
  DecoderModel& model = decoder->model;
  check_length(op, "ends", ends, 3);
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
  if (!(scale > 0) || scale > std::numeric_limits<float>::max()) fail(op, "scale", "wanted a positive number, got ", scale);
  if (!(softcap >= 0)) fail(op, "softcap", "wanted a positive number or 0 for none, got ", softcap);
  model.scale = static_cast<float>(scale);
  model.softcap = static_cast<float>(softcap);
  model.embedding_scale = static_cast<float>(embedding_scale);
  model.activation = parse_activation(op, "activation", activation);
  Maker make(*decoder, ends[1].scalar_type());
  const int64_t hidden = model.hidden, inner = model.num_query_heads * model.head_dim;
  const int64_t heads = inner + 2 * model.num_kv_heads * model.head_dim;
  for (size_t i = 0; i < windows.size(); ++i) {
    const Tensor* tensors = &layers[i * kLayerTensors];
    const auto norm = [&](const char* name, int which, int64_t dim) {
      return make.norm(name, tensors[which], dim, eps[which], names[which]);
    };
    DecoderLayer layer;
    layer.input = norm("input norm", kInputNorm, hidden);
    layer.behind_attention = norm("norm behind attention", kBehindAttention, hidden);
    layer.middle = norm("middle norm", kMiddleNorm, hidden);
    layer.behind_mlp = norm("norm behind the MLP", kBehindMlp, hidden);
    layer.query = norm("query norm", kQueryNorm, model.head_dim);
    layer.key = norm("key norm", kKeyNorm, model.head_dim);
    if (layer.input.weight == nullptr || layer.middle.weight == nullptr) {
      fail(op, "layers", "wanted an input norm and a middle norm in layer ", i);
    }
    layer.qkv = make.product("qkv", tensors[kQkv], tensors[kQkvBias], hidden, heads);
    layer.output = make.product("output", tensors[kOutput], tensors[kOutputBias], inner, hidden);
    layer.gate_up = make.product("gate_up", tensors[kGateUp], tensors[kGateUpBias], hidden, 2 * model.intermediate, true);
    layer.down = make.product("down", tensors[kDown], tensors[kDownBias], model.intermediate, hidden);
    if (windows[i] < 0) fail(op, "windows", "wanted a positive number of tokens or 0 for none, got ", windows[i]);
    if (ropes[i] < 0) fail(op, "ropes", "wanted an index, got ", ropes[i]);
    layer.window = windows[i];
    layer.rope = ropes[i];
    model.layers.push_back(layer);
  }
  model.final_norm = make.norm("final norm", ends[1], hidden, eps[kFinalNorm], names[kFinalNorm]);
  if (model.final_norm.weight == nullptr) fail(op, "ends", "wanted a final norm");
  const Tensor none = torch::stable::new_empty(ends[1], {0});
  model.head = make.product("head", ends[2], none, hidden, sizes[4]);
  std::lock_guard<std::mutex> lock(handles().lock);
  handles().decoders[handles().next] = decoder;
  return handles().next++;
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
