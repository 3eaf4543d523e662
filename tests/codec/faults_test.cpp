// The kinds of input that have broken software of this sort, each with the right value.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "kvarn/codec/tile_codec.hpp"
#include "support/layouts.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::encoder;
using kvarn::scale_type;
using kvarn::tile_kind;
using kvarn::tile_layout;

using kvarn_test::all_finite;
using kvarn_test::error_without;
using kvarn_test::for_kinds_and_encoders;
using kvarn_test::options_of;
using kvarn_test::round_trip;
using kvarn_test::scaled;

// K and V of different widths and head dimensions: one page, each record read with its own layout.
TEST(Faults, DifferentWidthsOfKeysAndValues) {
  for (const int key_bits : kvarn::supported_bits)
    for (const int value_bits : kvarn::supported_bits) {
      const kvarn::cache_format format{96, 64, 64, key_bits, value_bits, scale_type::ue5m3};
      constexpr int heads = 2;
      std::vector<std::byte> page(format.page_bytes(heads));
      std::vector<std::vector<float>> expected;
      for (int head = 0; head < heads; ++head)
        for (const auto& layout : {format.key_layout(), format.value_layout()}) {
          const bool is_key = layout.kind == tile_kind::key;
          const auto tokens =
              kvarn_test::random_tokens(64, layout.head_dim, static_cast<std::uint64_t>(head + 1));
          const auto encoded = kvarn_test::encode(layout, tokens);
          std::copy(encoded.record.begin(), encoded.record.end(),
                    page.begin() + static_cast<std::ptrdiff_t>(is_key ? format.key_offset(head)
                                                                      : format.value_offset(head)));
          expected.push_back(kvarn_test::decode(layout, encoded.record));
        }
      for (int head = 0; head < heads; ++head)
        for (const auto& layout : {format.key_layout(), format.value_layout()}) {
          const bool is_key = layout.kind == tile_kind::key;
          const std::byte* record =
              page.data() + (is_key ? format.key_offset(head) : format.value_offset(head));
          const std::vector<std::byte> bytes(record, record + layout.record_bytes());
          ASSERT_EQ(kvarn_test::decode(layout, bytes),
                    expected[static_cast<std::size_t>(2 * head + !is_key)]);
        }
    }
}

// Error of Gaussian tiles by width and kind: lower and upper bounds, from 9 x 2 x 2 layouts.
struct bounds {
  double low, high;
};
bounds round_trip_bounds(tile_kind kind, int bits) {
  if (kind == tile_kind::key)
    return bits == 2 ? bounds{0.10, 0.16} : bits == 3 ? bounds{0.025, 0.050} : bounds{0.007, 0.014};
  return bits == 2 ? bounds{0.11, 0.17} : bits == 3 ? bounds{0.028, 0.055} : bounds{0.007, 0.014};
}

// D != G, head dimensions without a power of two, every width: writer and reader agree, and so do
// rows and columns: no single token is off.
TEST(Faults, RoundTripThroughEveryWidthHeadDimensionAndGroup) {
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    SCOPED_TRACE(kvarn_test::name_of(layout));
    const auto tokens = kvarn_test::normal_tokens(layout.group, layout.head_dim, 61);
    const auto decoded = round_trip(layout, tokens, encoder::tuned);
    const auto [low, high] = round_trip_bounds(layout.kind, layout.bits);
    const double error = kvarn::relative_squared_error(tokens, decoded);
    EXPECT_GT(error, low);
    EXPECT_LT(error, high);
    const auto d = static_cast<std::size_t>(layout.head_dim);
    for (std::size_t t = 0; t < static_cast<std::size_t>(layout.group); ++t)
      ASSERT_LT(kvarn::relative_squared_error(std::span(tokens).subspan(t * d, d),
                                              std::span(decoded).subspan(t * d, d)),
                2.5 * high)
          << "token " << t;
  }
}

TEST(Faults, ZeroTilesStayZero) {
  for (const scale_type scale : kvarn_test::scale_types)
    for (const int head_dim : {64, 80})
      for_kinds_and_encoders(head_dim, scale, [&](const tile_layout& layout, encoder method) {
        const std::vector<float> zeros(static_cast<std::size_t>(layout.group * head_dim), 0.0f);
        for (const bool rotate : {true, false})
          EXPECT_EQ(round_trip(layout, zeros, method, rotate), zeros);
        const auto minus = std::vector<float>(zeros.size(), -0.0f);
        EXPECT_EQ(kvarn_test::encode(layout, minus, options_of(method, head_dim)).record,
                  kvarn_test::encode(layout, zeros, options_of(method, head_dim)).record);
      });
}

TEST(Faults, ConstantTiles) {
  for_kinds_and_encoders(128, scale_type::ue5m3, [](const tile_layout& layout, encoder method) {
    // Not rotated, a constant tile is a scale and a zero. (The paper's encoder clamps its scale to
    // exp(-0.3), which is no FP8 number: its zero absorbs the difference.)
    for (const float value : {1.0f, -300.0f, 1e-3f}) {
      const std::vector<float> tokens(128 * 128, value);
      EXPECT_LT(kvarn::relative_squared_error(tokens, round_trip(layout, tokens, method, false)),
                1e-7)
          << value;
      // Rotated, all of it is in one channel: a row of values, whose FP8 scale then meets zeros and
      // steps made for the rows of zeros beside it; a column of keys.
      const double error =
          kvarn::relative_squared_error(tokens, round_trip(layout, tokens, method));
      EXPECT_LT(error, layout.kind == tile_kind::key ? 2e-7 : 0.05) << value;
    }
  });
}

// One constant or zero channel or token among Gaussian ones costs nothing.
TEST(Faults, ConstantAndZeroChannelsAndTokens) {
  for (const scale_type scale : kvarn_test::scale_types)
    for_kinds_and_encoders(128, scale, [](const tile_layout& layout, encoder method) {
      const auto tokens = kvarn_test::normal_tokens(128, 128, 62);
      const double whole =
          kvarn::relative_squared_error(tokens, round_trip(layout, tokens, method));
      for (const float value : {0.0f, 2.0f})
        for (const bool rotate : {true, false}) {
          auto channel = tokens;
          for (std::size_t t = 0; t < 128; ++t) channel[t * 128 + 5] = value;
          auto token = tokens;
          std::fill_n(token.begin() + 9 * 128, 128, value);
          const auto channel_decoded = round_trip(layout, channel, method, rotate);
          const auto token_decoded = round_trip(layout, token, method, rotate);
          ASSERT_TRUE(all_finite(channel_decoded) && all_finite(token_decoded));
          // The paper's keys pay for a constant token: its clamped scale leaves it an outlier.
          const double tolerance = method == encoder::paper ? 0.3 : 0.1;
          EXPECT_NEAR(kvarn::relative_squared_error(channel, channel_decoded) / whole, 1.0,
                      tolerance)
              << value << rotate;
          EXPECT_NEAR(error_without(token, token_decoded, 128, 9) / whole, 1.0, tolerance)
              << value << rotate;
          if (value != 0.0f || method == encoder::paper) continue;
          // A zero token has the smallest scale as a key, a zero column as a value.
          const float smallest = layout.scale == scale_type::ue5m3 ? 0x1p-17f : 0x1p-9f;
          for (std::size_t d = 0; d < 128; ++d)
            ASSERT_LE(std::abs(token_decoded[9 * 128 + d]), 6 * smallest) << d;
        }
    });
}

// One token of zeros and the choice of the best iterate: scale-equivariant normalisation must still
// choose a balanced one. (The paper's form cannot: variance_normalize_test.cpp.)
TEST(Faults, OneZeroTokenDoesNotRuinTheBestIterate) {
  constexpr kvarn::encoder_recipe recipe{.scaling = kvarn::row_scaling::dual_axis_equivariant,
                                         .iterations = 8};
  for (const tile_kind kind : kvarn_test::tile_kinds) {
    const tile_layout layout{.kind = kind};
    const auto tokens = kvarn_test::random_tokens(128, 128, 63);
    auto zeroed = tokens;
    std::fill_n(zeroed.begin() + 3 * 128, 128, 0.0f);
    std::vector<float> workspace(kvarn::encode_workspace(layout));
    std::vector<std::byte> record(layout.record_bytes());
    const auto report_of = [&](const std::vector<float>& values) {
      return kvarn::encode_tile(kvarn_test::view(values, 128), {record.data(), layout}, recipe,
                                true, nullptr, workspace.data())
          .normalize;
    };
    const auto whole = report_of(tokens);
    const double error = error_without(tokens, kvarn_test::decode(layout, record), 128, 3);
    const auto damaged = report_of(zeroed);
    EXPECT_NEAR(damaged.imbalance, whole.imbalance, 0.02f * whole.imbalance);
    EXPECT_GT(damaged.best, 0);
    EXPECT_NEAR(error_without(zeroed, kvarn_test::decode(layout, record), 128, 3) / error, 1.0,
                0.03);
  }
}

// The same tile times a power of two: the same codes, for ours. (The paper's clamps forbid it.)
void expect_equal_codes(const tile_layout& layout, const std::vector<float>& tokens,
                        const kvarn::encode_options& options, int low, int high) {
  const auto codes_at = [&](int k) {
    auto record = kvarn_test::encode(layout, scaled(tokens, std::ldexp(1.0f, k)), options).record;
    record.resize(layout.zero_offset());
    return record;
  };
  const auto codes = codes_at(0);
  for (int k = low; k <= high; ++k)
    ASSERT_EQ(codes_at(k), codes) << kvarn_test::name_of(layout) << " 2^" << k;
}

TEST(Faults, PowersOfTwoKeepTheCodes) {
  for (const encoder method : {encoder::tuned, encoder::query_aware})
    for (const tile_kind kind : kvarn_test::tile_kinds)
      for (const int head_dim : {80, 128}) {
        const auto tokens = kvarn_test::random_tokens(128, head_dim, 64);
        const auto options = options_of(method, head_dim);
        for (const int bits : kvarn::supported_bits)
          expect_equal_codes({.kind = kind, .head_dim = head_dim, .bits = bits}, tokens, options,
                             -13, 9);
        // E4M3 has fewer exponents.
        expect_equal_codes({.kind = kind, .head_dim = head_dim, .scale = scale_type::e4m3}, tokens,
                           options, -4, 9);
      }
}

class RealFaults : public testing::TestWithParam<const char*> {};

TEST_P(RealFaults, PowersOfTwoKeepTheCodes) {
  const kvarn_test::real_head data(GetParam());
  const kvarn::query_factor factor(data.moment(1));
  for (const encoder method : {encoder::tuned, encoder::query_aware})
    for (const tile_kind kind : kvarn_test::tile_kinds) {
      const auto tokens = data.tile(kind, 1);
      float largest = 0;
      for (const float x : tokens) largest = (std::max)(largest, std::abs(x));
      expect_equal_codes({.kind = kind, .head_dim = data.head_dim}, tokens,
                         {.method = method, .factor = &factor}, -13,
                         (std::min)(9, std::ilogb(65504.0f / largest)));
    }
}

// Other factors move the steps between FP8 numbers, 6 to 12 % apart, and nothing else: tokens of
// nearly equal size and a large common offset keep one common scale.
TEST_P(RealFaults, ErrorsDoNotDependOnTheScaleOfTheTile) {
  const kvarn_test::real_head data(GetParam());
  const kvarn::query_factor factor(data.moment(1));
  for (const encoder method : {encoder::tuned, encoder::query_aware})
    for (const tile_kind kind : kvarn_test::tile_kinds) {
      const tile_layout layout{.kind = kind, .head_dim = data.head_dim};
      SCOPED_TRACE(kvarn_test::name_of(layout));
      const kvarn::encode_options options{.method = method, .factor = &factor};
      const auto tokens = data.tile(kind, 1);
      float largest = 0;
      for (const float x : tokens) largest = (std::max)(largest, std::abs(x));
      std::vector<double> below, above;  // the errors at factors below and above 1
      for (float f = 1e-4f; f < 1e3f && f * largest < 65504.0f; f *= 1.37f) {
        const auto input = scaled(tokens, f);
        (f < 1 ? below : above)
            .push_back(kvarn::relative_squared_error(
                input, kvarn_test::round_trip(layout, input, options)));
      }
      ASSERT_GE(above.size(), 9u);
      const auto median_of = [](std::vector<double>& errors) {
        std::sort(errors.begin(), errors.end());
        return errors[errors.size() / 2];
      };
      const double median = median_of(below);
      EXPECT_NEAR(median_of(above) / median, 1.0, 0.012);
      EXPECT_GT((std::min)(below.front(), above.front()) / median, 0.95);
      EXPECT_LT((std::max)(below.back(), above.back()) / median, 1.05);
    }
}

// Of all its tiles together: codes fall anew at every factor, which in one tile of 8192 codes alone
// changes the error by up to 3 %.
TEST_P(RealFaults, ErrorsDoNotDependOnTheScaleOfTheHead) {
  const kvarn_test::real_head data(GetParam());
  const int tiles = (static_cast<int>(data.keys.shape.at(0)) - kvarn_test::real_sink) / 128;
  ASSERT_GE(tiles, 4);
  const kvarn::query_factor factor(data.moment(tiles - 1));
  for (const encoder method : {encoder::tuned, encoder::query_aware})
    for (const tile_kind kind : kvarn_test::tile_kinds) {
      const tile_layout layout{.kind = kind, .head_dim = data.head_dim};
      SCOPED_TRACE(kvarn_test::name_of(layout));
      const auto error_at = [&](float f) {
        std::vector<float> all, stored;
        for (int i = 0; i < tiles; ++i) {
          const auto input = scaled(data.tile(kind, i), f);
          const auto output =
              kvarn_test::round_trip(layout, input, {.method = method, .factor = &factor});
          all.insert(all.end(), input.begin(), input.end());
          stored.insert(stored.end(), output.begin(), output.end());
        }
        return std::sqrt(kvarn::relative_squared_error(all, stored));
      };
      float largest = 0;
      for (int i = 0; i < tiles; ++i)
        for (const float x : data.tile(kind, i)) largest = (std::max)(largest, std::abs(x));
      const double error = error_at(1);
      int factors = 0;
      for (float f = 1e-4f; f < 1e3f && f * largest < 65504.0f; f *= 1.37f, ++factors)
        EXPECT_NEAR(error_at(f) / error, 1.0, 0.013) << "times " << f;
      ASSERT_GE(factors, 30);
    }
}

INSTANTIATE_TEST_SUITE_P(Heads, RealFaults, testing::ValuesIn(kvarn_test::real_heads),
                         [](const auto& instance) {
                           return kvarn_test::test_name(instance.param);
                         });

}  // namespace
