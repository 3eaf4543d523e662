#include "transformer.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>

#include "dense.hpp"

namespace kvarn_engine {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::size_t product(int a, int b) {
  return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
}

const float* bias_of(const std::vector<float>& bias) {
  return bias.empty() ? nullptr : bias.data();
}

}  // namespace

std::vector<float> rope_angles(std::int64_t position, int tokens, int head_dim, float base) {
  const int pairs = head_dim / 2;
  std::vector<float> angles;
  angles.reserve(product(tokens, head_dim));
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(position + t) *
                           std::pow(static_cast<double>(base), -2.0 * i / head_dim);
      angles.push_back(static_cast<float>(std::cos(angle)));
      angles.push_back(static_cast<float>(std::sin(angle)));
    }
  return angles;
}

void rotate_pairs(float* x, int tokens, int heads, int head_dim, rope_pairing pairing,
                  std::span<const float> angles) {
  const int pairs = head_dim / 2;
  const int step = pairing == rope_pairing::neighbours ? 2 : 1;  // between first channels of pairs
  const int partner = pairing == rope_pairing::neighbours ? 1 : pairs;
  for (int t = 0; t < tokens; ++t) {
    const float* const turn = angles.data() + product(t, head_dim);
    for (int h = 0; h < heads; ++h, x += head_dim)
      for (int i = 0; i < pairs; ++i) {
        float& a = x[i * step];
        float& b = x[i * step + partner];
        const float cosine = turn[2 * i];
        const float sine = turn[2 * i + 1];
        const float turned = a * cosine - b * sine;
        b = a * sine + b * cosine;
        a = turned;
      }
  }
}

transformer::transformer(const model_weights& weights, const kvarn_examples::thread_pool& pool)
    : weights_(&weights), pool_(&pool) {
  validate(weights);
}

void transformer::forward(std::span<const int> tokens, kv_memory& memory, float* hidden) {
  const model_config& c = config();
  const auto count = static_cast<int>(tokens.size());
  residual_.resize(product(count, c.hidden));
  for (int t = 0; t < count; ++t) {
    const int token = tokens[static_cast<std::size_t>(t)];
    if (token < 0 || token >= c.vocabulary)
      throw std::runtime_error("token is " + std::to_string(token) + "; allowed are 0 to " +
                               std::to_string(c.vocabulary - 1));
    std::copy_n(weights_->embedding.row(token), c.hidden, residual_.data() + product(t, c.hidden));
  }
  normed_.resize(product(count, c.hidden));
  delta_.resize(product(count, c.hidden));
  queries_.resize(product(count, c.query_size()));
  attended_.resize(product(count, c.query_size()));
  keys_.resize(product(count, c.kv_size()));
  values_.resize(product(count, c.kv_size()));
  gate_.resize(product(count, c.feed_forward));
  up_.resize(product(count, c.feed_forward));

  const std::vector<float> angles = rope_angles(memory.length(), count, c.head_dim, c.rope_base);
  for (int layer = 0; layer < c.layers; ++layer) {
    const layer_weights& w = weights_->layers[static_cast<std::size_t>(layer)];
    attention_block(w, layer, count, angles, memory);
    feed_forward_block(w, count);
  }
  rms_norm(residual_.data(), count, weights_->output_norm, c.rms_epsilon, hidden);
}

void transformer::advance(std::span<const int> tokens, kv_memory& memory, float* hidden) {
  forward(tokens, memory, hidden);
  const auto start = std::chrono::steady_clock::now();
  memory.commit();
  commit_seconds_ += seconds_since(start);
}

void transformer::attention_block(const layer_weights& w, int layer, int tokens,
                                  std::span<const float> angles, kv_memory& memory) {
  const model_config& c = config();
  rms_norm(residual_.data(), tokens, w.attention_norm, c.rms_epsilon, normed_.data());
  linear(*pool_, normed_.data(), tokens,
         std::array{linear_part{&w.query, bias_of(w.query_bias), queries_.data()},
                    linear_part{&w.key, bias_of(w.key_bias), keys_.data()},
                    linear_part{&w.value, bias_of(w.value_bias), values_.data()}});
  rotate_pairs(queries_.data(), tokens, c.query_heads, c.head_dim, c.pairing, angles);
  rotate_pairs(keys_.data(), tokens, c.kv_heads, c.head_dim, c.pairing, angles);

  const auto start = std::chrono::steady_clock::now();
  memory.attend(layer, {tokens, queries_.data(), keys_.data(), values_.data(), attended_.data()});
  attention_seconds_ += seconds_since(start);

  linear(*pool_, attended_.data(), tokens,
         std::array{linear_part{&w.output, nullptr, delta_.data()}});
  add(residual_.data(), delta_.data(), delta_.size());
}

void transformer::feed_forward_block(const layer_weights& w, int tokens) {
  const model_config& c = config();
  rms_norm(residual_.data(), tokens, w.feed_forward_norm, c.rms_epsilon, normed_.data());
  linear(*pool_, normed_.data(), tokens,
         std::array{linear_part{&w.gate, nullptr, gate_.data()},
                    linear_part{&w.up, nullptr, up_.data()}});
  silu_product(gate_.data(), up_.data(), gate_.size());
  linear(*pool_, gate_.data(), tokens, std::array{linear_part{&w.down, nullptr, delta_.data()}});
  add(residual_.data(), delta_.data(), delta_.size());
}

void transformer::prefill(
    std::span<const int> tokens, int chunk, kv_memory& memory,
    const std::function<void(std::size_t first, std::span<const float> hidden)>& done) {
  if (chunk < 1)
    throw std::runtime_error("chunk is " + std::to_string(chunk) + "; it must be positive");
  std::vector<float> hidden;
  for (std::size_t first = 0; first < tokens.size(); first += static_cast<std::size_t>(chunk)) {
    const auto step =
        tokens.subspan(first, (std::min)(static_cast<std::size_t>(chunk), tokens.size() - first));
    hidden.resize(step.size() * static_cast<std::size_t>(config().hidden));
    advance(step, memory, hidden.data());
    done(first, hidden);
  }
}

void transformer::logits(const float* hidden, int tokens, float* out) const {
  linear(*pool_, hidden, tokens, std::array{linear_part{&weights_->unembedding(), nullptr, out}});
}

}  // namespace kvarn_engine
