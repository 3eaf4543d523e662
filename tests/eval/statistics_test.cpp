// Means and percentiles against numbers worked out by hand.
#include "../../tools/eval/statistics.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace {

using namespace kvarn_eval;

TEST(Statistics, PercentilesInterpolate) {
  EXPECT_DOUBLE_EQ(percentile({3, 1, 2, 5, 4}, 50), 3);
  EXPECT_DOUBLE_EQ(percentile({4, 1, 2, 3}, 50), 2.5);
  EXPECT_DOUBLE_EQ(percentile({0, 10}, 99), 9.9);
  EXPECT_DOUBLE_EQ(percentile({7}, 99), 7);
  EXPECT_DOUBLE_EQ(percentile({1, 2}, 0), 1);
  EXPECT_DOUBLE_EQ(percentile({1, 2}, 100), 2);
}

// Enough of them that sorting by < would take the values apart, or read beyond them.
TEST(Statistics, OfValuesThatAreNotFiniteAreNotNumbers) {
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    std::vector<float> values(200);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = i % 3 == 0 ? bad : static_cast<float>((7 * i) % 31);
    for (const double percent : {0.0, 50.0, 99.0, 100.0})
      EXPECT_TRUE(std::isnan(percentile(values, percent))) << bad;
    const summary s = summarize({values, values, std::vector<char>(200, 1)}, values);
    EXPECT_TRUE(std::isnan(s.kl_median) && std::isnan(s.kl_max)) << bad;
    EXPECT_FALSE(std::isfinite(s.kl_mean)) << bad;
    EXPECT_EQ(s.top1, 1);
  }
}

TEST(Statistics, SummaryOfFourPositions) {
  const token_scores scores{{0, 1, 0.5f, 0.1f}, {1, 2, 3, 2}, {1, 0, 1, 1}};
  const summary s = summarize(scores, std::vector<float>{1, 1, 2, 2});
  EXPECT_EQ(s.positions, 4u);
  EXPECT_NEAR(s.kl_mean, 0.4, 1e-7);
  EXPECT_NEAR(s.kl_median, 0.3, 1e-7);
  EXPECT_NEAR(s.kl_p99, 0.5 + 0.97 * 0.5, 1e-7);
  EXPECT_EQ(s.kl_max, 1);
  EXPECT_EQ(s.top1, 0.75);
  EXPECT_NEAR(s.perplexity, std::exp(2.0), 1e-12);
  EXPECT_NEAR(s.exact_perplexity, std::exp(1.5), 1e-12);
}

TEST(Statistics, PartsJoinAgain) {
  const token_scores all{{1, 2, 3}, {4, 5, 6}, {0, 1, 0}};
  token_scores joined = part_of(all, 0, 1);
  append(joined, part_of(all, 1, 2));
  EXPECT_EQ(joined.kl, all.kl);
  EXPECT_EQ(joined.nll, all.nll);
  EXPECT_EQ(joined.agrees, all.agrees);
}

}  // namespace
