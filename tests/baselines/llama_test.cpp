// The cache types of llama.cpp by hand, and their errors against the ranges of 32 normal numbers.
#include "kvarn/baselines/llama.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "support.hpp"

namespace {

using kvarn::tile_kind;
using kvarn_test::run;

// A block of zeros but for its first numbers.
std::vector<float> block_of(std::vector<float> first) {
  first.resize(32, 0.0f);
  return first;
}

std::vector<float> round_block(const kvarn::baseline& method, const std::vector<float>& block) {
  return run(method, {tile_kind::key, method.widths.front().key, 32, 1}, block);
}

TEST(Llama, Q80ByHand) {  // scale 127 / 127
  EXPECT_EQ(round_block(kvarn::q8_0, block_of({127, 0.5f, -0.5f, 1.4f, -126.6f, 2.5f})),
            block_of({127, 1, -1, 1, -127, 3}));
}

TEST(Llama, Q40ByHand) {  // scale -8 / -8; codes end at 7 on the other side
  EXPECT_EQ(round_block(kvarn::q4_0, block_of({-8, 7.6f, 0.5f, -0.5f, 3.2f, -7.4f})),
            block_of({-8, 7, 1, 0, 3, -7}));
  // Of +8 and -8 the first decides.
  EXPECT_EQ(round_block(kvarn::q4_0, block_of({8, -8})), block_of({8, -7}));
}

TEST(Llama, Q41ByHand) {  // minimum -5, scale 30 / 15
  const auto out = round_block(kvarn::q4_1, block_of({-5, 25, -2, 4.5f}));
  EXPECT_EQ(out[0], -5);
  EXPECT_EQ(out[1], 25);
  EXPECT_EQ(out[2], -1);  // code 1.5 is rounded up
  EXPECT_EQ(out[3], 5);   // code 4.75
  EXPECT_EQ(out[4], 1);   // 0: code 2.5
}

TEST(Llama, Iq4NlByHand) {
  // The levels themselves: the scale is 1, also after the refit.
  std::vector<float> block(kvarn::iq4_nl_levels.begin(), kvarn::iq4_nl_levels.end());
  block.insert(block.end(), kvarn::iq4_nl_levels.begin(), kvarn::iq4_nl_levels.end());
  EXPECT_EQ(round_block(kvarn::iq4_nl, block), block);
  // Levels -127 and 89 (for 90): the refit is (127^3 * 127 + 90^3 * 89) / (127^4 + 90^2 89^2).
  block.assign(32, 0.0f);
  block[0] = -127;
  block[1] = 90;
  const double cube = 90.0 * 90 * 90;
  const double fourth = 127.0 * 127 * 127 * 127;
  const double scale = (fourth + cube * 89) / (fourth + 90.0 * 90 * 89 * 89);
  const auto out = round_block(kvarn::iq4_nl, block);
  EXPECT_FLOAT_EQ(out[0], static_cast<float>(-127 * kvarn_test::nearest_float16(scale)));
  EXPECT_FLOAT_EQ(out[1], static_cast<float>(89 * kvarn_test::nearest_float16(scale)));
}

// Keys are rotated as far as a power of two divides head_dim, values 64 channels at a time: one
// channel of 192 spreads over 64 then, one of 256 over 256 or 64.
TEST(Llama, OrdersOfTheRotation) {
  for (const auto& [head_dim, key_order] :
       {std::pair{64, 64}, {128, 128}, {192, 64}, {256, 256}, {512, 512}})
    for (const auto kind : {tile_kind::key, tile_kind::value}) {
      const int order = kind == tile_kind::key ? key_order : 64;
      // The rotated token is 1, -1, ... in the first `order` channels, then zeros: q8_0 keeps that.
      std::vector<float> in(static_cast<std::size_t>(head_dim), 0.0f);
      in[1] = static_cast<float>(std::sqrt(order));
      const auto out = run(kvarn::q8_0_rot, {kind, 8, head_dim, 1}, in);
      std::vector<float> by_hand = in;
      for (int first = 0; first < head_dim; first += order)
        kvarn::hadamard(&by_hand[static_cast<std::size_t>(first)], order);
      EXPECT_FLOAT_EQ(by_hand[1], -1) << "the first row but one of a Sylvester matrix";
      by_hand = run(kvarn::q8_0, {kind, 8, head_dim, 1}, by_hand);
      for (int first = 0; first < head_dim; first += order)
        kvarn::hadamard(&by_hand[static_cast<std::size_t>(first)], order);
      EXPECT_EQ(out, by_hand) << head_dim;
    }
}

// The largest magnitude and the range of 32 normal numbers decide the steps; errors are even within
// them. Numbers at the ends have none.
TEST(Llama, ErrorOfNormalNumbers) {
  constexpr double n = 32;
  const auto density = [](double x) { return std::exp(-x * x / 2); };
  const auto below = [](double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; };
  const auto square = [](double x) { return x * x; };
  const double largest_square = kvarn_test::mean_over(
      0, 8, [&](double x) { return std::pow(2 * below(x) - 1, n - 1) * density(x); }, square);
  const auto maximum = [&](double x) { return std::pow(below(x), n - 1) * density(x); };
  const double mean = kvarn_test::mean_over(-8, 8, maximum, [](double x) { return x; });
  const double range_square = 2 * kvarn_test::mean_over(-8, 8, maximum, square) + 2 * mean * mean;
  const auto error = [](const kvarn::baseline& method, tile_kind kind) {
    return kvarn_test::normal_error(method, {kind, method.widths.front().key, 128, 128});
  };
  for (const auto kind : {tile_kind::key, tile_kind::value}) {
    for (const auto& method : {kvarn::q8_0, kvarn::q8_0_rot})
      EXPECT_NEAR(error(method, kind) / (31 / n * largest_square / (127 * 127) / 12), 1, 0.02);
    for (const auto& method : {kvarn::q4_1, kvarn::q4_1_rot})
      EXPECT_NEAR(error(method, kind) / (30 / n * range_square / (15 * 15) / 12), 1, 0.02);
    // Sixteen cells of 1/8 of the largest, and what lies beyond the last on the other side.
    for (const auto& method : {kvarn::q4_0, kvarn::q4_0_rot}) {
      EXPECT_NEAR(error(method, kind), 0.0074, 0.0002);
      EXPECT_GT(error(method, kind), 31 / n * largest_square / (8 * 8) / 12);
    }
    // Uneven levels suit normal numbers better than q4_0's and worse than q4_1's two ends do.
    for (const auto& method : {kvarn::iq4_nl, kvarn::iq4_nl_rot})
      EXPECT_NEAR(error(method, kind), 0.0062, 0.0002);
  }
}

}  // namespace
