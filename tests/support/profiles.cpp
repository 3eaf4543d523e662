// Makes synthetic keys, values and queries.
#include "support/profiles.hpp"

#include <Eigen/Dense>
#include <algorithm>

namespace kvarn_test {
namespace {

using row_major_matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

std::vector<float> to_floats(const row_major_matrix& matrix) {
  std::vector<float> values(static_cast<std::size_t>(matrix.size()));
  std::transform(matrix.data(), matrix.data() + matrix.size(), values.begin(),
                 [](double x) { return static_cast<float>(x); });
  return values;
}

row_major_matrix normal_matrix(gaussian_source& random, int rows, int cols) {
  return row_major_matrix::NullaryExpr(rows, cols, [&](auto, auto) { return random.normal(); });
}

// Rotates the pairs (i, i + head_dim / 2) of each row by row * theta^(-2 i / head_dim).
void apply_rope(row_major_matrix& keys, double theta) {
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

row_major_matrix make_keys(const kv_profile& profile, int tokens, gaussian_source& random) {
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

row_major_matrix make_values(const kv_profile& profile, int tokens, gaussian_source& random) {
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

}  // namespace

kv_sample make_kv_sample(const kv_profile& profile, int tokens, std::uint64_t seed) {
  gaussian_source random(seed);
  kv_sample sample{tokens, profile.head_dim, {}, {}};
  if (profile.independent) {
    const double root = std::sqrt(profile.head_dim);
    const auto normal = [&] { return normal_matrix(random, tokens, profile.head_dim); };
    sample.keys = to_floats(normal() * (profile.key_norm / root));
    sample.values = to_floats(normal() * (profile.value_norm / root));
  } else {
    sample.keys = to_floats(make_keys(profile, tokens, random));
    sample.values = to_floats(make_values(profile, tokens, random));
  }
  return sample;
}

std::vector<float> make_queries(const kv_sample& sample, int count, std::uint64_t seed) {
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
  return to_floats(queries);
}

}  // namespace kvarn_test
