// Both forms of KVQuant by hand, on ties, and their errors.
#include "kvarn/baselines/kvquant.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "support.hpp"

namespace {

using kvarn::tile_kind;
using kvarn_test::nearest_float16;
using kvarn_test::run;

TEST(KvquantChannels, ByHand) {
  // 2 tokens of 4 channels; channel 1 stays exact. Keys: the two numbers of every other channel are
  // the ends of its range. Values: the ranges of the tokens are 0 to 3 and 10 to 16 without it.
  const std::vector<float> in{0, 1000.125f, 1.4f, 3, 10, -70, 13.2f, 16};
  const auto rounded = static_cast<float>(nearest_float16(1000.125));
  EXPECT_EQ(run(kvarn::kvquant_channels, {tile_kind::value, 2, 4, 2}, in),
            (std::vector<float>{0, rounded, 1, 3, 10, -70, 14, 16}));
  const auto keys = run(kvarn::kvquant_channels, {tile_kind::key, 2, 4, 2}, in);
  EXPECT_EQ(keys[1], rounded);
  EXPECT_EQ(keys[5], -70);
  EXPECT_NEAR(keys[2], 1.4f, 1e-3);
  EXPECT_NEAR(keys[6], 13.2f, 1e-2);
}

TEST(KvquantChannels, OnePercentAtLeastOne) {
  for (const auto& [head_dim, channels] :
       {std::pair{64, 1}, {128, 1}, {192, 2}, {256, 3}, {512, 5}})
    EXPECT_EQ(kvarn::kvquant_exact_channels(head_dim), channels) << head_dim;
}

// One of 128 channels is exact, the others are KIVI's.
TEST(KvquantChannels, ErrorOfNormalNumbers) {
  for (const auto kind : {tile_kind::key, tile_kind::value}) {
    const kvarn::baseline_settings settings{kind, 2, 128, 128};
    const double error = kvarn_test::normal_error(kvarn::kvquant_channels, settings);
    const double kivi = kvarn_test::normal_error(kvarn::kivi, settings);
    EXPECT_LT(error / kivi, 127.0 / 128) << "the largest channel has more than its share";
    EXPECT_GT(error / kivi, 0.98);
  }
}

TEST(KvquantSparse, ByHand) {
  // Lowest and highest stay; what is left lies on 0, 1, 2, 3.
  const std::vector<float> in{1, -100.0625f, 0, 1.9f, 50, 3};
  EXPECT_EQ(run(kvarn::kvquant_sparse, {tile_kind::value, 2, 6, 1}, in),
            (std::vector<float>{1, static_cast<float>(nearest_float16(-100.0625)), 0, 2, 50, 3}));
  // The same numbers as one channel of six tokens.
  EXPECT_EQ(run(kvarn::kvquant_sparse, {tile_kind::key, 2, 1, 6}, in),
            run(kvarn::kvquant_sparse, {tile_kind::value, 2, 6, 1}, in));
}

TEST(KvquantSparse, TiesDoNotMakeMoreOutliers) {
  // 64 zeros and 64 ones: one of each is an outlier, and all others still have their range.
  std::vector<float> in(128);
  std::fill(in.begin() + 64, in.end(), 1.0f);
  const auto out = run(kvarn::kvquant_sparse, {tile_kind::value, 2, 128, 1}, in);
  for (std::size_t i = 0; i < 128; ++i) ASSERT_NEAR(out[i], in[i], 1e-3);
  for (const auto& [count, side] : {std::pair{1, 0}, {2, 0}, {3, 1}, {128, 1}, {400, 2}, {512, 3}})
    EXPECT_EQ(kvarn::kvquant_outliers_per_side(count), side) << count;
}

// The range of 126 of 128 normal numbers: the mean square of the distance between the second
// smallest and the second largest, by integration over independent order statistics.
TEST(KvquantSparse, ErrorOfNormalNumbers) {
  constexpr double n = 128;
  const auto second_largest = [](double x) {
    const double below = std::erfc(-x / std::sqrt(2.0)) / 2;
    return std::pow(below, n - 2) * (1 - below) * std::exp(-x * x / 2);
  };
  const double mean = kvarn_test::mean_over(-8, 8, second_largest, [](double x) { return x; });
  const double square =
      kvarn_test::mean_over(-8, 8, second_largest, [](double x) { return x * x; });
  const double range_square = 2 * square + 2 * mean * mean;
  for (const auto kind : {tile_kind::key, tile_kind::value})
    for (const int bits : {3, 4}) {  // at 2 bits cells are too wide for an even density
      const double levels = (1 << bits) - 1;
      const double inliers = 124 / n;  // two are exact, two are ends of the range
      EXPECT_NEAR(kvarn_test::normal_error(kvarn::kvquant_sparse, {kind, bits, 128, 128}),
                  inliers * range_square / (levels * levels * 12),
                  0.04 * range_square / (levels * levels * 12));
    }
  for (const auto kind : {tile_kind::key, tile_kind::value})
    EXPECT_NEAR(kvarn_test::normal_error(kvarn::kvquant_sparse, {kind, 2, 128, 128}), 0.185, 0.003);
}

}  // namespace
