// QuaRot's quantiser by hand, and its error.
#include "kvarn/baselines/quarot_token.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support.hpp"

namespace {

using kvarn::tile_kind;
using kvarn_test::nearest_float16;
using kvarn_test::run;

TEST(QuarotToken, ByHand) {
  // Rotated: (3, -1). Clipped range -0.95 to 2.85, step 3.8 / 3 = 1.267, zero round(0.75) = 1;
  // codes round(2.37) + 1 = 3 and round(-0.79) + 1 = 0.
  const double root = std::sqrt(2.0);
  const std::vector<float> in{static_cast<float>(2 / root), static_cast<float>(4 / root)};
  const double step = nearest_float16(3.8 / 3);
  const auto out = run(kvarn::quarot_token, {tile_kind::key, 2, 2, 1}, in);
  EXPECT_NEAR(out[0], (2 * step - step) / root, 1e-6);
  EXPECT_NEAR(out[1], (2 * step + step) / root, 1e-6);
}

TEST(QuarotToken, ZeroIsALevel) {
  // Numbers far from 0 waste the levels between it and them: all but one here.
  std::vector<float> group{8.0f, 8.5f, 9.0f, 9.5f};
  kvarn::round_integer_zero_group(group, 2);
  const auto top = static_cast<float>(3 * nearest_float16(0.95 * 9.5 / 3));
  EXPECT_EQ(group, (std::vector<float>{top, top, top, top}));
  group = {-1.0f, 0.0f, 0.0f, 1.0f};
  kvarn::round_integer_zero_group(group, 4);
  EXPECT_EQ(group[1], 0.0f);
  EXPECT_EQ(group[2], 0.0f);
}

// Half of the time the grid is {-1, 0, 1, 2} steps, else its mirror image. Of normal numbers and
// the mean clipped range of 128 of them (0.95 * 2 * 2.594 = 4.93, so the step is 1.643): the error
// by integration, which ignores how the range varies.
TEST(QuarotToken, ErrorOfNormalNumbers) {
  constexpr double step = 4.93 / 3;
  const double fixed_grid = kvarn_test::mean_over(
      -8, 8, [](double x) { return std::exp(-x * x / 2); },
      [](double x) {
        const double code = std::min(std::max(std::nearbyint(x / step), -1.0), 2.0);
        return (x - code * step) * (x - code * step);
      });
  for (const auto kind : {tile_kind::key, tile_kind::value})
    EXPECT_NEAR(kvarn_test::normal_error(kvarn::quarot_token, {kind, 2, 128, 128}) / fixed_grid, 1,
                0.05);
}

}  // namespace
