// Every encoder against the double-precision oracle: scales, then steps and zeros from the same
// scales, then codes from the same steps and zeros, then the error of the whole.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "kvarn/codec/tile_codec.hpp"
#include "support/layouts.hpp"
#include "support/oracle.hpp"
#include "support/oracle_numbers.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::encoder;
using kvarn::tile_kind;
using kvarn::tile_layout;
namespace oracle = kvarn_test::oracle;

// How often the library's binary32 and the oracle's double fell on different sides of a tie.
struct deviations {
  long scales = 0, scales_off = 0;
  long columns = 0, columns_off = 0;
  long codes = 0, codes_off = 0;
  long rows = 0, rows_off = 0;  // with error feedback, where one code changes all that follow

  long off() const { return scales_off + columns_off + codes_off; }
};

oracle::matrix second_moment(const kvarn::query_moment& moment) {
  const auto d = static_cast<Eigen::Index>(moment.head_dim());
  using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const oracle::matrix upper =
      Eigen::Map<const float_matrix>(moment.sums().data(), d, d).cast<double>();
  return (oracle::matrix(upper.selfadjointView<Eigen::Upper>())) /
         static_cast<double>(moment.count());
}

std::vector<oracle::grid> stored_grids(const oracle::record_fields& fields,
                                       const tile_layout& layout) {
  std::vector<oracle::grid> grids;
  for (std::size_t c = 0; c < fields.step_code.size(); ++c) {
    const int bits = fields.zero_bits[c];
    grids.push_back(
        {(bits < 0x8000 ? 1 : -1) * oracle::binary16.value(bits & 0x7fff),
         oracle::fp8_value(fields.step_code[c], layout.scale == kvarn::scale_type::e4m3)});
  }
  return grids;
}

double squared_error(const oracle::matrix& a, const oracle::matrix& b) {
  return (a - b).squaredNorm() / a.squaredNorm();
}

// Compares the library's record of a tile with the oracle's, stage by stage.
void compare(const std::vector<float>& tokens, const tile_layout& layout,
             const kvarn::encoder_recipe& recipe, const kvarn::query_moment& moment,
             deviations& count) {
  const kvarn::query_factor factor(moment);
  std::vector<std::byte> record(layout.record_bytes());
  std::vector<float> workspace(kvarn::encode_workspace(layout));
  const auto report =
      kvarn::encode_tile(kvarn_test::view(tokens, layout.head_dim), {record.data(), layout}, recipe,
                         true, &factor, workspace.data());
  const auto fields = oracle::read_record(record.data(), layout);
  const long off_before = count.off();

  const oracle::matrix y = oracle::tile_of(tokens, layout, true);
  const oracle::matrix c = second_moment(moment);
  const double damping = static_cast<double>(kvarn::query_factor::default_damping);
  // Where two iterates of the normalisation are equally good, rounding decides: follow the library.
  int iterate = -1;
  const bool equivariant = recipe.scaling == kvarn::row_scaling::dual_axis_equivariant;
  if (equivariant || recipe.scaling == kvarn::row_scaling::dual_axis) {
    const auto iterates = oracle::normalize(y, recipe.iterations, equivariant);
    iterate = report.normalize.best;
    const double best = iterates[oracle::best_iterate(iterates)].imbalance;
    const double chosen = iterates.at(static_cast<std::size_t>(iterate)).imbalance;
    ASSERT_LE(chosen, best * (1 + 1e-4));
    ASSERT_NEAR(static_cast<double>(report.normalize.imbalance) / chosen, 1.0, 1e-4);
  }
  const auto whole = oracle::encode(y, layout, recipe, &c, damping, {.iterate = iterate});

  // 1. Scales: equal or neighbours. Where they are chosen, the chosen one costs as little.
  const auto grids = stored_grids(fields, layout);
  for (std::size_t r = 0; r < fields.scale_code.size(); ++r) {
    ++count.scales;
    const int difference = std::abs(fields.scale_code[r] - whole.fields.scale_code[r]);
    count.scales_off += difference != 0;
    if (!recipe.choose_scales) {
      ASSERT_LE(difference, 1) << "scale " << r;
      continue;
    }
    ASSERT_LE(difference, 2) << "scale " << r;
    const auto cost = [&](int code) {
      return oracle::row_cost(y, static_cast<Eigen::Index>(r), code, grids, layout,
                              static_cast<double>(recipe.along));
    };
    ASSERT_LE(cost(fields.scale_code[r]), cost(whole.fields.scale_code[r]) * (1 + 1e-3))
        << "scale " << r;
  }

  // 2. Steps and zeros from the library's scales. A least-squares fit moves by more than a
  // neighbour where a code before it fell on the other side of a tie, but by little.
  const auto same_scales = oracle::encode(y, layout, recipe, &c, damping,
                                          {.iterate = iterate, .row_scales = &fields.scale_code});
  const auto expected = stored_grids(same_scales.fields, layout);
  std::vector<bool> same_grid;
  for (std::size_t i = 0; i < grids.size(); ++i) {
    ++count.columns;
    const bool equal = fields.zero_bits[i] == same_scales.fields.zero_bits[i] &&
                       fields.step_code[i] == same_scales.fields.step_code[i];
    same_grid.push_back(equal);
    count.columns_off += !equal;
    ASSERT_LE(std::abs(fields.step_code[i] - same_scales.fields.step_code[i]), 1) << "step " << i;
    const bool neighbours = std::abs(fields.zero_bits[i] - same_scales.fields.zero_bits[i]) <= 1;
    ASSERT_TRUE(neighbours || std::abs(grids[i].zero - expected[i].zero) < 0.1 * grids[i].step)
        << "zero " << i << ": " << grids[i].zero << " instead of " << expected[i].zero;
  }

  // 3. Codes from the library's scales, steps and zeros. (The grid by which an unbiased recipe
  // makes codes is not stored: the oracle's own, where its stored outcome agrees. It may still
  // differ by the last bit of a zero.)
  const double tie = recipe.unbiased ? 1e-2 : 1e-3;
  const auto same_grids =
      recipe.unbiased
          ? same_scales
          : oracle::encode(y, layout, recipe, &c, damping,
                           {.iterate = iterate, .row_scales = &fields.scale_code, .grids = &grids});
  const auto [rows, cols] = oracle::extent_of(layout);
  for (int r = 0; r < rows; ++r) {
    ++count.rows;
    for (int col = 0; col < cols; ++col) {
      if (recipe.unbiased && !same_grid[static_cast<std::size_t>(col)]) continue;
      ++count.codes;
      const auto i = static_cast<std::size_t>(r * cols + col);
      const int difference = std::abs(fields.codes[i] - same_grids.fields.codes[i]);
      if (difference == 0) continue;
      ++count.codes_off;
      ASSERT_EQ(difference, 1) << "code " << r << " " << col;
      const double target = same_grids.targets(r, col);
      ASSERT_NEAR(std::abs(target - std::nearbyint(target)), 0.5, tie)
          << "code " << r << " " << col << " is no tie: " << target;
      if (recipe.error_feedback) {  // the rest of the row follows another path
        ++count.rows_off;
        break;
      }
    }
  }

  // 4. The whole: the same record, or where ties fell differently one that is as good.
  if (count.off() == off_before) {
    ASSERT_EQ(fields, whole.fields);
    return;
  }
  const double error = squared_error(y, oracle::decode(fields, layout));
  const double expected_error = squared_error(y, oracle::decode(whole.fields, layout));
  EXPECT_NEAR(error / expected_error, 1.0, recipe.error_feedback ? 5e-3 : 2e-3);
}

// The bounds are several times what was measured.
void expect_few(const deviations& count) {
  const auto expect = [](const char* what, long off, long all, double allowed) {
    testing::Test::RecordProperty(std::string(what) + "_off", std::to_string(off));
    EXPECT_GT(all, 1000) << what;
    EXPECT_LE(static_cast<double>(off), allowed * static_cast<double>(all)) << what;
  };
  expect("scales", count.scales_off, count.scales, 1e-3);
  expect("columns", count.columns_off, count.columns, 3e-3);
  expect("codes", count.codes_off, count.codes, 1e-4);
  expect("rows", count.rows_off, count.rows, 3e-3);
}

class Encoders : public testing::TestWithParam<std::tuple<int, encoder>> {};

TEST_P(Encoders, AgreeWithTheOracle) {
  const auto [head_dim, method] = GetParam();
  const auto moment = kvarn_test::random_moment(head_dim, 64, 77);
  deviations count;
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    if (layout.head_dim != head_dim) continue;
    SCOPED_TRACE(kvarn_test::name_of(layout));
    const auto seed = static_cast<std::uint64_t>(layout.record_bytes());
    compare(kvarn_test::random_tokens(layout.group, head_dim, seed), layout,
            kvarn::recipe_of(method, layout.kind, layout.bits), moment, count);
    if (HasFatalFailure()) return;
  }
  expect_few(count);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Encoders,
                         testing::Combine(testing::ValuesIn(kvarn::supported_head_dims),
                                          testing::ValuesIn(kvarn_test::encoders)),
                         [](const auto& instance) {
                           return kvarn_test::name_of(std::get<1>(instance.param)) + "_" +
                                  std::to_string(std::get<0>(instance.param));
                         });

// Steps of a recipe that no encoder of the library combines like this.
TEST(EncoderRecipes, AgreeWithTheOracle) {
  using kvarn::row_scaling;
  const kvarn::encoder_recipe recipes[] = {
      {.scaling = row_scaling::dual_axis_equivariant, .iterations = 1, .range = 0.8f},
      {.scaling = row_scaling::dual_axis_equivariant, .iterations = 8, .refits = 3},
      {.scaling = row_scaling::dual_axis, .iterations = 3, .cover = false, .unbiased = true},
      {.scaling = row_scaling::dual_axis, .iterations = 0, .range = 0.5f, .refits = 1},
      {.scaling = row_scaling::rms, .range = 0.9f, .cover = false, .refits = 2, .unbiased = true},
      {.scaling = row_scaling::rms_equalized, .range = 0.8f},
      {.scaling = row_scaling::rms, .refits = 1, .choose_scales = true},
      {.scaling = row_scaling::dual_axis,
       .iterations = 2,
       .cover = false,
       .choose_scales = true,
       .along = 20.0f}};
  for (const auto& recipe : recipes) {
    deviations count;
    for (const tile_layout& layout : kvarn_test::all_layouts()) {
      if (layout.head_dim != 80 && layout.head_dim != 128) continue;
      SCOPED_TRACE(kvarn_test::name_of(layout) + ", recipe " + std::to_string(&recipe - recipes));
      const auto moment = kvarn_test::random_moment(layout.head_dim, 8, 5);
      compare(kvarn_test::random_tokens(layout.group, layout.head_dim, 99), layout, recipe, moment,
              count);
      if (HasFatalFailure()) return;
    }
    expect_few(count);
  }
}

class RealEncoders : public testing::TestWithParam<std::tuple<const char*, encoder>> {};

TEST_P(RealEncoders, AgreeWithTheOracle) {
  const auto [head, method] = GetParam();
  const kvarn_test::real_head data(head);
  deviations count;
  for (int tile = 0; tile < kvarn_test::real_tiles; tile += 3) {
    const auto moment = data.moment(tile);
    for (const tile_kind kind : kvarn_test::tile_kinds)
      for (const int bits : kvarn::supported_bits) {
        const tile_layout layout{.kind = kind, .head_dim = data.head_dim, .bits = bits};
        SCOPED_TRACE(kvarn_test::name_of(layout) + " tile " + std::to_string(tile));
        compare(data.tile(kind, tile), layout, kvarn::recipe_of(method, kind, bits), moment, count);
        if (HasFatalFailure()) return;
      }
  }
  expect_few(count);
}

INSTANTIATE_TEST_SUITE_P(Heads, RealEncoders,
                         testing::Combine(testing::ValuesIn(kvarn_test::real_heads),
                                          testing::ValuesIn(kvarn_test::encoders)),
                         [](const auto& instance) {
                           return kvarn_test::name_of(std::get<1>(instance.param)) + "_" +
                                  kvarn_test::test_name(std::get<0>(instance.param));
                         });

}  // namespace
