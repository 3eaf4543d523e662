// The synthetic samples have the habits they are made for, and baselines the errors known of them.
#include "support/profiles.hpp"

#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "kvarn/baselines/baselines.hpp"
#include "kvarn/metrics.hpp"

namespace {

using kvarn_test::kv_profiles;

TEST(Profiles, GaussianSourceHasUnitMoments) {
  kvarn_test::gaussian_source random(1);
  constexpr int count = 200000;
  double sum = 0, squares = 0, fourth = 0, student_squares = 0;
  for (int i = 0; i < count; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    const double t = random.student(8);
    student_squares += t * t;
  }
  EXPECT_NEAR(sum / count, 0.0, 0.01);
  EXPECT_NEAR(squares / count, 1.0, 0.02);
  EXPECT_NEAR(fourth / count, 3.0, 0.1);
  EXPECT_NEAR(student_squares / count, 1.0, 0.03);
}

TEST(Profiles, SeedsDecideEverything) {
  for (const auto& profile : kv_profiles) {
    const auto sample = kvarn_test::make_kv_sample(profile, 256, 5);
    const auto same = kvarn_test::make_kv_sample(profile, 256, 5);
    const auto other = kvarn_test::make_kv_sample(profile, 256, 6);
    EXPECT_EQ(sample.keys, same.keys) << profile.name;
    EXPECT_EQ(sample.values, same.values) << profile.name;
    EXPECT_NE(sample.keys, other.keys) << profile.name;
    EXPECT_EQ(sample.keys.size(), static_cast<std::size_t>(256 * profile.head_dim));
    EXPECT_EQ(sample.values.size(), sample.keys.size());
    for (const float x : sample.keys) ASSERT_TRUE(std::isfinite(x)) << profile.name;
    for (const float x : sample.values) ASSERT_TRUE(std::isfinite(x)) << profile.name;
  }
}

TEST(Profiles, SmallSinkBesideOutliers) {
  for (const auto& profile : kv_profiles) {
    if (profile.independent) continue;
    const auto sample = kvarn_test::make_kv_sample(profile, 512, 7);
    const auto norm = [&](std::span<const float> all, int token) {
      const auto d = static_cast<std::size_t>(sample.head_dim);
      const auto row = all.subspan(static_cast<std::size_t>(token) * d, d);
      return std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
    };
    double key_norm = 0;
    double value_norm = 0;
    for (int t = 1; t < 512; ++t) {
      key_norm += norm(sample.keys, t) / 511;
      value_norm += norm(sample.values, t) / 511;
    }
    const double expected =
        profile.key_norm * std::sqrt(1 + profile.outlier_norm * profile.outlier_norm);
    EXPECT_GT(key_norm, 0.8 * expected) << profile.name;
    EXPECT_LT(key_norm, 1.4 * expected) << profile.name;
    EXPECT_LT(norm(sample.keys, 0), 0.9 * key_norm) << profile.name;
    EXPECT_LT(norm(sample.values, 0), 0.1 * value_norm) << profile.name;
  }
}

TEST(Profiles, QueriesHaveTheLogitsTheyAreMadeFor) {
  for (const auto& profile : kv_profiles) {
    constexpr int tokens = 512;
    constexpr int count = 16;
    const auto sample = kvarn_test::make_kv_sample(profile, tokens, 8);
    const auto queries = kvarn_test::make_queries(sample, count, 9);
    const int d = sample.head_dim;
    using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const Eigen::MatrixXd logits =
        Eigen::Map<const float_matrix>(queries.data(), count, d).cast<double>() *
        Eigen::Map<const float_matrix>(sample.keys.data(), tokens, d).cast<double>().transpose() /
        std::sqrt(d);
    for (int i = 0; i < count; ++i) {
      const double tolerance = 1e-3;  // queries are rounded to binary32
      EXPECT_NEAR(logits.row(i).mean(), -6.0, tolerance) << profile.name;
      EXPECT_NEAR(logits(i, 0), 1.5, tolerance) << profile.name;
      const auto visible = logits.row(i).head(tokens - count + i + 1);
      EXPECT_LT((visible.array() - 2.5).abs().minCoeff(), tolerance) << profile.name;
    }
  }
}

// Errors of KIVI and of rotation + KIVI at 2 bits, and the share of magnitude in KIVI's, held
// between bounds around those that a prototype measured on samples of this kind.
TEST(Profiles, BaselineErrors) {
  struct expectation {
    std::size_t profile;
    double kivi_low, kivi_high, rotation_low, rotation_high, magnitude_low, magnitude_high;
  };
  for (const auto& e : {expectation{0, 0.07, 0.11, 0.06, 0.10, 0.25, 0.50},         // A
                        expectation{1, 0.09, 0.15, 0.09, 0.16, 0.55, 0.85},         // B
                        expectation{4, 0.245, 0.255, 0.245, 0.255, 0.05, 0.09}}) {  // E
    const auto& profile = kv_profiles[e.profile];
    double kivi = 0, rotation = 0, magnitude = 0;
    constexpr int heads = 3;
    for (std::uint64_t head = 0; head < heads; ++head) {
      const auto sample = kvarn_test::make_kv_sample(profile, 1152, 100 + head);
      const auto exact = sample.keys_from(128);
      const kvarn::baseline_settings settings{kvarn::tile_kind::key, 2, profile.head_dim, 128};
      std::vector<float> out(exact.size());
      kvarn::quantize_dequantize(kvarn::kivi, settings, exact, out).or_throw();
      kivi += kvarn::relative_squared_error(exact, out) / heads;
      magnitude += kvarn::split_error(exact, out, static_cast<std::size_t>(profile.head_dim))
                       .magnitude_share() /
                   heads;
      kvarn::quantize_dequantize(kvarn::rotation_kivi, settings, exact, out).or_throw();
      rotation += kvarn::relative_squared_error(exact, out) / heads;
    }
    EXPECT_GT(kivi, e.kivi_low) << profile.name;
    EXPECT_LT(kivi, e.kivi_high) << profile.name;
    EXPECT_GT(rotation, e.rotation_low) << profile.name;
    EXPECT_LT(rotation, e.rotation_high) << profile.name;
    EXPECT_GT(magnitude, e.magnitude_low) << profile.name;
    EXPECT_LT(magnitude, e.magnitude_high) << profile.name;
  }
}

}  // namespace
