// Metrics against numbers worked out by hand, and their identities.
#include "kvarn/metrics.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "support/profiles.hpp"

namespace {

using kvarn::attention_sample;

std::vector<float> gaussian(std::size_t count, std::uint64_t seed, double size = 1) {
  kvarn_test::gaussian_source random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(size * random.normal());
  return values;
}

std::vector<float> sum(std::vector<float> a, const std::vector<float>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

template <class Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const kvarn::error& e) {
    EXPECT_EQ(e.code(), kvarn::error_code::invalid_argument);
    return e.what();
  }
  return "nothing thrown";
}

TEST(RelativeSquaredError, ByHand) {
  const std::vector<float> exact{3, 4};
  EXPECT_EQ(kvarn::relative_squared_error(exact, std::vector<float>{3, 4}), 0.0);
  EXPECT_EQ(kvarn::relative_squared_error(exact, std::vector<float>{0, 0}), 1.0);
  EXPECT_EQ(kvarn::relative_squared_error(exact, std::vector<float>{4, 2}), 5.0 / 25.0);
}

TEST(RelativeSquaredError, OfZeroAndOfNothing) {
  const std::vector<float> zero{0, 0};
  EXPECT_EQ(kvarn::relative_squared_error(zero, zero), 0.0);
  EXPECT_EQ(kvarn::relative_squared_error(zero, std::vector<float>{0, 1}),
            std::numeric_limits<double>::infinity());
  EXPECT_EQ(kvarn::relative_squared_error({}, {}), 0.0);
}

TEST(RelativeSquaredError, DoesNotOverflowBinary32) {
  const std::vector<float> exact{1e30f, 0};
  EXPECT_EQ(kvarn::relative_squared_error(exact, std::vector<float>{0, 0}), 1.0);
}

TEST(SplitError, PureMagnitudeAndPureDirection) {
  // (3, 4) -> (6, 8): 5 longer. (3, 4) -> (4, 3): turned, |difference|^2 = 2.
  const auto longer = kvarn::split_error(std::vector<float>{3, 4}, std::vector<float>{6, 8}, 2);
  EXPECT_EQ(longer.tokens, 1u);
  EXPECT_DOUBLE_EQ(longer.total, 25);
  EXPECT_DOUBLE_EQ(longer.magnitude, 25);
  EXPECT_NEAR(longer.direction, 0, 1e-14);
  EXPECT_DOUBLE_EQ(longer.magnitude_share(), 1);
  EXPECT_DOUBLE_EQ(longer.mean_magnitude_share, 1);

  const auto turned = kvarn::split_error(std::vector<float>{3, 4}, std::vector<float>{4, 3}, 2);
  EXPECT_DOUBLE_EQ(turned.total, 2);
  EXPECT_DOUBLE_EQ(turned.magnitude, 0);
  EXPECT_NEAR(turned.direction, 2, 1e-14);
  EXPECT_DOUBLE_EQ(turned.magnitude_share(), 0);
}

TEST(SplitError, MixedTokenAndBothAverages) {
  // (1, 0) -> (0, 2): E_T 5, E_M 1, E_D 4. (1, 0) -> (2, 0): E_T = E_M = 1. (1, 0) exact: skipped.
  const std::vector<float> exact{1, 0, 1, 0, 1, 0};
  const std::vector<float> approximate{0, 2, 2, 0, 1, 0};
  const auto split = kvarn::split_error(exact, approximate, 2);
  EXPECT_EQ(split.tokens, 3u);
  EXPECT_DOUBLE_EQ(split.total, 6);
  EXPECT_DOUBLE_EQ(split.magnitude, 2);
  EXPECT_DOUBLE_EQ(split.direction, 4);
  EXPECT_DOUBLE_EQ(split.magnitude_share(), 2.0 / 6.0);
  EXPECT_DOUBLE_EQ(split.mean_magnitude_share, (1.0 / 5.0 + 1.0) / 2);

  // The worst third is the first token; a little more than a third rounds up to two.
  const auto worst = kvarn::split_error(exact, approximate, 2, 33.3);
  EXPECT_EQ(worst.tokens, 1u);
  EXPECT_DOUBLE_EQ(worst.total, 5);
  EXPECT_DOUBLE_EQ(worst.magnitude, 1);
  EXPECT_EQ(kvarn::split_error(exact, approximate, 2, 33.4).tokens, 2u);
  EXPECT_EQ(kvarn::split_error(exact, approximate, 2, 1e-9).tokens, 1u);
}

TEST(SplitError, ZeroVectorsAreMagnitude) {
  const std::vector<float> exact{3, 4, 0, 0};
  const std::vector<float> approximate{0, 0, 3, 4};
  const auto split = kvarn::split_error(exact, approximate, 2);
  EXPECT_DOUBLE_EQ(split.magnitude, 50);
  EXPECT_DOUBLE_EQ(split.direction, 0);
  const auto none = kvarn::split_error(exact, exact, 2);
  EXPECT_EQ(none.magnitude_share(), 0.0);
  EXPECT_EQ(none.mean_magnitude_share, 0.0);
  EXPECT_EQ(kvarn::split_error({}, {}, 2).tokens, 0u);
}

TEST(SplitError, PartsAddUp) {
  for (const double size : {1e-5, 1e-2, 1.0, 100.0}) {
    const auto exact = gaussian(64 * 128, 1);
    const auto approximate = sum(exact, gaussian(64 * 128, 2, size));
    for (const double percent : {1.0, 10.0, 100.0}) {
      const auto split = kvarn::split_error(exact, approximate, 128, percent);
      EXPECT_NEAR((split.magnitude + split.direction) / split.total, 1, 1e-9) << size;
    }
    const double energy = kvarn::split_error(exact, std::vector<float>(exact.size()), 128).total;
    EXPECT_NEAR(kvarn::split_error(exact, approximate, 128).total / energy,
                kvarn::relative_squared_error(exact, approximate), 1e-12 * (1 + size * size));
  }
}

TEST(MeanNormError, ByHand) {
  // Norms 5 to 10, 2 to 1, and a zero vector, which has no scale.
  const std::vector<float> exact{3, 4, 0, 2, 0, 0};
  const std::vector<float> approximate{0, 10, 1, 0, 7, 7};
  EXPECT_DOUBLE_EQ(kvarn::mean_norm_error(exact, approximate, 2), (1.0 + 0.5) / 2);
  EXPECT_EQ(kvarn::mean_norm_error(exact, exact, 2), 0.0);
  EXPECT_EQ(kvarn::mean_norm_error(std::vector<float>(4), std::vector<float>(4), 2), 0.0);
}

TEST(CompareAttention, ByHand) {
  // Two tokens, key_dim 4 (scale 1/2), one query at the last position. Exact scores ln 3 and 0:
  // probabilities 3/4 and 1/4. Approximate scores 0 and 0: 1/2 and 1/2.
  const auto ln3 = static_cast<float>(std::log(3.0));
  const std::vector<float> query{2, 0, 0, 0};
  const std::vector<float> keys{ln3, 0, 0, 0, 0, 1, 0, 0};
  const std::vector<float> approx_keys{0, 5, 0, 0, 0, 1, 0, 0};
  const std::vector<float> values{4, 8};          // exact output 5
  const std::vector<float> approx_values{4, 12};  // output 8, with exact keys 6
  const auto error = kvarn::compare_attention({.tokens = 2,
                                               .query_heads = 1,
                                               .key_dim = 4,
                                               .value_dim = 1,
                                               .queries = query,
                                               .keys = keys,
                                               .values = values,
                                               .approx_keys = approx_keys,
                                               .approx_values = approx_values});
  EXPECT_NEAR(error.kl, 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-7);
  EXPECT_NEAR(error.output, 9.0 / 25.0, 1e-6);
  EXPECT_NEAR(error.output_exact_keys, 1.0 / 25.0, 1e-6);
}

TEST(CompareAttention, IsCausalAndAveragesOverQueries) {
  // Three tokens, queries of the last two, two heads each, key_dim 1. The error sits in the last
  // key and value alone, which the first position does not see.
  const std::vector<float> keys{0, 0, 0};
  const std::vector<float> approx_keys{0, 0, static_cast<float>(std::log(4.0))};
  const std::vector<float> values{1, 1, 1};
  const std::vector<float> approx_values{1, 1, 7};
  const std::vector<float> queries{1, 1, 1, 0};  // the very last query ignores all keys
  const auto error = kvarn::compare_attention({.tokens = 3,
                                               .query_heads = 2,
                                               .key_dim = 1,
                                               .value_dim = 1,
                                               .queries = queries,
                                               .keys = keys,
                                               .values = values,
                                               .approx_keys = approx_keys,
                                               .approx_values = approx_values});
  // One query of four sees (1/6, 1/6, 2/3) instead of thirds.
  const double kl = (2 * std::log(2.0) + std::log(0.5)) / 3;
  EXPECT_NEAR(error.kl, kl / 4, 1e-7);
  // Outputs are 1. That query's becomes 1/3 + 14/3 = 5; the last one's 3, as do both with exact
  // keys.
  EXPECT_NEAR(error.output, (16.0 + 4.0) / 4, 1e-5);
  EXPECT_NEAR(error.output_exact_keys, (4.0 + 4.0) / 4, 1e-6);
}

struct random_case {
  std::vector<float> queries = gaussian(8 * 3 * 16, 3, 4);
  std::vector<float> keys = gaussian(40 * 16, 4);
  std::vector<float> values = gaussian(40 * 24, 5);
  std::vector<float> approx_keys = keys;
  std::vector<float> approx_values = values;

  attention_sample sample() const {
    return {40, 3, 16, 24, queries, keys, values, approx_keys, approx_values};
  }
};

TEST(CompareAttention, ExactCacheHasNoError) {
  const random_case c;
  const auto error = kvarn::compare_attention(c.sample());
  EXPECT_EQ(error.kl, 0.0);
  EXPECT_EQ(error.output, 0.0);
  EXPECT_EQ(error.output_exact_keys, 0.0);
}

TEST(CompareAttention, IgnoresAnOffsetOfAllKeys) {
  random_case c;
  for (std::size_t i = 0; i < c.keys.size(); ++i) {
    c.keys[i] = std::round(c.keys[i] * 64) / 64;  // so that the sum below is exact
    c.approx_keys[i] = c.keys[i] + static_cast<float>(i % 16);
  }
  const auto error = kvarn::compare_attention(c.sample());
  EXPECT_NEAR(error.kl, 0, 1e-12);
  EXPECT_NEAR(error.output, 0, 1e-12);
}

TEST(CompareAttention, DivergenceIsPositiveAndGrows) {
  double last = 0;
  for (const double size : {0.01, 0.1, 1.0}) {
    random_case c;
    c.approx_keys = sum(c.keys, gaussian(c.keys.size(), 6, size));
    const auto error = kvarn::compare_attention(c.sample());
    EXPECT_GT(error.kl, 10 * last) << size;
    EXPECT_EQ(error.output_exact_keys, 0.0);
    last = error.kl;
  }
}

TEST(CompareAttention, SurvivesScoresThatUnderflow) {
  random_case c;
  for (float& x : c.queries) x *= 1e6f;
  c.approx_keys = sum(c.keys, gaussian(c.keys.size(), 7, 1.0));
  const auto error = kvarn::compare_attention(c.sample());
  EXPECT_TRUE(std::isfinite(error.kl));
  EXPECT_TRUE(std::isfinite(error.output));
  EXPECT_GT(error.kl, 0);
}

TEST(Metrics, RefusalsNameTheValue) {
  const std::vector<float> six(6), five(5);
  EXPECT_NE(message_of([&] {
              kvarn::relative_squared_error(six, five);
            }).find("approximate has 5 numbers; it must have 6"),
            std::string::npos);
  EXPECT_NE(message_of([&] { kvarn::split_error(six, six, 4); }).find("exact has 6"),
            std::string::npos);
  EXPECT_NE(message_of([&] { kvarn::split_error(six, six, 0); }).find("head_dim is 0"),
            std::string::npos);
  EXPECT_NE(message_of([&] { kvarn::split_error(six, five, 2); }).find("approximate has 5"),
            std::string::npos);
  for (const double percent : {0.0, -1.0, 100.5, std::nan("")})
    EXPECT_NE(message_of([&] { kvarn::split_error(six, six, 2, percent); }).find("top_percent is"),
              std::string::npos);

  const random_case c;
  const auto refused = [&](auto change) {
    attention_sample sample = c.sample();
    change(sample);
    return message_of([&] { kvarn::compare_attention(sample); });
  };
  EXPECT_NE(refused([](auto& s) { s.tokens = 0; }).find("tokens is 0"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.value_dim = 0; }).find("value_dim is 0"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.tokens = 7; }).find("queries has 384"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.queries = {}; }).find("queries has 0"), std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.queries = s.queries.first(50); }).find("queries has 50"),
            std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.keys = s.keys.first(9); }).find("keys has 9"),
            std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.values = s.values.first(9); }).find("values has 9"),
            std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.approx_keys = {}; }).find("approx_keys has 0"),
            std::string::npos);
  EXPECT_NE(refused([](auto& s) { s.approx_values = {}; }).find("approx_values has 0"),
            std::string::npos);
}

}  // namespace
