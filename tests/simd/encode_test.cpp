// Encoding with vector instructions against the definition: every layout, every kind of recipe, any
// input, byte for byte.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kvarn/codec/tile_codec.hpp"
#include "support/layouts.hpp"
#include "support/targets.hpp"
#include "support/tile_inputs.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::encoder_recipe;
using kvarn::row_scaling;
using kvarn::tile_kind;
using kvarn::tile_layout;
using kvarn_test::tile_input;

// The library's, and others that use every step in every combination of kinds.
std::vector<encoder_recipe> recipes_of(const tile_layout& layout) {
  std::vector<encoder_recipe> recipes;
  for (const auto method : kvarn_test::encoders)
    recipes.push_back(kvarn::recipe_of(method, layout.kind, layout.bits));
  recipes.push_back({.scaling = row_scaling::dual_axis_equivariant,
                     .iterations = 3,
                     .range = 0.9f,
                     .refits = 2,
                     .unbiased = true,
                     .error_feedback = true});
  recipes.push_back({.scaling = row_scaling::dual_axis, .iterations = 0, .refits = 1});
  recipes.push_back({.scaling = row_scaling::rms_equalized, .error_feedback = true});
  recipes.push_back(
      {.scaling = row_scaling::rms_equalized, .refits = 2, .choose_scales = true, .along = 3.0f});
  recipes.push_back({.scaling = row_scaling::dual_axis,
                     .iterations = 2,
                     .cover = false,
                     .choose_scales = true,
                     .error_feedback = true});
  recipes.push_back({.scaling = row_scaling::dual_axis_equivariant,
                     .iterations = 1,
                     .cover = false,
                     .unbiased = true});
  return recipes;
}

struct outcome {
  std::vector<std::byte> bytes;  // the record and what stands around it
  kvarn::encode_report report;
  bool workspace_kept = false;  // nothing was written behind it
};

// `run(tokens, tile, workspace)` encodes into a record at an odd address and a workspace at any.
template <class Run>
outcome encode_with(const tile_layout& layout, std::size_t workspace_floats, const Run& run) {
  constexpr std::size_t margin = 33;
  constexpr std::size_t slack = 16;
  const float mark = 1234.5f;
  outcome out;
  out.bytes.assign(layout.record_bytes() + 2 * margin, std::byte{0x5a});
  std::vector<float> workspace(workspace_floats + slack + 1, mark);
  out.report = run(kvarn::tile_view{out.bytes.data() + margin, layout}, workspace.data() + 1);
  out.workspace_kept = true;
  for (std::size_t i = 0; i < slack; ++i)
    out.workspace_kept = out.workspace_kept && workspace[1 + workspace_floats + i] == mark;
  return out;
}

template <class T>
void expect_equal_records(const tile_layout& layout, const encoder_recipe& recipe,
                          const std::vector<float>& values, std::ptrdiff_t channel_stride,
                          bool rotate, const float* upper, const std::string& what) {
  kvarn_test::strided_tokens<T> memory(layout.group, layout.head_dim, channel_stride, 3);
  memory.assign(values, layout.group, layout.head_dim);
  const auto tokens = memory.const_view();
  const outcome expected = encode_with(
      layout, kvarn::encode_workspace(layout), [&](kvarn::tile_view out, float* workspace) {
        return kvarn::scalar::encode_tile(tokens, out, recipe, rotate, upper, workspace);
      });
  ASSERT_TRUE(expected.workspace_kept) << what;
  kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
    const std::string name = std::string(kvarn::name_of(target)) + " " + what;
    const outcome got = encode_with(
        layout, kvarn::encode_workspace(layout), [&](kvarn::tile_view out, float* workspace) {
          return kernels.encode_tile(tokens, out, recipe, rotate, upper, workspace);
        });
    EXPECT_TRUE(got.workspace_kept) << name;
    ASSERT_TRUE(expected.bytes == got.bytes) << name;
    EXPECT_EQ(expected.report.replaced, got.report.replaced) << name;
    EXPECT_EQ(expected.report.normalize.iterations, got.report.normalize.iterations) << name;
    EXPECT_EQ(expected.report.normalize.best, got.report.normalize.best) << name;
    EXPECT_EQ(expected.report.normalize.imbalance, got.report.normalize.imbalance) << name;
  });
}

void expect_equal_records(int type, const tile_layout& layout, const encoder_recipe& recipe,
                          const std::vector<float>& values, std::ptrdiff_t channel_stride,
                          bool rotate, const std::string& what) {
  const float* const upper = kvarn_test::fixed_factor(layout.cols()).upper();
  if (type == 0)
    expect_equal_records<float>(layout, recipe, values, channel_stride, rotate, upper,
                                what + " float");
  if (type == 1)
    expect_equal_records<kvarn::float16>(layout, recipe, values, channel_stride, rotate, upper,
                                         what + " float16");
  if (type == 2)
    expect_equal_records<kvarn::bfloat16>(layout, recipe, values, channel_stride, rotate, upper,
                                          what + " bfloat16");
}

TEST(EncodeOnTargets, NamesWhatItCovers) {
  const std::vector<kvarn::target> covered = kvarn_test::covered_targets();
  for (const kvarn::target t : covered)
    std::printf("covered: %s\n", std::string(kvarn::name_of(t)).c_str());
  EXPECT_EQ(!covered.empty(),
            kvarn::is_available(kvarn::target::avx2) || kvarn::is_available(kvarn::target::neon));
}

class EncodeLayouts : public testing::TestWithParam<int> {};

// Types, inputs, strides and rotation take turns at different periods, so that over the layouts
// each meets each.
TEST_P(EncodeLayouts, EqualTheDefinition) {
  int turn = GetParam();
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    if (layout.head_dim != GetParam()) continue;
    int number = 0;
    for (const encoder_recipe& recipe : recipes_of(layout)) {
      const auto input = kvarn_test::tile_inputs[turn % std::ssize(kvarn_test::tile_inputs)];
      const std::ptrdiff_t stride = turn % 4 == 1 ? 2 : turn % 4 == 3 ? -1 : 1;
      expect_equal_records(turn % 5 % 3, layout, recipe,
                           kvarn_test::make_tile(input, layout.group, layout.head_dim,
                                                 static_cast<std::uint64_t>(7 + turn % 50)),
                           stride, turn % 7 != 2,
                           kvarn_test::name_of(layout) + " recipe " + std::to_string(number++) +
                               " input " + std::to_string(static_cast<int>(input)) + " turn " +
                               std::to_string(turn));
      if (HasFatalFailure()) return;
      ++turn;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, EncodeLayouts, testing::ValuesIn(kvarn::supported_head_dims),
                         [](const auto& info) { return "D" + std::to_string(info.param); });

TEST(EncodeOnTargets, EveryInputAndTypeEqualsTheDefinition) {
  for (const auto kind : kvarn_test::tile_kinds)
    for (const tile_input input : kvarn_test::tile_inputs)
      for (int type = 0; type < 3; ++type)
        for (const int head_dim : {64, 96, 128}) {
          const tile_layout layout{.kind = kind, .head_dim = head_dim, .bits = 2 + type};
          const auto values = kvarn_test::make_tile(input, layout.group, head_dim, 11);
          for (const encoder_recipe& recipe : recipes_of(layout)) {
            expect_equal_records(
                type, layout, recipe, values, 1, true,
                kvarn_test::name_of(layout) + " input " + std::to_string(static_cast<int>(input)));
            if (HasFatalFailure()) return;
          }
        }
}

// Factors so large that what is to be rounded becomes infinite or NaN.
TEST(EncodeOnTargets, FactorsOfAnySizeEqualTheDefinition) {
  for (const int head_dim : {64, 112})
    for (const int bits : kvarn::supported_bits)
      for (const float size : {1e3f, 1e38f, std::numeric_limits<float>::infinity()}) {
        const tile_layout layout{.head_dim = head_dim, .bits = bits};
        auto upper = kvarn_test::normal_tokens(head_dim, head_dim, 12);
        for (float& u : upper) u *= size;
        expect_equal_records<float>(
            layout, kvarn::recipe_of(kvarn::encoder::query_aware, tile_kind::key, bits),
            kvarn_test::make_tile(tile_input::ordinary, layout.group, head_dim, 13), 1, true,
            upper.data(), kvarn_test::name_of(layout) + " factor " + std::to_string(size));
      }
}

class EncodeRealTiles : public testing::TestWithParam<const char*> {};

TEST_P(EncodeRealTiles, EqualTheDefinition) {
  const kvarn_test::real_head head(GetParam());
  for (int index = 0; index < kvarn_test::real_tiles; ++index)
    for (const auto kind : kvarn_test::tile_kinds)
      for (const int bits : kvarn::supported_bits)
        for (const auto scale : kvarn_test::scale_types) {
          const tile_layout layout{kind, head.head_dim, 128, bits, scale};
          for (const auto method : kvarn_test::encoders) {
            expect_equal_records((index + bits) % 3, layout, kvarn::recipe_of(method, kind, bits),
                                 head.tile(kind, index), 1, true,
                                 kvarn_test::name_of(layout) + " tile " + std::to_string(index) +
                                     " " + kvarn_test::name_of(method));
            if (HasFatalFailure()) return;
          }
        }
}

INSTANTIATE_TEST_SUITE_P(Heads, EncodeRealTiles, testing::ValuesIn(kvarn_test::real_heads),
                         [](const auto& info) { return kvarn_test::test_name(info.param); });

}  // namespace
