// Both methods called PolarQuant by hand, and their errors against those of their angles and radii.
#include "kvarn/baselines/polar.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

#include "kvarn/baselines/polar_tree.hpp"
#include "support.hpp"

namespace {

using kvarn::tile_kind;
using kvarn_test::nearest_float16;
using kvarn_test::run;

constexpr double pi = std::numbers::pi;

TEST(Polar, ByHand) {
  // Two tokens of one pair: (1, 0) and (0, 2). Radii 1 and 2 in 16 cells of 1/16: the centres of
  // the first and the last. Angles 0 and pi/2 likewise.
  const auto out = run(kvarn::polar, {tile_kind::key, 4, 2, 2}, {1, 0, 0, 2});
  const double step = nearest_float16(pi / 2 / 16);
  EXPECT_NEAR(out[0], (1 + 0.5 / 16) * std::cos(0.5 * step), 1e-6);
  EXPECT_NEAR(out[1], (1 + 0.5 / 16) * std::sin(0.5 * step), 1e-6);
  EXPECT_NEAR(out[2], (1 + 15.5 / 16) * std::cos(15.5 * step), 1e-6);
  EXPECT_NEAR(out[3], (1 + 15.5 / 16) * std::sin(15.5 * step), 1e-6);
}

TEST(Polar, PairsAreHalfAHeadApart) {
  // Channels 0 and 2 have a constant radius and angle; so have 1 and 3.
  std::vector<float> in;
  for (int t = 0; t < 8; ++t) in.insert(in.end(), {3, -5, 4, 12});
  const auto out = run(kvarn::polar, {tile_kind::key, 4, 4, 8}, in);
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_NEAR(out[i], in[i], 0.02);
}

// The angle of normal numbers is even on the circle, of which 128 of them cover 127/129; the range
// of 128 radii is about 3.15.
TEST(Polar, ErrorOfNormalNumbers) {
  const double angle = std::pow(2 * pi * 127 / 129 / 16, 2) / 12;
  const double radius = std::pow(3.15 / 16, 2) / 12 / 2;
  EXPECT_NEAR(
      kvarn_test::normal_error(kvarn::polar, {tile_kind::key, 4, 128, 128}) / (angle + radius), 1,
      0.05);
}

TEST(PolarTree, ByHand) {
  // All of the radius in the first channel: every angle is 0, which the middle of a cell (level 1)
  // and the smallest levels of the codebooks replace.
  std::array<float, 16> x{};
  x[0] = 8;
  kvarn::polar_tree_round(x);
  const double a = pi / 16;
  const double b = 0.309756, c = 0.426250, d = 0.524214;
  EXPECT_NEAR(x[0], 8 * std::cos(d) * std::cos(c) * std::cos(b) * std::cos(a), 1e-5);
  EXPECT_NEAR(x[1], 8 * std::cos(d) * std::cos(c) * std::cos(b) * std::sin(a), 1e-5);
  EXPECT_NEAR(x[2], 8 * std::cos(d) * std::cos(c) * std::sin(b) * std::cos(a), 1e-5);
  EXPECT_NEAR(x[8], 8 * std::sin(d) * std::cos(c) * std::cos(b) * std::cos(a), 1e-5);
}

// |x^| = |x| but for FP16, and errors of angles on different levels are independent, so that the
// cosine between x and x^ is the product of the mean cosines of the levels' errors.
TEST(PolarTree, ErrorOfNormalNumbers) {
  const auto mean_cosine = [](int level) {
    const int power = (1 << (level - 1)) - 1;
    return kvarn_test::mean_over(
        0, level == 1 ? 2 * pi : pi / 2, [&](double a) { return std::pow(std::sin(2 * a), power); },
        [&](double a) {
          const float angle = static_cast<float>(a);
          return std::cos(a - static_cast<double>(kvarn::round_tree_angle(angle, level)));
        });
  };
  const double cosine = mean_cosine(1) * mean_cosine(2) * mean_cosine(3) * mean_cosine(4);
  const double expected = 2 * (1 - cosine);
  EXPECT_GT(expected, 0.03);
  EXPECT_LT(expected, 0.035);
  for (const auto kind : {tile_kind::key, tile_kind::value})
    EXPECT_NEAR(kvarn_test::normal_error(kvarn::polar_tree, {kind, 4, 128, 128}) / expected, 1,
                0.01);
}

}  // namespace
