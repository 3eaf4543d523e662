// Encoding gives the same bytes however it is called: alone or in any order, at any alignment, with
// any workspace, from any strides and input types of equal values. And tile_encoder's errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kvarn/codec/tile_codec.hpp"
#include "support/layouts.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::bfloat16;
using kvarn::encoder;
using kvarn::error_code;
using kvarn::float16;
using kvarn::tile_encoder;
using kvarn::tile_kind;
using kvarn::tile_layout;
using kvarn_test::options_of;

using bytes = std::vector<std::byte>;

// Small layouts of every kind of core and width.
std::vector<tile_layout> some_layouts() {
  std::vector<tile_layout> layouts;
  for (const tile_layout& layout : kvarn_test::all_layouts())
    if (layout.head_dim <= 112 && layout.group == 64) layouts.push_back(layout);
  return layouts;
}

template <class Body>
void sweep(Body body) {
  for (const tile_layout& layout : some_layouts())
    for (const encoder method : kvarn_test::encoders) {
      SCOPED_TRACE(kvarn_test::name_of(layout) + " " + kvarn_test::name_of(method));
      const auto options = options_of(method, layout.head_dim);
      body(layout, options, kvarn_test::random_tokens(layout.group, layout.head_dim, 101));
    }
}

TEST(EncodedBytes, DoNotDependOnOrderOrHistory) {
  sweep([](const tile_layout& layout, const kvarn::encode_options& options,
           const std::vector<float>& first) {
    const auto second = kvarn_test::normal_tokens(layout.group, layout.head_dim, 102);
    const bytes alone[] = {kvarn_test::encode(layout, first, options).record,
                           kvarn_test::encode(layout, second, options).record};
    auto encode = tile_encoder::make(layout, options).value();
    for (const int which : {1, 0, 0, 1}) {
      bytes record(layout.record_bytes(), std::byte{0xcc});
      encode(kvarn_test::view(which == 0 ? first : second, layout.head_dim), record.data());
      ASSERT_EQ(record, alone[which]);
    }
  });
}

TEST(EncodedBytes, DoNotDependOnAlignmentWorkspaceOrOldContents) {
  sweep([](const tile_layout& layout, const kvarn::encode_options& options,
           const std::vector<float>& tokens) {
    const bytes expected = kvarn_test::encode(layout, tokens, options).record;
    constexpr float fills[] = {0.0f, 1e30f, std::numeric_limits<float>::quiet_NaN()};
    constexpr std::byte canary{0x3c};
    for (std::size_t offset = 1; offset < 8; offset += 2) {
      bytes memory(offset + expected.size() + 9, canary);
      std::vector<float> workspace(kvarn::encode_workspace(layout) + 1, fills[offset % 3]);
      workspace.back() = 42.0f;
      kvarn::encode_tile(kvarn_test::view(tokens, layout.head_dim),
                         {memory.data() + offset, layout}, options, workspace.data());
      ASSERT_EQ(workspace.back(), 42.0f) << "wrote behind its workspace";
      const auto start = memory.begin() + static_cast<std::ptrdiff_t>(offset);
      const auto end = start + static_cast<std::ptrdiff_t>(expected.size());
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), start));
      ASSERT_EQ(std::count(memory.begin(), start, canary), static_cast<std::ptrdiff_t>(offset));
      ASSERT_EQ(std::count(end, memory.end(), canary), 9);
    }
  });
}

TEST(EncodedBytes, DoNotDependOnStrides) {
  sweep([](const tile_layout& layout, const kvarn::encode_options& options,
           const std::vector<float>& tokens) {
    const bytes expected = kvarn_test::encode(layout, tokens, options).record;
    const std::ptrdiff_t d = layout.head_dim;
    const std::ptrdiff_t g = layout.group;
    struct strides {
      std::ptrdiff_t token, channel, origin;
    };
    // Padded, transposed, interleaved, and from the last token back.
    for (const auto& [token, channel, origin] :
         {strides{d + 5, 1, 3}, strides{1, g, 0}, strides{2 * d, 2, 1},
          strides{-d, 1, (g - 1) * d}}) {
      std::vector<float> memory(static_cast<std::size_t>(2 * g * d + 6 * g), 1e9f);
      for (std::ptrdiff_t t = 0; t < g; ++t)
        for (std::ptrdiff_t c = 0; c < d; ++c)
          memory[static_cast<std::size_t>(origin + t * token + c * channel)] =
              tokens[static_cast<std::size_t>(t * d + c)];
      bytes record(expected.size());
      std::vector<float> workspace(kvarn::encode_workspace(layout));
      const auto report = kvarn::encode_tile(
          kvarn::tokens_view<const float>{memory.data() + origin, token, channel},
          {record.data(), layout}, options, workspace.data());
      ASSERT_EQ(report.replaced, kvarn::replaced_values{});
      ASSERT_EQ(record, expected) << token << " " << channel;
    }
  });
}

template <class T>
void expect_narrow_equals_wide(const tile_layout& layout, const kvarn::encode_options& options,
                               std::vector<float> tokens) {
  std::vector<std::byte> memory(tokens.size() * sizeof(T) + 1);  // one byte off
  T* const narrow = reinterpret_cast<T*>(memory.data() + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const T value(tokens[i]);
    std::memcpy(memory.data() + 1 + i * sizeof(T), &value, sizeof(T));
    tokens[i] = static_cast<float>(value);
  }
  bytes record(layout.record_bytes());
  std::vector<float> workspace(kvarn::encode_workspace(layout));
  kvarn::encode_tile(kvarn::tokens_view<const T>{narrow, layout.head_dim}, {record.data(), layout},
                     options, workspace.data());
  ASSERT_EQ(record, kvarn_test::encode(layout, tokens, options).record);
}

TEST(EncodedBytes, DoNotDependOnTheInputType) {
  sweep([](const tile_layout& layout, const kvarn::encode_options& options,
           const std::vector<float>& tokens) {
    expect_narrow_equals_wide<float16>(layout, options, tokens);
    expect_narrow_equals_wide<bfloat16>(layout, options, tokens);
  });
}

// A caller who has rotated already (and whose rotation is exact) gets the same codes: the library's
// own defers the factor 1 / sqrt(D), so the comparison needs a power of two.
TEST(EncodedBytes, RotatedInputIsNotRotatedAgain) {
  for (const tile_kind kind : kvarn_test::tile_kinds) {
    const tile_layout layout{.kind = kind, .head_dim = 64};
    std::vector<float> tokens;
    for (int i = 0; i < 128 * 64; ++i)
      tokens.push_back(static_cast<float>((i * 7919 % 2003) - 1001) / 128.0f);
    auto rotated = tokens;
    kvarn::hadamard(rotated.data(), 64, 128, 64);
    for (const encoder method : kvarn_test::encoders)
      EXPECT_EQ(kvarn_test::encode(layout, rotated, options_of(method, 64, false)).record,
                kvarn_test::encode(layout, tokens, options_of(method, 64, true)).record)
          << kvarn_test::name_of(method);
  }
}

// The recipe of an encoder, given as such, gives the encoder's bytes; every encoder its own.
TEST(EncodedBytes, RecipesAndEncodersAgree) {
  for (const tile_kind kind : kvarn_test::tile_kinds) {
    const tile_layout layout{.kind = kind};
    const auto tokens = kvarn_test::random_tokens(128, 128, 103);
    std::vector<bytes> records;
    std::vector<float> workspace(kvarn::encode_workspace(layout));
    for (const encoder method : kvarn_test::encoders) {
      const auto options = options_of(method, 128);
      records.push_back(kvarn_test::encode(layout, tokens, options).record);
      bytes by_recipe(layout.record_bytes());
      kvarn::encode_tile(kvarn_test::view(tokens, 128), {by_recipe.data(), layout},
                         kvarn::recipe_of(method, kind, layout.bits), true, options.factor,
                         workspace.data());
      EXPECT_EQ(by_recipe, records.back());
    }
    EXPECT_NE(records[0], records[1]);
    EXPECT_EQ(records[1] == records[2], kind == tile_kind::value);  // values do without queries
  }
}

TEST(EncodeReport, NormalizationIsReportedWhereThereIsOne) {
  const auto tokens = kvarn_test::random_tokens(128, 128, 104);
  const auto paper = kvarn_test::encode({}, tokens, {.method = encoder::paper}).report.normalize;
  EXPECT_EQ(paper.iterations, 8);
  EXPECT_GT(paper.best, 0);
  EXPECT_GE(paper.imbalance, 2.0f);
  EXPECT_EQ(kvarn_test::encode({}, tokens).report.normalize.iterations, 0);
}

TEST(TileEncoder, RefusesWhatItCannotEncode) {
  const auto layout = tile_encoder::make({.head_dim = 72});
  EXPECT_EQ(layout.why().code(), error_code::invalid_format);
  EXPECT_EQ(layout.why().message().find("head_dim is 72; allowed are 64"), 0u);
  EXPECT_EQ(tile_encoder::make({.bits = 1}).why().code(), error_code::invalid_format);
  EXPECT_EQ(tile_encoder::make({}, {.method = static_cast<encoder>(9)}).why().message(),
            "encoder is 9; allowed are 0 (paper) 1 (tuned) 2 (query_aware)");

  const auto no_factor = tile_encoder::make({}, {.method = encoder::query_aware});
  EXPECT_EQ(no_factor.why().code(), error_code::invalid_argument);
  EXPECT_EQ(no_factor.why().message(),
            "encoder query_aware needs a query_factor for keys; there is none");

  const auto other = tile_encoder::make({.head_dim = 80}, options_of(encoder::query_aware, 64));
  EXPECT_EQ(other.why().code(), error_code::invalid_argument);
  EXPECT_EQ(other.why().message(), "query_factor has head_dim 64; the tile has 80");
#if KVARN_EXCEPTIONS
  EXPECT_THROW(tile_encoder::make({.group = 100}).value(), kvarn::error);
#endif
}

TEST(TileEncoder, AcceptsWhatNeedsNoFactor) {
  EXPECT_TRUE(
      tile_encoder::make({.kind = tile_kind::value}, {.method = encoder::query_aware}).ok());
  EXPECT_TRUE(tile_encoder::make({}, {.method = encoder::paper}).ok());
  EXPECT_TRUE(tile_encoder::make({.head_dim = 80}, options_of(encoder::tuned, 64)).ok());
  const tile_layout layout{tile_kind::value, 80, 64, 3, kvarn::scale_type::e4m3};
  const auto made = tile_encoder::make(layout);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(made.value().layout(), layout);
  EXPECT_EQ(made.value().record_bytes(), layout.record_bytes());
}

}  // namespace
