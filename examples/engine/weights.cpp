#include "weights.hpp"

#include <stdexcept>

namespace kvarn_engine {

namespace {

void check(const std::string& name, const matrix& m, int rows, int cols) {
  const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  if (m.rows == rows && m.cols == cols && m.values.size() == count) return;
  throw std::runtime_error("model: " + name + " is " + std::to_string(m.rows) + " x " +
                           std::to_string(m.cols) + "; it must be " + std::to_string(rows) + " x " +
                           std::to_string(cols));
}

void check(const std::string& name, const std::vector<float>& v, int count) {
  if (v.size() == static_cast<std::size_t>(count)) return;
  throw std::runtime_error("model: " + name + " has " + std::to_string(v.size()) +
                           " numbers; it must have " + std::to_string(count));
}

}  // namespace

void validate(const model_weights& weights) {
  const model_config& c = weights.config;
  validate(c);
  check("embedding", weights.embedding, c.vocabulary, c.hidden);
  check("output norm", weights.output_norm, c.hidden);
  if (!weights.output.values.empty()) check("output", weights.output, c.vocabulary, c.hidden);
  if (weights.layers.size() != static_cast<std::size_t>(c.layers))
    throw std::runtime_error("model: weights of " + std::to_string(weights.layers.size()) +
                             " layers; it must be " + std::to_string(c.layers));
  for (std::size_t i = 0; i < weights.layers.size(); ++i) {
    const layer_weights& w = weights.layers[i];
    const std::string name = "layer " + std::to_string(i) + ": ";
    check(name + "attention norm", w.attention_norm, c.hidden);
    check(name + "query", w.query, c.query_size(), c.hidden);
    check(name + "key", w.key, c.kv_size(), c.hidden);
    check(name + "value", w.value, c.kv_size(), c.hidden);
    if (!w.query_bias.empty()) check(name + "query bias", w.query_bias, c.query_size());
    if (!w.key_bias.empty()) check(name + "key bias", w.key_bias, c.kv_size());
    if (!w.value_bias.empty()) check(name + "value bias", w.value_bias, c.kv_size());
    check(name + "output", w.output, c.hidden, c.query_size());
    check(name + "feed-forward norm", w.feed_forward_norm, c.hidden);
    check(name + "gate", w.gate, c.feed_forward, c.hidden);
    check(name + "up", w.up, c.feed_forward, c.hidden);
    check(name + "down", w.down, c.hidden, c.feed_forward);
  }
}

}  // namespace kvarn_engine
