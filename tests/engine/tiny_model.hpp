// A random transformer of two layers, and its forward pass in double precision straight from the
// formulas.
#pragma once

#include <Eigen/Dense>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "../../examples/engine/weights.hpp"

namespace kvarn_test {

// head_dim 64, the least that the library packs; 3 query heads share a KV head; all sizes differ.
inline kvarn_engine::model_weights tiny_model(const std::string& architecture, unsigned seed = 1) {
  using namespace kvarn_engine;
  model_weights w;
  w.config = {.architecture = architecture,
              .layers = 2,
              .hidden = 80,
              .feed_forward = 144,
              .query_heads = 6,
              .kv_heads = 2,
              .head_dim = 64,
              .vocabulary = 50,
              .context = 1024,
              .rms_epsilon = 1e-5f,
              .rope_base = 10000.0f,
              .pairing = architecture == "llama" ? rope_pairing::neighbours : rope_pairing::halves};
  const model_config& c = w.config;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto vector = [&](int count, float mean, float deviation) {
    std::vector<float> v(static_cast<std::size_t>(count));
    for (float& x : v) x = mean + deviation * normal(random);
    return v;
  };
  const auto weights = [&](int rows, int cols) {
    return matrix{rows, cols, vector(rows * cols, 0, 1.5f / std::sqrt(static_cast<float>(cols)))};
  };
  w.embedding = weights(c.vocabulary, c.hidden);
  for (int layer = 0; layer < c.layers; ++layer) {
    layer_weights l;
    l.attention_norm = vector(c.hidden, 1, 0.2f);
    l.query = weights(c.query_size(), c.hidden);
    l.key = weights(c.kv_size(), c.hidden);
    l.value = weights(c.kv_size(), c.hidden);
    if (architecture == "qwen2") {
      l.query_bias = vector(c.query_size(), 0, 1);
      l.key_bias = vector(c.kv_size(), 0, 1);
      l.value_bias = vector(c.kv_size(), 0, 1);
    }
    l.output = weights(c.hidden, c.query_size());
    l.feed_forward_norm = vector(c.hidden, 1, 0.2f);
    l.gate = weights(c.feed_forward, c.hidden);
    l.up = weights(c.feed_forward, c.hidden);
    l.down = weights(c.hidden, c.feed_forward);
    w.layers.push_back(l);
  }
  w.output_norm = vector(c.hidden, 1, 0.2f);
  return w;
}

inline std::vector<int> random_tokens(int count, int vocabulary, unsigned seed = 2) {
  std::mt19937 random(seed);
  std::vector<int> tokens;
  for (int i = 0; i < count; ++i)
    tokens.push_back(static_cast<int>(random() % static_cast<unsigned>(vocabulary)));
  return tokens;
}

using matrix_d = Eigen::MatrixXd;
using vector_d = Eigen::VectorXd;

inline matrix_d to_double(const kvarn_engine::matrix& m) {
  using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const row_major>(m.values.data(), m.rows, m.cols).cast<double>();
}
// Nothing counts as zeros.
inline vector_d to_double(const std::vector<float>& v, int count) {
  if (v.empty()) return vector_d::Zero(count);
  return Eigen::Map<const Eigen::VectorXf>(v.data(), count).cast<double>();
}

inline vector_d oracle_norm(const vector_d& x, const std::vector<float>& weight, double epsilon) {
  const auto n = static_cast<int>(x.size());
  return (x / std::sqrt(x.squaredNorm() / n + epsilon)).cwiseProduct(to_double(weight, n));
}

// A head vector at a position: pairs of channels as complex numbers, turned.
inline vector_d oracle_rope(const vector_d& x, int position, double base,
                            kvarn_engine::rope_pairing pairing) {
  const auto dim = static_cast<int>(x.size());
  vector_d turned(dim);
  for (int i = 0; i < dim / 2; ++i) {
    const bool neighbours = pairing == kvarn_engine::rope_pairing::neighbours;
    const int a = neighbours ? 2 * i : i;
    const int b = neighbours ? 2 * i + 1 : i + dim / 2;
    const double angle = position / std::pow(base, 2.0 * i / dim);
    turned[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
    turned[b] = x[a] * std::sin(angle) + x[b] * std::cos(angle);
  }
  return turned;
}

// Logits of every token: [vocabulary] per column.
inline matrix_d oracle_logits(const kvarn_engine::model_weights& w,
                              const std::vector<int>& tokens) {
  const auto& c = w.config;
  const auto count = static_cast<int>(tokens.size());
  const double epsilon = static_cast<double>(c.rms_epsilon);
  const double base = static_cast<double>(c.rope_base);
  const int shared = c.query_heads / c.kv_heads;
  const matrix_d embedding = to_double(w.embedding);
  matrix_d x(c.hidden, count);
  for (int t = 0; t < count; ++t)
    x.col(t) = embedding.row(tokens[static_cast<std::size_t>(t)]).transpose();
  for (const auto& l : w.layers) {
    matrix_d q(c.query_size(), count), k(c.kv_size(), count), v(c.kv_size(), count);
    for (int t = 0; t < count; ++t) {
      const vector_d n = oracle_norm(x.col(t), l.attention_norm, epsilon);
      q.col(t) = to_double(l.query) * n + to_double(l.query_bias, c.query_size());
      k.col(t) = to_double(l.key) * n + to_double(l.key_bias, c.kv_size());
      v.col(t) = to_double(l.value) * n + to_double(l.value_bias, c.kv_size());
      for (int h = 0; h < c.query_heads; ++h)
        q.col(t).segment(h * c.head_dim, c.head_dim) =
            oracle_rope(q.col(t).segment(h * c.head_dim, c.head_dim), t, base, c.pairing);
      for (int h = 0; h < c.kv_heads; ++h)
        k.col(t).segment(h * c.head_dim, c.head_dim) =
            oracle_rope(k.col(t).segment(h * c.head_dim, c.head_dim), t, base, c.pairing);
    }
    for (int t = 0; t < count; ++t) {
      vector_d attended(c.query_size());
      for (int h = 0; h < c.query_heads; ++h) {
        const int kv = h / shared * c.head_dim;
        const vector_d query = q.col(t).segment(h * c.head_dim, c.head_dim);
        vector_d p = k.block(kv, 0, c.head_dim, t + 1).transpose() * query /
                     std::sqrt(static_cast<double>(c.head_dim));
        p = (p.array() - p.maxCoeff()).exp().matrix();
        p /= p.sum();
        attended.segment(h * c.head_dim, c.head_dim) = v.block(kv, 0, c.head_dim, t + 1) * p;
      }
      x.col(t) += to_double(l.output) * attended;
      const vector_d n = oracle_norm(x.col(t), l.feed_forward_norm, epsilon);
      const vector_d gate = to_double(l.gate) * n;
      const vector_d up = to_double(l.up) * n;
      const vector_d silu = (gate.array() / (1 + (-gate.array()).exp()) * up.array()).matrix();
      x.col(t) += to_double(l.down) * silu;
    }
  }
  const matrix_d unembedding = to_double(w.unembedding());
  matrix_d logits(c.vocabulary, count);
  for (int t = 0; t < count; ++t)
    logits.col(t) = unembedding * oracle_norm(x.col(t), w.output_norm, epsilon);
  return logits;
}

}  // namespace kvarn_test
