// Synthetic keys, values and queries of one KV head with the habits of real models: a fixed outlier
// direction in slowly rotating channel pairs whose amplitude changes from token to token, tokens of
// unlike size, correlated channels, a small first token (sink) that wins the attention.
//
// The token-dependent amplitude is what matters: with it the errors of per-channel rounding are
// errors of magnitude, as they are in real models. Equal seeds give equal numbers with every
// standard library (up to the last bit of log, cos and pow).
#pragma once

#include <Eigen/Dense>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace kvarn_test {

struct kv_profile {
  std::string_view name;
  int head_dim;
  double rope_theta;
  int outlier_pairs;      // channel pairs of the outlier direction
  double outlier_norm;    // its norm / key_norm
  double outlier_spread;  // log-spread of its amplitude over tokens; 0: exactly constant
  double token_spread;    // log-spread of the size of tokens
  double key_norm;        // of the bulk, without the outlier direction
  double value_norm;
  double sink_key;           // norm of the first key / median norm
  double sink_value;         // size of the first value / that of the others
  bool independent = false;  // all numbers independent Gaussians; only the norms above count
};

inline constexpr std::array kv_profiles{
    kv_profile{"A llama-like", 128, 5e5, 3, 3, 0.35, 0.25, 15, 3, 0.35, 0.02},
    kv_profile{"B qwen3-like", 128, 1e6, 2, 5, 0.5, 0.25, 15, 3, 0.35, 0.02},
    kv_profile{"C qwen2.5-bias", 128, 1e6, 6, 20, 0, 0.25, 15, 3, 0.8, 0.02},
    kv_profile{"D smol", 64, 1e5, 2, 2, 0.35, 0.25, 15, 3, 0.35, 0.02},
    kv_profile{"E control", 128, 5e5, 0, 0, 0, 0, 15, 3, 1, 1, true},
};

// Standard normal numbers: Box-Muller on std::mt19937_64, whose output the standard fixes.
class gaussian_source {
 public:
  explicit gaussian_source(std::uint64_t seed) : engine_(seed) {}

  // In [0, 1).
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  // In [0, count).
  int index(int count) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(count)); }

  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    const double angle = 2.0 * std::numbers::pi * uniform();
    has_spare_ = true;
    spare_ = radius * std::sin(angle);
    return radius * std::cos(angle);
  }

  // Student's t, scaled to unit variance. Precondition: degrees > 2.
  double student(int degrees) {
    const double numerator = normal();
    double chi_squared = 0;
    for (int i = 0; i < degrees; ++i) {
      const double x = normal();
      chi_squared += x * x;
    }
    return numerator * std::sqrt((degrees - 2) / chi_squared);
  }

 private:
  std::mt19937_64 engine_;
  bool has_spare_ = false;
  double spare_ = 0;
};

using row_major_matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Row-major [tokens][head_dim], keys after RoPE.
struct kv_sample {
  int tokens = 0;
  int head_dim = 0;
  std::vector<float> keys;
  std::vector<float> values;

  // The body behind `sink` exact tokens.
  std::span<const float> keys_from(int sink) const { return from(keys, sink); }
  std::span<const float> values_from(int sink) const { return from(values, sink); }

 private:
  std::span<const float> from(const std::vector<float>& all, int first) const {
    return std::span<const float>(all).subspan(static_cast<std::size_t>(first * head_dim));
  }
};

namespace detail {

inline std::vector<float> to_floats(const row_major_matrix& matrix) {
  std::vector<float> values(static_cast<std::size_t>(matrix.size()));
  std::transform(matrix.data(), matrix.data() + matrix.size(), values.begin(),
                 [](double x) { return static_cast<float>(x); });
  return values;
}

inline row_major_matrix normal_matrix(gaussian_source& random, int rows, int cols) {
  return row_major_matrix::NullaryExpr(rows, cols, [&](auto, auto) { return random.normal(); });
}

// Rotates the pairs (i, i + head_dim / 2) of each row by row * theta^(-2 i / head_dim).
inline void apply_rope(row_major_matrix& keys, double theta) {
  const Eigen::Index half = keys.cols() / 2;
  for (Eigen::Index t = 0; t < keys.rows(); ++t)
    for (Eigen::Index i = 0; i < half; ++i) {
      const double angle = static_cast<double>(t) *
                           std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
      const double a = keys(t, i);
      const double b = keys(t, i + half);
      keys(t, i) = a * std::cos(angle) - b * std::sin(angle);
      keys(t, i + half) = a * std::sin(angle) + b * std::cos(angle);
    }
}

inline row_major_matrix make_keys(const kv_profile& profile, int tokens, gaussian_source& random) {
  const int d = profile.head_dim;

  // Channel sizes of the bulk, and the outlier direction in pairs of the slower half.
  Eigen::RowVectorXd sigma(d);
  for (double& x : sigma) x = std::exp(0.35 * random.normal());
  sigma *= profile.key_norm / sigma.norm();
  Eigen::RowVectorXd outlier = Eigen::RowVectorXd::Zero(d);
  for (int drawn = 0; drawn < profile.outlier_pairs;) {
    const int pair = d / 4 + random.index(d / 4);
    if (outlier[pair] != 0) continue;
    const double amplitude = std::exp(0.5 * random.normal());
    const double phase = 2.0 * std::numbers::pi * random.uniform();
    outlier[pair] = amplitude * std::cos(phase);
    outlier[pair + d / 2] = amplitude * std::sin(phase);
    ++drawn;
  }
  outlier *= profile.outlier_norm * profile.key_norm / outlier.norm();

  // The bulk: eight factors that drift from token to token, and heavy-tailed noise.
  constexpr int factors = 8;
  const row_major_matrix loading = normal_matrix(random, d, factors) / std::sqrt(double{factors});
  Eigen::VectorXd state = normal_matrix(random, factors, 1);
  row_major_matrix keys(tokens, d);
  for (int t = 0; t < tokens; ++t) {
    for (double& x : state) x = 0.5 * x + std::sqrt(0.75) * random.normal();
    double outlier_size = std::exp(profile.outlier_spread * random.normal());
    double token_size = std::exp(profile.token_spread * random.normal());
    const double lot = random.uniform();
    const double both = lot < 0.02 ? 0.3 : lot < 0.03 ? 2.5 : 1.0;
    token_size *= both;
    if (profile.outlier_spread > 0) outlier_size *= both;
    Eigen::RowVectorXd bulk = (loading * state).transpose();
    for (double& x : bulk) x = std::sqrt(0.5) * (x + random.student(6));
    keys.row(t) = outlier_size * outlier + token_size * sigma.cwiseProduct(bulk);
  }

  std::vector<double> norms(static_cast<std::size_t>(tokens));
  for (int t = 0; t < tokens; ++t) norms[static_cast<std::size_t>(t)] = keys.row(t).norm();
  std::nth_element(norms.begin(), norms.begin() + tokens / 2, norms.end());
  const double median = norms[static_cast<std::size_t>(tokens / 2)];
  Eigen::RowVectorXd sink = -0.2 * outlier;
  for (int c = 0; c < d; ++c) sink[c] += sigma[c] * random.normal();
  keys.row(0) = sink * (profile.sink_key * median / sink.norm());

  apply_rope(keys, profile.rope_theta);
  return keys;
}

inline row_major_matrix make_values(const kv_profile& profile, int tokens,
                                    gaussian_source& random) {
  const int d = profile.head_dim;
  Eigen::RowVectorXd mean(d), sigma(d);
  for (int c = 0; c < d; ++c) {
    mean[c] = 0.1 * random.normal();
    sigma[c] = std::exp(0.25 * random.normal());
  }
  row_major_matrix values(tokens, d);
  for (int t = 0; t < tokens; ++t) {
    double size = std::exp(0.3 * random.normal()) * profile.value_norm / std::sqrt(d);
    if (random.uniform() < 0.01) size *= 4;
    if (t == 0) size *= profile.sink_value;
    for (int c = 0; c < d; ++c) values(t, c) = size * (mean[c] + sigma[c] * random.student(8));
  }
  return values;
}

}  // namespace detail

inline kv_sample make_kv_sample(const kv_profile& profile, int tokens, std::uint64_t seed) {
  gaussian_source random(seed);
  kv_sample sample{tokens, profile.head_dim, {}, {}};
  if (profile.independent) {
    const double root = std::sqrt(profile.head_dim);
    const auto normal = [&] { return detail::normal_matrix(random, tokens, profile.head_dim); };
    sample.keys = detail::to_floats(normal() * (profile.key_norm / root));
    sample.values = detail::to_floats(normal() * (profile.value_norm / root));
  } else {
    sample.keys = detail::to_floats(detail::make_keys(profile, tokens, random));
    sample.values = detail::to_floats(detail::make_values(profile, tokens, random));
  }
  return sample;
}

// [count][head_dim] queries for the last `count` positions. Each looks for one earlier token: its
// logits (with softmax scale 1/sqrt(head_dim)) are -6 for the mean key, 1.5 for the sink and 2.5
// for that token, and among all such queries it has the smallest variance of logits over the keys.
// Precondition: count < tokens.
inline std::vector<float> make_queries(const kv_sample& sample, int count, std::uint64_t seed) {
  using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int d = sample.head_dim;
  const row_major_matrix keys =
      Eigen::Map<const float_matrix>(sample.keys.data(), sample.tokens, d).cast<double>();
  const Eigen::RowVectorXd mean = keys.colwise().mean();
  const row_major_matrix centred = keys.rowwise() - mean;
  Eigen::MatrixXd covariance = centred.transpose() * centred / sample.tokens;
  covariance.diagonal().array() += 0.05 * covariance.trace() / d;
  const Eigen::LLT<Eigen::MatrixXd> metric(covariance);

  gaussian_source random(seed);
  const Eigen::Vector3d logits(-6.0, 1.5, 2.5);
  row_major_matrix queries(count, d);
  for (int i = 0; i < count; ++i) {
    const int position = sample.tokens - count + i;
    Eigen::MatrixXd constraints(d, 3);
    constraints << mean.transpose(), keys.row(0).transpose(),
        keys.row(1 + random.index(position)).transpose();
    const Eigen::MatrixXd solved = metric.solve(constraints);
    const Eigen::Matrix3d gram = constraints.transpose() * solved;
    const Eigen::Vector3d weights = std::sqrt(d) * gram.ldlt().solve(logits);
    queries.row(i) = weights.transpose() * solved.transpose();
  }
  return detail::to_floats(queries);
}

}  // namespace kvarn_test
