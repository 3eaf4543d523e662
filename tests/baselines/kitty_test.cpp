// Kitty by hand and against KIVI, of which it is made.
#include "kvarn/baselines/kitty.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "support.hpp"

namespace {

using kvarn::tile_kind;
using kvarn_test::run;

TEST(Kitty, ByHand) {
  // 4 tokens of 8 channels. Channel 5 is the largest: its range of 30 has steps of 2, that of
  // channel 2 (range 3) steps of 1, the others are zero.
  std::vector<float> in(4 * 8, 0.0f);
  const float large[] = {-15, 15, 5, -1};
  const float small[] = {0, 1, 2.75f, 3};
  for (std::size_t t = 0; t < 4; ++t) {
    in[8 * t + 5] = large[t];
    in[8 * t + 2] = small[t];
  }
  auto expected = in;
  expected[8 * 2 + 2] = 3;
  EXPECT_EQ(run(kvarn::kitty, {tile_kind::key, 2, 8, 4}, in), expected);
}

// Keys are KIVI's at 4 bits in 16 of 128 channels and at 2 bits in the others, values are KIVI's.
TEST(Kitty, IsMadeOfKivi) {
  const auto sample = kvarn_test::make_kv_sample(kvarn_test::kv_profiles[0], 128, 1);
  const auto& in = sample.keys;
  const auto coarse = run(kvarn::kivi, {tile_kind::key, 2, 128, 128}, in);
  const auto fine = run(kvarn::kivi, {tile_kind::key, 4, 128, 128}, in);
  std::vector<double> size(128);
  for (std::size_t i = 0; i < in.size(); ++i) size[i % 128] += std::abs(in[i]);
  auto sorted = size;
  std::nth_element(sorted.begin(), sorted.begin() + 112, sorted.end());
  const auto out = run(kvarn::kitty, {tile_kind::key, 2, 128, 128}, in);
  for (std::size_t i = 0; i < in.size(); ++i)
    ASSERT_EQ(out[i], (size[i % 128] >= sorted[112] ? fine : coarse)[i]) << i;
  const kvarn::baseline_settings values{tile_kind::value, 2, 128, 128};
  EXPECT_EQ(run(kvarn::kitty, values, sample.values), run(kvarn::kivi, values, sample.values));
}

TEST(Kitty, ErrorOfNormalNumbers) {
  // An eighth of the energy with the error of 4 bits, and a little more of it: the largest
  // channels.
  const double plain = 0.875 * 0.25 + 0.125 * 0.01;
  const double error = kvarn_test::normal_error(kvarn::kitty, {tile_kind::key, 2, 128, 128});
  EXPECT_GT(error, 0.96 * plain);
  EXPECT_LT(error, 1.01 * plain);
}

}  // namespace
