#include "model_file.hpp"

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "dequantize.hpp"

namespace kvarn_engine {

namespace {

class config_reader {
 public:
  explicit config_reader(const gguf_file& file) : file_(file) {
    architecture_ = file.get<std::string_view>("general.architecture").value();
    if (architecture_ != "llama" && architecture_ != "qwen2")
      refuse("architecture is " + detail::quoted(architecture_) +
             "; llama and qwen2 are supported");
  }

  model_config read() const {
    model_config c;
    c.architecture = architecture_;
    c.layers = count("block_count");
    c.hidden = count("embedding_length");
    c.feed_forward = count("feed_forward_length");
    c.query_heads = count("attention.head_count");
    c.kv_heads = count("attention.head_count_kv", c.query_heads);
    c.context = count("context_length");
    c.rms_epsilon = file_.get<float>(key("attention.layer_norm_rms_epsilon")).value();
    c.rope_base = file_.find<float>(key("rope.freq_base")).value().value_or(10000.0f);
    // GGUF files of llama have the rows of queries and keys permuted for neighbouring pairs.
    c.pairing = architecture_ == "llama" ? rope_pairing::neighbours : rope_pairing::halves;
    c.vocabulary =
        to_int("token_embd.weight", file_.get_tensor("token_embd.weight").value().rows());
    if (c.query_heads < 1) refuse(key("attention.head_count") + " is 0; it must be positive");
    c.head_dim = count("attention.key_length", c.hidden / c.query_heads);
    refuse_unsupported(c);
    validate(c);
    return c;
  }

 private:
  [[noreturn]] static void refuse(const std::string& what) {
    throw std::runtime_error("model: " + what);
  }

  std::string key(const char* name) const { return architecture_ + "." + name; }

  static int to_int(const std::string& name, std::uint64_t value) {
    if (value > (1u << 30)) refuse(name + " is " + std::to_string(value) + "; it is too large");
    return static_cast<int>(value);
  }
  int count(const char* name) const {
    return to_int(key(name), file_.get<std::uint32_t>(key(name)).value());
  }
  int count(const char* name, int otherwise) const {
    const auto found = file_.find<std::uint32_t>(key(name)).value();
    return found ? to_int(key(name), *found) : otherwise;
  }

  void refuse_unsupported(const model_config& c) const {
    const auto must_be = [&](const char* name, int wanted) {
      if (const int value = count(name, wanted); value != wanted)
        refuse(key(name) + " is " + std::to_string(value) + "; only " + std::to_string(wanted) +
               " is supported");
    };
    must_be("attention.value_length", c.head_dim);
    must_be("rope.dimension_count", c.head_dim);
    must_be("expert_count", 0);
    must_be("attention.sliding_window", 0);
    const auto scaling = file_.find<std::string_view>(key("rope.scaling.type")).value();
    if (scaling && *scaling != "none")
      refuse(key("rope.scaling.type") + " is " + detail::quoted(*scaling) +
             "; only none is supported");
    for (const char* name : {"rope.scaling.factor", "rope.scale_linear"})
      if (const auto factor = file_.find<float>(key(name)).value(); factor && *factor != 1.0f)
        refuse(key(name) + " is " + std::to_string(*factor) + "; only 1 is supported");
    if (file_.find_tensor("rope_freqs.weight") != nullptr)
      refuse("there is a tensor rope_freqs.weight; RoPE scaling is not supported");
  }

  const gguf_file& file_;
  std::string architecture_;
};

matrix load_matrix(const gguf_file& file, const std::string& name, int rows, int cols) {
  const gguf_tensor tensor = file.get_tensor(name).value();
  if (tensor.rows() != static_cast<std::uint64_t>(rows) ||
      tensor.cols() != static_cast<std::uint64_t>(cols))
    throw std::runtime_error("model: tensor " + name + " is " + std::to_string(tensor.rows()) +
                             " x " + std::to_string(tensor.cols()) + "; it must be " +
                             std::to_string(rows) + " x " + std::to_string(cols));
  matrix m{rows, cols,
           std::vector<float>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols))};
  for (int r = 0; r < rows; ++r) {
    const auto width = static_cast<std::size_t>(cols);
    dequantize_row(tensor, static_cast<std::uint64_t>(r),
                   std::span(m.values).subspan(static_cast<std::size_t>(r) * width, width))
        .or_throw();
  }
  return m;
}

std::vector<float> load_vector(const gguf_file& file, const std::string& name, int count) {
  return load_matrix(file, name, 1, count).values;
}

layer_weights load_layer(const gguf_file& file, const model_config& c, int layer) {
  const std::string prefix = "blk." + std::to_string(layer) + ".";
  const auto load = [&](const char* name, int rows, int cols) {
    return load_matrix(file, prefix + name + ".weight", rows, cols);
  };
  const auto load_bias = [&](const char* name, int count) {
    const std::string full = prefix + name + ".bias";
    // Files of qwen2 must have them; some of llama have them.
    if (c.architecture != "qwen2" && file.find_tensor(full) == nullptr) return std::vector<float>();
    return load_vector(file, full, count);
  };
  if (file.find_tensor(prefix + "attn_output.bias") != nullptr)
    throw std::runtime_error("model: tensor " + prefix + "attn_output.bias is not supported");
  layer_weights w;
  w.attention_norm = load_vector(file, prefix + "attn_norm.weight", c.hidden);
  w.query = load("attn_q", c.query_size(), c.hidden);
  w.key = load("attn_k", c.kv_size(), c.hidden);
  w.value = load("attn_v", c.kv_size(), c.hidden);
  w.query_bias = load_bias("attn_q", c.query_size());
  w.key_bias = load_bias("attn_k", c.kv_size());
  w.value_bias = load_bias("attn_v", c.kv_size());
  w.output = load("attn_output", c.hidden, c.query_size());
  w.feed_forward_norm = load_vector(file, prefix + "ffn_norm.weight", c.hidden);
  w.gate = load("ffn_gate", c.feed_forward, c.hidden);
  w.up = load("ffn_up", c.feed_forward, c.hidden);
  w.down = load("ffn_down", c.hidden, c.feed_forward);
  return w;
}

}  // namespace

model_config read_config(const gguf_file& file) { return config_reader(file).read(); }

model_weights load_model(const gguf_file& file) {
  model_weights weights;
  const model_config c = weights.config = read_config(file);
  weights.embedding = load_matrix(file, "token_embd.weight", c.vocabulary, c.hidden);
  for (int layer = 0; layer < c.layers; ++layer)
    weights.layers.push_back(load_layer(file, c, layer));
  weights.output_norm = load_vector(file, "output_norm.weight", c.hidden);
  if (file.find_tensor("output.weight") != nullptr)
    weights.output = load_matrix(file, "output.weight", c.vocabulary, c.hidden);
  validate(weights);
  return weights;
}

}  // namespace kvarn_engine
