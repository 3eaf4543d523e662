// Every baseline against an oracle in double, by hand on tiny inputs, on degenerate inputs, and the
// errors that theory gives for Gaussian numbers.
#include "kvarn/baselines/baselines.hpp"

#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kvarn/metrics.hpp"
#include "support/profiles.hpp"

namespace {

using kvarn::baseline;
using kvarn::baseline_settings;
using kvarn::tile_kind;
using kvarn_test::gaussian_source;
using kvarn_test::row_major_matrix;

std::vector<float> run(const baseline& method, const baseline_settings& settings,
                       const std::vector<float>& in) {
  std::vector<float> out(in.size());
  const kvarn::status s = kvarn::quantize_dequantize(method, settings, in, out);
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}

// The nearest binary16, ties to even, of a number within its range.
double nearest_float16(double x) {
  if (x == 0) return 0;
  const double ulp = std::ldexp(1.0, (std::max)(std::ilogb(x) - 10, -24));
  return std::nearbyint(x / ulp) * ulp;
}

void oracle_round_group(Eigen::Ref<Eigen::MatrixXd> group, int bits) {
  const double levels = (1 << bits) - 1;
  const double zero = nearest_float16(group.minCoeff());
  const bool constant = group.maxCoeff() == group.minCoeff();
  const double step = nearest_float16(constant ? 0.0 : (group.maxCoeff() - zero) / levels);
  group = group.unaryExpr([&](double x) {
    const double code = step <= 0 ? 0.0 : std::nearbyint((x - zero) / step);
    return zero + step * (std::min)((std::max)(code, 0.0), levels);
  });
}

row_major_matrix oracle(std::string_view name, const baseline_settings& settings,
                        row_major_matrix kv) {
  const int d = settings.head_dim;
  Eigen::MatrixXd rotation = Eigen::MatrixXd::Identity(d, d);
  if (name == "rotation_kivi")
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < d; ++j)
        rotation(i, j) =
            (std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? 1 : -1) / std::sqrt(d);
  const bool per_channel =
      name == "rtn_channel" || (name != "rtn_token" && settings.kind == tile_kind::key);
  const int rows = per_channel ? settings.token_group : 1;
  const int cols = per_channel ? 1 : settings.channels_per_group();

  Eigen::MatrixXd rotated = kv * rotation;
  for (int row = 0; row < rotated.rows(); row += rows)
    for (int col = 0; col < d; col += cols)
      oracle_round_group(rotated.block(row, col, rows, cols), settings.bits);
  return rotated * rotation.transpose();
}

// Multiples of 1/64 below 32: exact in binary32 even after a rotation of order 4^k, so that library
// and oracle must choose the same codes.
std::vector<float> grid_values(std::size_t count, std::uint64_t seed) {
  gaussian_source random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(random.index(4096) - 2048) / 64.0f;
  return values;
}

TEST(Baselines, NamesAreUniqueAndFound) {
  std::set<std::string_view> names;
  for (const baseline& method : kvarn::baselines) {
    EXPECT_TRUE(names.insert(method.name).second) << method.name;
    ASSERT_NE(kvarn::find_baseline(method.name), nullptr) << method.name;
    EXPECT_EQ(kvarn::find_baseline(method.name)->round_trip, method.round_trip);
    EXPECT_FALSE(method.summary.empty());
  }
  EXPECT_EQ(names.size(), 4u);
  EXPECT_EQ(kvarn::find_baseline("none"), nullptr);
}

TEST(Baselines, EqualTheOracle) {
  for (const baseline& method : kvarn::baselines)
    for (const tile_kind kind : {tile_kind::key, tile_kind::value})
      for (const int bits : {2, 3, 4})
        for (const int head_dim : {16, 64, 256})
          for (const int token_group : {1, 7, 64, 128})
            for (const int channel_group : {0, 8}) {
              const baseline_settings settings{kind, bits, head_dim, token_group, channel_group};
              const int tokens = 2 * token_group;
              const auto in = grid_values(static_cast<std::size_t>(tokens * head_dim), 1);
              const auto out = run(method, settings, in);
              row_major_matrix exact(tokens, head_dim);
              for (int i = 0; i < tokens * head_dim; ++i) exact.data()[i] = in[std::size_t(i)];
              const auto expected = oracle(method.name, settings, exact);
              double largest = 0;
              for (int i = 0; i < tokens * head_dim; ++i)
                largest = (std::max)(largest, std::abs(expected.data()[i] - out[std::size_t(i)]));
              // Without rotation every operation of the library is exact but one last rounding.
              EXPECT_LE(largest, method.name == "rotation_kivi" ? 1e-4 : 4e-6)
                  << method.name << " bits " << bits << " head_dim " << head_dim << " groups "
                  << token_group << " " << channel_group << " kind " << static_cast<int>(kind);
            }
}

TEST(Baselines, RoundsHalfToEven) {
  const baseline_settings settings{tile_kind::value, 2, 7, 1};
  const std::vector<float> in{0.0f, 0.5f, 1.5f, 2.5f, 3.0f, 0.75f, 2.25f};
  const std::vector<float> expected{0, 0, 2, 2, 3, 1, 2};
  EXPECT_EQ(run(kvarn::rtn_token, settings, in), expected);
}

TEST(Baselines, KeysPerChannelAndValuesPerToken) {
  // 4 tokens of 2 channels: channel 0 has range 3, channel 1 range 300.
  const std::vector<float> in{0, 100, 1, 200, 2, 300, 3, 400};
  const baseline_settings keys{tile_kind::key, 2, 2, 4};
  EXPECT_EQ(run(kvarn::kivi, keys, in), in);  // both channels fit their grids of step 1 and 100
  EXPECT_EQ(run(kvarn::rtn_channel, keys, in), in);
  // Per token both numbers are the ends of the range: the minimum stays, the maximum is
  // zero + 3 float16(range / 3), here of range 100, 199, 298, 397.
  const auto values = run(kvarn::kivi, {tile_kind::value, 2, 2, 4}, in);
  for (std::size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(values[2 * t], in[2 * t]);
    const double range = in[2 * t + 1] - in[2 * t];
    EXPECT_FLOAT_EQ(values[2 * t + 1],
                    static_cast<float>(in[2 * t] + 3 * nearest_float16(range / 3)));
  }
  EXPECT_EQ(run(kvarn::rtn_token, {tile_kind::key, 2, 2, 4}, in), values);
}

TEST(Baselines, RotationKiviOfAPlaneWave) {
  // The Hadamard rotation sends (a, a) to (a sqrt 2, 0) and (a, -a) to (0, a sqrt 2): each rotated
  // channel has two levels, both ends of its range.
  const std::vector<float> in{1, 1, 1, -1};
  const auto out = run(kvarn::rotation_kivi, {tile_kind::key, 4, 2, 2}, in);
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_NEAR(out[i], in[i], 1e-3);
}

TEST(Baselines, BitsPerElement) {
  const baseline_settings square{tile_kind::key, 2, 128, 128};
  for (const baseline& method : kvarn::baselines)
    EXPECT_EQ(method.bits_per_element(square), 2.25) << method.name;

  const baseline_settings keys{tile_kind::key, 3, 64, 128};
  const baseline_settings values{tile_kind::value, 3, 64, 128};
  EXPECT_EQ(kvarn::rtn_token.bits_per_element(keys), 3.5);
  EXPECT_EQ(kvarn::rtn_channel.bits_per_element(values), 3.25);
  EXPECT_EQ(kvarn::kivi.bits_per_element(keys), 3.25);
  EXPECT_EQ(kvarn::kivi.bits_per_element(values), 3.5);
  EXPECT_EQ(kvarn::rotation_kivi.bits_per_element(keys), 3.25);
  EXPECT_EQ(kvarn::rotation_kivi.bits_per_element(values), 3.5);

  const baseline_settings small_groups{tile_kind::value, 2, 128, 32, 32};
  EXPECT_EQ(kvarn::kivi.bits_per_element(small_groups), 3.0);
}

// Relative squared error of independent Gaussians, groups of 128.
TEST(Baselines, GaussianError) {
  const auto sample = kvarn_test::make_kv_sample(kvarn_test::kv_profiles[4], 1024, 3);
  struct bounds {
    double low, high;
  };
  // 2 bits: as published. 3 and 4 bits: (range / levels)^2 / 12 with a mean squared range of about
  // 5.2^2 gives 0.046 and 0.0101.
  const bounds expected[] = {{0.245, 0.255}, {0.0445, 0.0475}, {0.0097, 0.0105}};
  for (const baseline& method : kvarn::baselines)
    for (const tile_kind kind : {tile_kind::key, tile_kind::value})
      for (const int bits : {2, 3, 4}) {
        const auto& in = kind == tile_kind::key ? sample.keys : sample.values;
        const double error =
            kvarn::relative_squared_error(in, run(method, {kind, bits, 128, 128}, in));
        EXPECT_GE(error, expected[bits - 2].low) << method.name << " bits " << bits;
        EXPECT_LE(error, expected[bits - 2].high) << method.name << " bits " << bits;
      }
}

// Degenerate inputs

std::vector<baseline_settings> degenerate_settings(int head_dim) {
  std::vector<baseline_settings> all;
  for (const tile_kind kind : {tile_kind::key, tile_kind::value})
    for (const int bits : {2, 3, 4}) all.push_back({kind, bits, head_dim, 64});
  return all;
}

bool all_finite(const std::vector<float>& values) {
  for (const float x : values)
    if (!std::isfinite(x)) return false;
  return true;
}

TEST(BaselinesDegenerate, ConstantGroupsKeepTheirFloat16Value) {
  const float constants[] = {0.0f,  -0.0f, 1.0f,   0.1f,     -300.3f,
                             1e-6f, 1e-8f, 1e-12f, 65504.0f, -1e5f};
  for (const float constant : constants)
    for (const baseline& method : kvarn::baselines) {
      if (method.name == "rotation_kivi") continue;  // below
      for (const auto& settings : degenerate_settings(80)) {
        const std::vector<float> in(64 * 80, constant);
        const auto kept = static_cast<float>(kvarn::float16::saturated(constant));
        for (const float x : run(method, settings, in))
          ASSERT_EQ(x, kept) << method.name << " of " << constant;
      }
    }
}

TEST(BaselinesDegenerate, ConstantInputAfterRotation) {
  // A constant token becomes one number, constant * sqrt(head_dim), and zeros: the keys' groups are
  // constant and keep its float16; the values' groups keep it within half a float16 step per level.
  for (const auto& settings : degenerate_settings(64)) {
    EXPECT_EQ(run(kvarn::rotation_kivi, settings, std::vector<float>(64 * 64, 0.0f)),
              std::vector<float>(64 * 64, 0.0f));
    for (const float x : run(kvarn::rotation_kivi, settings, std::vector<float>(64 * 64, 0.1f)))
      ASSERT_NEAR(x, 0.1f, 0.1f * 0x1p-11f);
  }
}

TEST(BaselinesDegenerate, ConstantChannelsAndTokens) {
  gaussian_source random(4);
  std::vector<float> by_channel(64 * 96), by_token(64 * 96);
  std::vector<float> row(96), column(64);
  for (float& x : row) x = static_cast<float>(random.normal());
  for (float& x : column) x = static_cast<float>(random.normal());
  for (std::size_t t = 0; t < 64; ++t)
    for (std::size_t c = 0; c < 96; ++c) {
      by_channel[t * 96 + c] = row[c];
      by_token[t * 96 + c] = column[t];
    }
  const auto rounded = [](float x) { return static_cast<float>(kvarn::float16(x)); };
  const auto keys = run(kvarn::kivi, {tile_kind::key, 2, 96, 64}, by_channel);
  const auto values = run(kvarn::kivi, {tile_kind::value, 2, 96, 64}, by_token);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(keys[i], rounded(by_channel[i]));
    ASSERT_EQ(values[i], rounded(by_token[i]));
  }
  for (const baseline& method : kvarn::baselines)
    for (const auto& settings : degenerate_settings(96)) {
      EXPECT_TRUE(all_finite(run(method, settings, by_channel)));
      EXPECT_TRUE(all_finite(run(method, settings, by_token)));
    }
}

TEST(BaselinesDegenerate, HeadDimsWithoutAPowerOfTwo) {
  for (const int head_dim : {80, 96, 112, 160, 192}) {
    gaussian_source random(5);
    std::vector<float> in(static_cast<std::size_t>(128 * head_dim));
    for (float& x : in) x = static_cast<float>(random.normal());
    for (const baseline& method : kvarn::baselines)
      for (const tile_kind kind : {tile_kind::key, tile_kind::value}) {
        const double error =
            kvarn::relative_squared_error(in, run(method, {kind, 2, head_dim, 128}, in));
        EXPECT_GT(error, 0.20) << method.name << " " << head_dim;
        EXPECT_LT(error, 0.29) << method.name << " " << head_dim;
      }
  }
}

TEST(BaselinesDegenerate, NotFiniteNumbersDamageNothingElse) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  struct replacement {
    float bad, counts_as;
  };
  for (const auto& [bad, counts_as] :
       {replacement{nan, 0.0f}, replacement{-nan, 0.0f}, replacement{infinity, 65504.0f},
        replacement{-infinity, -65504.0f}, replacement{1e5f, 65504.0f}})
    for (const baseline& method : kvarn::baselines)
      for (const auto& settings : degenerate_settings(64)) {
        auto in = grid_values(64 * 64, 6);
        in[777] = bad;
        const auto out = run(method, settings, in);
        EXPECT_TRUE(all_finite(out)) << method.name << " " << bad;
        in[777] = counts_as;
        EXPECT_EQ(out, run(method, settings, in)) << method.name << " " << bad;
      }
}

TEST(BaselinesDegenerate, LargestValues) {
  // Rotated, the first row has a channel of 65504 sqrt(D): it saturates.
  for (const baseline& method : kvarn::baselines)
    for (const auto& settings : degenerate_settings(64)) {
      std::vector<float> in(64 * 64, 0.0f);
      for (std::size_t c = 0; c < 64; ++c) {
        in[c] = 65504.0f;
        in[64 + c] = c % 2 == 0 ? 65504.0f : -65504.0f;
      }
      for (const float x : run(method, settings, in)) {
        ASSERT_TRUE(std::isfinite(x)) << method.name;
        ASSERT_LE(std::abs(x), 65536.0f) << method.name;
      }
    }
}

TEST(BaselinesDegenerate, LargeOffsetSmallSpread) {
  // 300 +- 0.01: the FP16 zero has steps of 0.25, so that much is lost, and no more.
  gaussian_source random(7);
  std::vector<float> in(64 * 64);
  for (float& x : in) x = 300.0f + static_cast<float>(0.02 * random.uniform() - 0.01);
  for (const baseline& method : {kvarn::kivi, kvarn::rtn_token, kvarn::rtn_channel})
    for (const auto& settings : degenerate_settings(64)) {
      const auto out = run(method, settings, in);
      for (std::size_t i = 0; i < in.size(); ++i) ASSERT_NEAR(out[i], in[i], 0.125);
    }
}

TEST(BaselinesDegenerate, TinyNumbers) {
  gaussian_source random(8);
  for (const double size : {1e-6, 1e-8, 1e-12}) {
    std::vector<float> in(64 * 64);
    for (float& x : in) x = static_cast<float>(size * random.normal());
    for (const baseline& method : kvarn::baselines)
      for (const auto& settings : degenerate_settings(64)) {
        const auto out = run(method, settings, in);
        // Minimum and each of up to 15 steps are off by half of FP16's smallest number at most; a
        // rotation can add up sqrt(D) of that.
        const double lost = 0x1p-25 * (1 << settings.bits) * 8;
        for (std::size_t i = 0; i < in.size(); ++i)
          ASSERT_NEAR(out[i], in[i], lost + 8 * size) << method.name;
      }
  }
}

// The harness

TEST(Baselines, InPlaceEqualsOutOfPlace) {
  for (const baseline& method : kvarn::baselines) {
    auto values = grid_values(64 * 64, 9);
    const baseline_settings settings{tile_kind::key, 2, 64, 32};
    const auto expected = run(method, settings, values);
    ASSERT_TRUE(kvarn::quantize_dequantize(method, settings, values, values).ok());
    EXPECT_EQ(values, expected) << method.name;
  }
}

TEST(Baselines, NoTokens) {
  for (const baseline& method : kvarn::baselines)
    EXPECT_TRUE(run(method, {tile_kind::key, 2, 64, 64}, {}).empty());
}

TEST(Baselines, RefusalsNameTheValue) {
  const auto why = [](const baseline& method, const baseline_settings& settings,
                      std::size_t in_size, std::size_t out_size) {
    const std::vector<float> in(in_size);
    std::vector<float> out(out_size);
    const kvarn::status s = kvarn::quantize_dequantize(method, settings, in, out);
    EXPECT_EQ(s.code(), kvarn::error_code::invalid_argument);
    return s.message();
  };
  for (const baseline& method : kvarn::baselines) {
    EXPECT_NE(why(method, {tile_kind::key, 1, 64, 64}, 0, 0).find("bits is 1"), std::string::npos);
    EXPECT_NE(why(method, {tile_kind::key, 5, 64, 64}, 0, 0).find("bits is 5"), std::string::npos);
    EXPECT_NE(why(method, {tile_kind::key, 2, -64, 64}, 0, 0).find("head_dim is -64"),
              std::string::npos);
    EXPECT_NE(why(method, {tile_kind::key, 2, 64, 0}, 0, 0).find("token_group is 0"),
              std::string::npos);
    EXPECT_NE(why(method, {tile_kind::key, 2, 64, 64, 48}, 0, 0).find("channel_group is 48"),
              std::string::npos);
    EXPECT_NE(why(method, {tile_kind::key, 2, 64, 64, -1}, 0, 0).find("channel_group is -1"),
              std::string::npos);
    EXPECT_NE(why(method, {tile_kind::key, 2, 64, 64}, 65 * 64, 65 * 64).find("4160 numbers"),
              std::string::npos);
    EXPECT_NE(why(method, {tile_kind::key, 2, 64, 64}, 64 * 64, 100).find("output has 100"),
              std::string::npos);
  }
  EXPECT_NE(why(kvarn::rotation_kivi, {tile_kind::key, 2, 72, 64}, 0, 0).find("head_dim is 72"),
            std::string::npos);
  EXPECT_TRUE(kvarn::validate(kvarn::kivi, {tile_kind::key, 2, 72, 64}).ok());
}

}  // namespace
