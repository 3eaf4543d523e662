// What holds for every baseline: names, bits, sizes counted a second way, degenerate inputs,
// sequences with exact tokens, refusals. What one method does is in the test named after it.
#include "kvarn/baselines/baselines.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kvarn/metrics.hpp"
#include "support.hpp"

namespace {

using kvarn::baseline;
using kvarn::baseline_settings;
using kvarn::tile_kind;
using kvarn_test::grid_values;
using kvarn_test::normal_values;
using kvarn_test::run;

// Calls visit(method, settings, text) for keys and values of every method at every width of it that
// can serve the head dimension; returns for how many that was.
int for_each_variant(int head_dim, int token_group,
                     const std::function<void(const baseline&, const baseline_settings&,
                                              const std::string&)>& visit) {
  int visited = 0;
  for (const baseline& method : kvarn::baselines)
    for (const tile_kind kind : {tile_kind::key, tile_kind::value}) {
      std::set<int> widths;
      for (const kvarn::kv_bits& pair : method.widths) widths.insert(pair.of(kind));
      for (const int bits : widths) {
        const baseline_settings settings{kind, bits, head_dim, token_group};
        if (!method.check(settings).ok()) continue;
        ++visited;
        visit(method, settings,
              std::string(method.name) + (kind == tile_kind::key ? " keys, " : " values, ") +
                  std::to_string(bits) + " bits, head_dim " + std::to_string(head_dim));
      }
    }
  return visited;
}

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

TEST(Baselines, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (const baseline& method : kvarn::baselines) {
    ASSERT_NE(kvarn::find_baseline(method.name), nullptr) << method.name;
    EXPECT_EQ(kvarn::find_baseline(method.name)->round_trip, method.round_trip);
    EXPECT_FALSE(method.summary.empty());
    ASSERT_FALSE(method.widths.empty());
    EXPECT_EQ(kvarn::variant_name(method, method.widths.front()), method.name);
    for (const kvarn::kv_bits& bits : method.widths)
      EXPECT_TRUE(names.insert(kvarn::variant_name(method, bits)).second) << method.name;
  }
  EXPECT_TRUE(names.contains("kivi"));
  EXPECT_TRUE(names.contains("turbo_vllm_k3v4"));
  EXPECT_TRUE(names.contains("q8_0_rot"));
  EXPECT_EQ(kvarn::find_baseline("none"), nullptr);
}

// The bits of one tile [token_group][head_dim], counted: codes one by one, then what stands beside.
double counted_bits(std::string_view name, const baseline_settings& s) {
  const int d = s.head_dim;
  const int g = s.token_group;
  const bool is_key = s.kind == tile_kind::key;
  const int elements = d * g;
  const int codes = elements * s.bits;
  const int ranges_of_channels = d * (16 + 16);
  const int ranges_of_tokens = g * (d / s.channels_per_group()) * (16 + 16);
  const auto which_channel = static_cast<int>(std::ceil(std::log2(d)));
  if (name.substr(0, 4) == "q8_0" || name.substr(0, 4) == "q4_0" || name.substr(0, 6) == "iq4_nl")
    return codes + elements / 32 * 16;  // 34 and 18 bytes
  if (name.substr(0, 4) == "q4_1") return elements / 32 * 20 * 8;
  const std::map<std::string_view, int> total{
      {"rtn_token", codes + ranges_of_tokens},
      {"rtn_channel", codes + ranges_of_channels},
      {"kivi", codes + (is_key ? ranges_of_channels : ranges_of_tokens)},
      {"rotation_kivi", codes + (is_key ? ranges_of_channels : ranges_of_tokens)},
      {"quarot_token", codes + g * (d / s.channels_per_group()) * (16 + s.bits)},
      // One channel for the head dimensions here.
      {"kvquant_channels", (d - 1) * g * s.bits + g * 16 + which_channel +
                               (is_key ? (d - 1) * (16 + 16) : ranges_of_tokens)},
      // Two outliers a vector for the sizes here.
      {"kvquant_sparse",
       codes + (is_key ? ranges_of_channels + d * 2 * 32
                       : ranges_of_tokens + g * (d / s.channels_per_group()) * 2 * 32)},
      {"kitty", is_key ? (d - d / 8) * g * 2 + d / 8 * g * 4 + ranges_of_channels + d
                       : codes + ranges_of_tokens},
      {"turbo", codes + g * 16},
      {"turbo_nc", codes + g * 16},
      {"turbo_vllm", codes + (is_key ? g * 16 : ranges_of_tokens)},
      {"polar", is_key ? d / 2 * g * (4 + 4) + d / 2 * 4 * 16 : codes + ranges_of_tokens},
      {"polar_tree", elements / 16 * (8 * 4 + 4 * 2 + 2 * 2 + 1 * 2 + 16)},
  };
  return total.at(name);
}

TEST(Baselines, BitsPerElement) {
  for (const int head_dim : {64, 128})
    for (const int token_group : {64, 128})
      for (const int channel_group : {0, 32})
        for_each_variant(
            head_dim, token_group,
            [&](const baseline& method, baseline_settings settings, const std::string& text) {
              settings.channel_group = channel_group;
              EXPECT_DOUBLE_EQ(method.bits_per_element(settings),
                               counted_bits(method.name, settings) / (head_dim * token_group))
                  << text;
            });
}

// The table of the KVarN paper rounds these up to one digit.
TEST(Baselines, BitsAsPublished) {
  const auto bits = [](const baseline& method, kvarn::kv_bits width) {
    return (method.bits_per_element({tile_kind::key, width.key, 128, 128}) +
            method.bits_per_element({tile_kind::value, width.value, 128, 128})) /
           2;
  };
  EXPECT_EQ(bits(kvarn::kivi, {2, 2}), 2.25);
  EXPECT_NEAR(bits(kvarn::kvquant_channels, {2, 2}), 2.4, 0.05);
  EXPECT_EQ(bits(kvarn::polar, {4, 2}), 3.25);
  EXPECT_NEAR(bits(kvarn::kitty, {2, 2}), 2.375, 0.005);
  EXPECT_EQ(bits(kvarn::polar_tree, {4, 4}), 3.875);
  // KIVI as its authors run it: groups of 32.
  EXPECT_EQ(kvarn::kivi.bits_per_element({tile_kind::value, 2, 128, 32, 32}), 3.0);

  // turbo_vllm with its four exact layers, in models of 36, 32 and 40 layers.
  const auto with_exact_layers = [&](int layers) {
    double sum = 0;
    for (int layer = 0; layer < layers; ++layer)
      sum += kvarn::is_exact_layer(kvarn::turbo_vllm.native, layer, layers)
                 ? 16
                 : bits(kvarn::turbo_vllm, {3, 3});
    return sum / layers;
  };
  EXPECT_NEAR(with_exact_layers(36), 4.61, 0.005);
  EXPECT_NEAR(with_exact_layers(32), 4.79, 0.005);
  EXPECT_NEAR(with_exact_layers(40), 4.47, 0.005);
}

// Degenerate inputs

TEST(BaselinesDegenerate, ZerosStayZeros) {
  const std::vector<float> zeros(64 * 64, 0.0f);
  for_each_variant(
      64, 64,
      [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
        EXPECT_EQ(run(method, settings, zeros), zeros) << text;
      });
}

// Never an error larger than that of the opposite token.
TEST(BaselinesDegenerate, ConstantTokensChannelsAndTensors) {
  const auto some = normal_values(128, 4);
  for (const float size : {1e-3f, 1.0f, 300.0f})
    for (int pattern = 0; pattern < 3; ++pattern) {
      std::vector<float> in(64 * 128);
      for (std::size_t t = 0; t < 64; ++t)
        for (std::size_t c = 0; c < 128; ++c)
          in[t * 128 + c] = size * (pattern == 0 ? 1.0f : pattern == 1 ? some[c] : some[t]);
      for_each_variant(
          128, 64,
          [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
            const auto out = run(method, settings, in);
            EXPECT_TRUE(all_finite(out)) << text;
            EXPECT_LE(kvarn::relative_squared_error(in, out), 2.0) << text << ", " << pattern;
          });
    }
}

// Of normal numbers. Ranges of 512 are wider than those of 64; polar_tree loses most at 4 bits.
TEST(BaselinesDegenerate, HeadDims) {
  const std::map<int, double> most{{2, 0.35}, {3, 0.065}, {4, 0.036}, {8, 4e-5}};
  for (const int head_dim : {64, 80, 96, 112, 128, 160, 192, 256, 512}) {
    const auto in = normal_values(static_cast<std::size_t>(128 * head_dim), 5);
    const int visited = for_each_variant(
        head_dim, 128,
        [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
          const double error = kvarn::relative_squared_error(in, run(method, settings, in));
          EXPECT_LT(error, most.at(settings.bits)) << text;
          EXPECT_GT(error, 0.75 * std::pow(4.0, -settings.bits) / 3) << text;
        });
    EXPECT_GT(visited, 40) << head_dim;
  }
}

TEST(BaselinesDegenerate, NotFiniteNumbersDamageNothingElse) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  struct replacement {
    float bad, counts_as;
  };
  for (const replacement& r :
       {replacement{nan, 0.0f}, replacement{-nan, 0.0f}, replacement{infinity, 65504.0f},
        replacement{-infinity, -65504.0f}, replacement{1e5f, 65504.0f}})
    for_each_variant(
        64, 64,
        [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
          auto in = grid_values(64 * 64, 6);
          in[777] = r.bad;
          const auto out = run(method, settings, in);
          EXPECT_TRUE(all_finite(out)) << text << ", " << r.bad;
          in[777] = r.counts_as;
          EXPECT_EQ(out, run(method, settings, in)) << text << ", " << r.bad;
        });
}

TEST(BaselinesDegenerate, LargestValues) {
  // Rotated, the first row has a channel of 65504 sqrt(D): it saturates.
  std::vector<float> in(64 * 64, 0.0f);
  for (std::size_t c = 0; c < 64; ++c) {
    in[c] = 65504.0f;
    in[64 + c] = c % 2 == 0 ? 65504.0f : -65504.0f;
  }
  for_each_variant(
      64, 64,
      [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
        for (const float x : run(method, settings, in)) {
          ASSERT_TRUE(std::isfinite(x)) << text;
          ASSERT_LE(std::abs(x), 1.5f * 65504.0f) << text;
        }
      });
}

// FP16 loses what is below its smallest number, and nothing becomes large or infinite by it.
TEST(BaselinesDegenerate, TinyNumbers) {
  for (const float size : {1e-6f, 1e-8f, 1e-12f, 1e-38f, 1e-44f}) {
    auto in = normal_values(64 * 64, 8);
    for (float& x : in) x *= size;
    for_each_variant(
        64, 64,
        [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
          // Minimum and each step are off by half of FP16's smallest number at most, codes of
          // iq4_nl reach 127; a rotation can add up sqrt(D) of that.
          const double lost = 0x1p-25 * 128 * 8;
          const auto out = run(method, settings, in);
          for (std::size_t i = 0; i < in.size(); ++i)
            ASSERT_NEAR(out[i], in[i], lost + 8 * static_cast<double>(size)) << text;
        });
  }
}

// The harness

TEST(Baselines, InPlaceEqualsOutOfPlace) {
  for_each_variant(
      64, 32,
      [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
        auto values = grid_values(64 * 64, 9);
        const auto expected = run(method, settings, values);
        ASSERT_TRUE(kvarn::quantize_dequantize(method, settings, values, values).ok()) << text;
        EXPECT_EQ(values, expected) << text;
      });
}

// Tokens that a method quantises apart do not see each other: also a check of tokens_together.
TEST(Baselines, UnitsOfTokensAreIndependent) {
  const auto in = normal_values(32 * 64, 10);
  for_each_variant(
      64, 8,
      [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
        const auto all = run(method, settings, in);
        const auto unit = static_cast<std::size_t>(method.tokens_together(settings)) * 64;
        for (std::size_t first = 0; first < in.size(); first += unit) {
          const auto begin = in.begin() + static_cast<std::ptrdiff_t>(first);
          const std::vector<float> part(begin, begin + static_cast<std::ptrdiff_t>(unit));
          const auto alone = run(method, settings, part);
          ASSERT_TRUE(std::equal(alone.begin(), alone.end(),
                                 all.begin() + static_cast<std::ptrdiff_t>(first)))
              << text;
        }
      });
}

TEST(Baselines, NoTokens) {
  for_each_variant(
      64, 64, [&](const baseline& method, const baseline_settings& settings, const std::string&) {
        EXPECT_TRUE(run(method, settings, {}).empty());
      });
}

// Every token outside of the range stays as it is; those within are as without a sequence around.
TEST(Baselines, SequencesKeepExactTokens) {
  const std::size_t tokens = 300;
  const auto in = normal_values(tokens * 64, 11);
  for_each_variant(
      64, 32,
      [&](const baseline& method, const baseline_settings& settings, const std::string& text) {
        for (const kvarn::exact_rule& exact : {method.native.of(settings.kind),
                                               kvarn::exact_rule{20, 50, 32},
                                               {400, 0, 1},
                                               {0, 0, 1}}) {
          std::vector<float> out(in.size());
          ASSERT_TRUE(kvarn::quantize_sequence(method, settings, exact, in, out).ok()) << text;
          const auto range = kvarn::quantised_tokens(
              exact, static_cast<std::size_t>(method.tokens_together(settings)), tokens);
          const auto first = static_cast<std::ptrdiff_t>(range.first * 64);
          const auto end = static_cast<std::ptrdiff_t>(range.end * 64);
          const auto body = run(method, settings, {in.begin() + first, in.begin() + end});
          EXPECT_TRUE(std::equal(in.begin(), in.begin() + first, out.begin())) << text;
          EXPECT_TRUE(std::equal(body.begin(), body.end(), out.begin() + first)) << text;
          EXPECT_TRUE(std::equal(in.begin() + end, in.end(), out.begin() + end)) << text;

          const double exact_bits = 16.0 * static_cast<double>(tokens - range.count());
          const double quantised_bits =
              method.bits_per_element(settings) * static_cast<double>(range.count());
          EXPECT_DOUBLE_EQ(kvarn::sequence_bits_per_element(method, settings, exact, tokens),
                           (exact_bits + quantised_bits) / tokens)
              << text;
        }
      });
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
  const auto expect = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  for (const baseline& method : kvarn::baselines) {
    const int bits = method.widths.front().key;
    const auto group = method.tokens_together({tile_kind::key, bits, 64, 64});
    expect(why(method, {tile_kind::key, 1, 64, 64}, 0, 0), "bits is 1; it must be ");
    expect(why(method, {tile_kind::key, 5, 64, 64}, 0, 0), "bits is 5; it must be ");
    expect(why(method, {tile_kind::key, bits, -64, 64}, 0, 0), "head_dim is -64");
    expect(why(method, {tile_kind::key, bits, 64, 0}, 0, 0), "token_group is 0");
    expect(why(method, {tile_kind::key, bits, 64, 64, 48}, 0, 0), "channel_group is 48");
    expect(why(method, {tile_kind::key, bits, 64, 64, -1}, 0, 0), "channel_group is -1");
    if (group > 1)
      expect(why(method, {tile_kind::key, bits, 64, 64}, 65 * 64, 65 * 64),
             "4160 numbers; it must be a multiple of 64 tokens * head_dim = 4096");
    expect(why(method, {tile_kind::key, bits, 64, 64}, 4095, 4095), "4095 numbers");
    expect(why(method, {tile_kind::key, bits, 64, 64}, 64 * 64, 100), "output has 100");
  }
  expect(why(kvarn::kivi, {tile_kind::key, 5}, 0, 0), "it must be 2, 3 or 4 for keys of kivi");
  expect(why(kvarn::polar, {tile_kind::value, 3}, 0, 0), "it must be 2 or 4 for values of polar");
  expect(why(kvarn::q8_0, {tile_kind::key, 2}, 0, 0), "it must be 8 for keys of q8_0");
  expect(why(kvarn::rotation_kivi, {tile_kind::key, 2, 72, 64}, 0, 0), "head_dim is 72");
  expect(why(kvarn::turbo, {tile_kind::key, 2, 72, 64}, 0, 0), "head_dim is 72");
  expect(why(kvarn::polar, {tile_kind::key, 4, 65, 64}, 0, 0), "a multiple of 2");
  expect(why(kvarn::polar_tree, {tile_kind::key, 4, 20, 64}, 0, 0), "a multiple of 16");
  expect(why(kvarn::q4_0, {tile_kind::key, 4, 80, 64}, 0, 0), "a multiple of 32");
  expect(why(kvarn::q4_0_rot, {tile_kind::key, 4, 96, 64}, 0, 0), "a multiple of 64");
  EXPECT_TRUE(kvarn::validate(kvarn::kivi, {tile_kind::key, 2, 72, 64}).ok());

  std::vector<float> numbers(100);
  const auto sequence = [&](std::size_t in, std::size_t out) {
    return kvarn::quantize_sequence(kvarn::kivi, {tile_kind::key, 2, 50, 64}, {},
                                    std::span<const float>(numbers).first(in),
                                    std::span<float>(numbers).first(out))
        .message();
  };
  expect(sequence(99, 99), "99 numbers; it must be whole tokens of head_dim 50");
  expect(sequence(100, 50), "output has 50");
  expect(kvarn::quantize_sequence(kvarn::kivi, {tile_kind::key, 2, 50, 64}, {.step = 0}, numbers,
                                  numbers)
             .message(),
         "step of exact tokens is 0; it must be positive");
}

}  // namespace
