// What quantisation of keys and values costs: squared error, its split into magnitude and
// direction, and the error of attention (arXiv 2606.03458, section 3).
//
// All arithmetic is double. Tensors are those of one KV head, row-major [tokens][head_dim]; `exact`
// and `approximate` have the same shape. Numbers must be finite. Functions throw kvarn::error
// (abort without exceptions) where shapes contradict each other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "config.hpp"
#include "error.hpp"

namespace kvarn {

// The squared error of tokens, E_T = |k - k^|^2 = E_M + E_D with
//   E_M = (|k| - |k^|)^2                 magnitude
//   E_D = 2 |k| |k^| (1 - cos(k, k^))    direction
struct error_split {
  std::size_t tokens = 0;  // those that the sums run over
  double total = 0;        // sum of E_T
  double magnitude = 0;    // sum of E_M
  double direction = 0;    // sum of E_D

  // The share of magnitude in the error, 0 without any error: sum E_M / sum E_T ...
  double magnitude_share() const { return total > 0 ? magnitude / total : 0.0; }
  // ... and the mean of E_M / E_T over the tokens with E_T > 0.
  double mean_magnitude_share = 0;
};

// One KV head and the queries that attend to it.
struct attention_sample {
  std::size_t tokens = 0;
  std::size_t query_heads = 1;           // that share the KV head
  std::size_t key_dim = 0;               // of a key and a query
  std::size_t value_dim = 0;             // of a value and an output
  std::span<const float> queries;        // [positions][query_heads][key_dim]: the last positions
  std::span<const float> keys;           // [tokens][key_dim]
  std::span<const float> values;         // [tokens][value_dim]
  std::span<const float> approx_keys;    // as keys
  std::span<const float> approx_values;  // as values
};

struct attention_error {
  // Mean over positions and query heads of KL(exact softmax || softmax with approx_keys), nats.
  double kl = 0;
  // Sum of squared errors of the outputs / sum of their squares, over all positions, query heads
  // and channels: with approximate keys and values, and with exact keys.
  double output = 0;
  double output_exact_keys = 0;
};

inline namespace KVARN_ISA_NAMESPACE {

// sum (x - x^)^2 / sum x^2. Of an all-zero `exact`: 0 if `approximate` is zero too, else infinity.
double relative_squared_error(std::span<const float> exact, std::span<const float> approximate);

// The split over the `top_percent` percent of tokens with the largest E_T, rounded up to whole
// tokens. Precondition: 0 < top_percent <= 100.
error_split split_error(std::span<const float> exact, std::span<const float> approximate,
                        std::size_t head_dim, double top_percent = 100.0);

// Mean of | |x^| / |x| - 1 | over the tokens with |x| > 0: by how much the scale of a token
// changes. 0 without such tokens.
double mean_norm_error(std::span<const float> exact, std::span<const float> approximate,
                       std::size_t head_dim);

// Causal attention with softmax scale 1/sqrt(key_dim): with P positions in `queries`, the query at
// index i stands at token tokens - P + i and sees all tokens up to that one.
attention_error compare_attention(const attention_sample& sample);

// implementation

namespace detail {

inline void metric_requires(bool condition, const std::string& message) {
  if (!condition) status{error_code::invalid_argument, "metrics: " + message}.or_throw();
}

inline void metric_requires_size(const char* what, std::size_t size, std::size_t expected) {
  metric_requires(size == expected, std::string(what) + " has " + std::to_string(size) +
                                        " numbers; it must have " + std::to_string(expected));
}

inline void metric_requires_tokens(std::span<const float> exact, std::span<const float> approximate,
                                   std::size_t head_dim) {
  metric_requires(head_dim > 0, "head_dim is 0; it must be positive");
  metric_requires(exact.size() % head_dim == 0, "exact has " + std::to_string(exact.size()) +
                                                    " numbers; it must be whole tokens of " +
                                                    std::to_string(head_dim));
  metric_requires_size("approximate", approximate.size(), exact.size());
}

// error / energy where energy may be zero.
inline double squared_ratio(double error, double energy) {
  if (energy > 0) return error / energy;
  return error > 0 ? std::numeric_limits<double>::infinity() : 0.0;
}

// log softmax of the scores of one query with keys [count][dim].
inline void log_softmax_scores(const float* query, const float* keys, std::size_t count,
                               std::size_t dim, std::vector<double>& log_p) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  log_p.resize(count);
  for (std::size_t t = 0; t < count; ++t) {
    double dot = 0;
    for (std::size_t d = 0; d < dim; ++d)
      dot += static_cast<double>(query[d]) * static_cast<double>(keys[t * dim + d]);
    log_p[t] = scale * dot;
  }
  const double max = *std::max_element(log_p.begin(), log_p.end());
  double sum = 0;
  for (const double score : log_p) sum += std::exp(score - max);
  const double log_sum = max + std::log(sum);
  for (double& score : log_p) score -= log_sum;
}

// sum_t exp(log_p[t]) values[t].
inline void weighted_values(const std::vector<double>& log_p, const float* values, std::size_t dim,
                            std::vector<double>& out) {
  out.assign(dim, 0.0);
  for (std::size_t t = 0; t < log_p.size(); ++t) {
    const double p = std::exp(log_p[t]);
    for (std::size_t d = 0; d < dim; ++d) out[d] += p * static_cast<double>(values[t * dim + d]);
  }
}

inline double squared_distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

}  // namespace detail

inline double relative_squared_error(std::span<const float> exact,
                                     std::span<const float> approximate) {
  detail::metric_requires_size("approximate", approximate.size(), exact.size());
  double error = 0;
  double energy = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const auto x = static_cast<double>(exact[i]);
    const double difference = x - static_cast<double>(approximate[i]);
    error += difference * difference;
    energy += x * x;
  }
  return detail::squared_ratio(error, energy);
}

inline error_split split_error(std::span<const float> exact, std::span<const float> approximate,
                               std::size_t head_dim, double top_percent) {
  detail::metric_requires_tokens(exact, approximate, head_dim);
  detail::metric_requires(
      top_percent > 0 && top_percent <= 100,
      "top_percent is " + std::to_string(top_percent) + "; it must be above 0 and at most 100");

  struct token_error {
    double total, magnitude, direction;
  };
  std::vector<token_error> errors;
  errors.reserve(exact.size() / head_dim);
  for (std::size_t first = 0; first < exact.size(); first += head_dim) {
    double norm = 0;
    double approx_norm = 0;
    double total = 0;
    for (std::size_t i = first; i < first + head_dim; ++i) {
      const auto x = static_cast<double>(exact[i]);
      const auto y = static_cast<double>(approximate[i]);
      norm += x * x;
      approx_norm += y * y;
      total += (x - y) * (x - y);
    }
    norm = std::sqrt(norm);
    approx_norm = std::sqrt(approx_norm);
    // 2 (1 - cos) is the squared distance of the unit vectors: no cancellation for small angles.
    double angle = 0;
    if (norm > 0 && approx_norm > 0)
      for (std::size_t i = first; i < first + head_dim; ++i) {
        const double difference = static_cast<double>(exact[i]) / norm -
                                  static_cast<double>(approximate[i]) / approx_norm;
        angle += difference * difference;
      }
    errors.push_back(
        {total, (norm - approx_norm) * (norm - approx_norm), norm * approx_norm * angle});
  }

  const auto wanted = std::ceil(top_percent / 100.0 * static_cast<double>(errors.size()));
  const auto count = (std::min)(static_cast<std::size_t>(wanted), errors.size());
  std::stable_sort(errors.begin(), errors.end(),
                   [](const token_error& a, const token_error& b) { return a.total > b.total; });

  error_split split;
  split.tokens = count;
  std::size_t with_error = 0;
  for (std::size_t i = 0; i < count; ++i) {
    split.total += errors[i].total;
    split.magnitude += errors[i].magnitude;
    split.direction += errors[i].direction;
    if (errors[i].total > 0) {
      split.mean_magnitude_share += errors[i].magnitude / errors[i].total;
      ++with_error;
    }
  }
  if (with_error > 0) split.mean_magnitude_share /= static_cast<double>(with_error);
  return split;
}

inline double mean_norm_error(std::span<const float> exact, std::span<const float> approximate,
                              std::size_t head_dim) {
  detail::metric_requires_tokens(exact, approximate, head_dim);
  double sum = 0;
  std::size_t tokens = 0;
  for (std::size_t first = 0; first < exact.size(); first += head_dim) {
    double energy = 0;
    double approx_energy = 0;
    for (std::size_t i = first; i < first + head_dim; ++i) {
      energy += static_cast<double>(exact[i]) * static_cast<double>(exact[i]);
      approx_energy += static_cast<double>(approximate[i]) * static_cast<double>(approximate[i]);
    }
    if (energy == 0) continue;
    sum += std::abs(std::sqrt(approx_energy / energy) - 1);
    ++tokens;
  }
  return tokens > 0 ? sum / static_cast<double>(tokens) : 0.0;
}

inline attention_error compare_attention(const attention_sample& sample) {
  const std::size_t query_size = sample.query_heads * sample.key_dim;
  detail::metric_requires(sample.tokens > 0, "tokens is 0; it must be positive");
  detail::metric_requires(query_size > 0 && sample.value_dim > 0,
                          "query_heads, key_dim or value_dim is 0; they must be positive");
  const std::size_t positions = sample.queries.size() / query_size;
  detail::metric_requires(
      positions > 0 && positions <= sample.tokens && sample.queries.size() % query_size == 0,
      "queries has " + std::to_string(sample.queries.size()) +
          " numbers; it must be query_heads * key_dim = " + std::to_string(query_size) +
          " times 1 to tokens = " + std::to_string(sample.tokens));
  const std::size_t key_size = sample.tokens * sample.key_dim;
  const std::size_t value_size = sample.tokens * sample.value_dim;
  detail::metric_requires_size("keys", sample.keys.size(), key_size);
  detail::metric_requires_size("approx_keys", sample.approx_keys.size(), key_size);
  detail::metric_requires_size("values", sample.values.size(), value_size);
  detail::metric_requires_size("approx_values", sample.approx_values.size(), value_size);

  attention_error result;
  double energy = 0;
  std::vector<double> log_p, approx_log_p, exact, approximate;
  for (std::size_t position = 0; position < positions; ++position) {
    const std::size_t visible = sample.tokens - positions + position + 1;
    for (std::size_t head = 0; head < sample.query_heads; ++head) {
      const float* query =
          sample.queries.data() + (position * sample.query_heads + head) * sample.key_dim;
      detail::log_softmax_scores(query, sample.keys.data(), visible, sample.key_dim, log_p);
      detail::log_softmax_scores(query, sample.approx_keys.data(), visible, sample.key_dim,
                                 approx_log_p);
      for (std::size_t t = 0; t < visible; ++t)
        result.kl += std::exp(log_p[t]) * (log_p[t] - approx_log_p[t]);

      detail::weighted_values(log_p, sample.values.data(), sample.value_dim, exact);
      for (const double x : exact) energy += x * x;
      detail::weighted_values(approx_log_p, sample.approx_values.data(), sample.value_dim,
                              approximate);
      result.output += detail::squared_distance(exact, approximate);
      detail::weighted_values(log_p, sample.approx_values.data(), sample.value_dim, approximate);
      result.output_exact_keys += detail::squared_distance(exact, approximate);
    }
  }
  result.kl /= static_cast<double>(positions * sample.query_heads);
  result.output = detail::squared_ratio(result.output, energy);
  result.output_exact_keys = detail::squared_ratio(result.output_exact_keys, energy);
  return result;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
