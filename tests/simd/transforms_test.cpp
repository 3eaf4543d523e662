// The rotation, the normalisation and the query moments with vector instructions against the
// definition, bit for bit.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kvarn/codec/hadamard.hpp"
#include "kvarn/codec/query_moment.hpp"
#include "kvarn/codec/variance_normalize.hpp"
#include "support/targets.hpp"
#include "support/tile_inputs.hpp"

namespace {

using kvarn_test::tile_input;

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), sizeof(float) * a.size()) == 0;
}

TEST(RotationOnTargets, EverySizeEqualsTheDefinition) {
  for (int n = 1; n <= 1024; ++n) {
    if (kvarn::hadamard_core(n) == 0) continue;
    for (const auto input : {tile_input::ordinary, tile_input::zeros, tile_input::integers}) {
      // One float off, with one behind that stays.
      const int head_dim = n < 8 ? 8 : n;
      auto x = kvarn_test::make_tile(input, 1, head_dim, static_cast<std::uint64_t>(n));
      x.resize(static_cast<std::size_t>(n) + 2);
      auto unnormalized = x;
      kvarn::hadamard_unnormalized(unnormalized.data() + 1, n);
      auto normalized = x;
      kvarn::hadamard(normalized.data() + 1, n);
      kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
        auto got = x;
        kernels.hadamard_unnormalized(got.data() + 1, n);
        EXPECT_TRUE(same_bits(unnormalized, got)) << kvarn::name_of(target) << " n " << n;
        got = x;
        kernels.hadamard(got.data() + 1, n);
        EXPECT_TRUE(same_bits(normalized, got)) << kvarn::name_of(target) << " n " << n;
      });
    }
  }
}

TEST(RotationOnTargets, BatchesEqualTheDefinition) {
  for (const int n : kvarn::supported_head_dims)
    for (const int gap : {0, 5}) {
      const int stride = n + gap;
      const auto x = kvarn_test::make_tile(tile_input::ordinary, 9, stride, 4);
      auto expected = x;
      kvarn::hadamard(expected.data(), n, 9, stride);
      kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
        auto got = x;
        kernels.hadamard(got.data(), n, 9, stride);
        EXPECT_TRUE(same_bits(expected, got)) << kvarn::name_of(target) << " n " << n;
      });
    }
}

template <class T, class O>
void expect_equal_rotations(int head_dim, tile_input input, std::ptrdiff_t channel_stride) {
  constexpr int count = 21;
  kvarn_test::strided_tokens<T> in(count, head_dim, channel_stride, 1);
  in.assign(kvarn_test::make_tile(input, count, head_dim, 6), count, head_dim);
  kvarn_test::strided_tokens<O> expected(count, head_dim, channel_stride, 2);
  const auto replaced =
      kvarn::scalar::rotate_tokens(in.const_view(), expected.view(), count, head_dim);
  kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
    kvarn_test::strided_tokens<O> got(count, head_dim, channel_stride, 2);
    EXPECT_EQ(replaced, kernels.rotate_tokens(in.const_view(), got.view(), count, head_dim));
    EXPECT_TRUE(expected.bytes() == got.bytes()) << kvarn::name_of(target) << " " << head_dim;
  });
}

TEST(RotationOnTargets, TokensEqualTheDefinition) {
  using kvarn::bfloat16;
  using kvarn::float16;
  for (const int head_dim : kvarn::supported_head_dims)
    for (const auto input : {tile_input::ordinary, tile_input::huge, tile_input::not_finite})
      for (const std::ptrdiff_t stride : {1, -2}) {
        expect_equal_rotations<float, float>(head_dim, input, stride);
        expect_equal_rotations<float, float16>(head_dim, input, stride);
        expect_equal_rotations<float16, float16>(head_dim, input, stride);
        expect_equal_rotations<bfloat16, float>(head_dim, input, stride);
        expect_equal_rotations<float, bfloat16>(head_dim, input, stride);
      }
}

TEST(NormalizationOnTargets, EqualsTheDefinition) {
  for (const bool equivariant : {false, true})
    for (const int rows : {1, 7, 16, 48, 64, 80, 128, 528})
      for (const int cols : {2, 16, 32, 64, 112, 128, 160, 512})
        for (const auto input : {tile_input::ordinary, tile_input::gaps, tile_input::zeros}) {
          const auto x = cols < 8 ? std::vector<float>(static_cast<std::size_t>(rows * cols), 2.0f)
                                  : kvarn_test::make_tile(input, rows, cols, 3);
          const kvarn::normalize_options options{.iterations = 4, .scale_equivariant = equivariant};
          const auto n = static_cast<std::size_t>(rows);
          const auto m = static_cast<std::size_t>(cols);
          std::vector<float> row_scale(n), col_scale(m);
          std::vector<float> workspace(kvarn::normalize_workspace(rows, cols));
          const auto expected =
              kvarn::variance_normalize(x.data(), rows, cols, 0.25f, options, row_scale.data(),
                                        col_scale.data(), workspace.data());
          kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
            std::vector<float> got_row(n), got_col(m);
            std::vector<float> space(kernels.normalize_workspace(rows, cols));
            const auto got = kernels.variance_normalize(
                x.data(), rows, cols, 0.25f, options, got_row.data(), got_col.data(), space.data());
            const std::string what = std::string(kvarn::name_of(target)) + " " +
                                     std::to_string(rows) + " x " + std::to_string(cols);
            EXPECT_TRUE(same_bits(row_scale, got_row)) << what;
            EXPECT_TRUE(same_bits(col_scale, got_col)) << what;
            EXPECT_EQ(expected.imbalance, got.imbalance) << what;
            EXPECT_EQ(expected.best, got.best) << what;
            EXPECT_EQ(expected.iterations, got.iterations) << what;
          });
        }
}

TEST(QueryMomentsOnTargets, EqualTheDefinition) {
  for (const int head_dim : kvarn::supported_head_dims)
    for (const auto input : {tile_input::ordinary, tile_input::not_finite, tile_input::integers}) {
      constexpr int count = 70;
      const auto queries = kvarn_test::make_tile(input, count, head_dim, 8);
      const auto view = kvarn_test::view(queries, head_dim);
      for (const bool rotate : {true, false}) {
        kvarn::query_moment moment(head_dim);
        const auto replaced = moment.add(view, count, rotate);
        const std::vector<float> expected(moment.sums().begin(), moment.sums().end());
        const kvarn::query_factor factor(moment, 0.1f);
        const std::vector<float> expected_factor(factor.upper(), factor.upper() + expected.size());
        kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
          const std::string what =
              std::string(kvarn::name_of(target)) + " " + std::to_string(head_dim);
          std::vector<float> got(expected.size());
          const auto first = kernels.add_queries(view, 33, rotate, head_dim, got.data());
          const auto second =
              kernels.add_queries(view.from(33), count - 33, rotate, head_dim, got.data());
          EXPECT_EQ(replaced.nan, first.nan + second.nan) << what;
          EXPECT_EQ(replaced.saturated, first.saturated + second.saturated) << what;
          EXPECT_TRUE(same_bits(expected, got)) << what;
          std::vector<float> space(kvarn::factor_workspace(head_dim));
          kernels.factorize(got.data(), head_dim, 0.1f, space.data());
          EXPECT_TRUE(same_bits(expected_factor, got)) << what;
        });
      }
    }
}

}  // namespace
