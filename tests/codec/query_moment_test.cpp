// The second moment of queries and its factor: against Eigen, in pieces, merged, saved, frozen.
#include "kvarn/codec/query_moment.hpp"

#include <gtest/gtest.h>

#include <Eigen/Cholesky>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "kvarn/codec/tile_codec.hpp"
#include "support/oracle.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::error_code;
using kvarn::query_factor;
using kvarn::query_moment;
using kvarn_test::view;
namespace oracle = kvarn_test::oracle;

using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

oracle::matrix matrix_of(const float* values, int n) {
  return Eigen::Map<const float_matrix>(values, n, n).cast<double>();
}

std::vector<float> sums_of(const query_moment& moment) {
  return {moment.sums().begin(), moment.sums().end()};
}

class QueryMoment : public testing::TestWithParam<int> {};

TEST_P(QueryMoment, IsTheSumOfOuterProductsOfRotatedQueries) {
  const int d = GetParam();
  constexpr int count = 50;
  const auto queries = kvarn_test::random_tokens(count, d, 41);
  const oracle::matrix q = Eigen::Map<const float_matrix>(queries.data(), count, d).cast<double>();
  for (const bool rotate : {true, false}) {
    query_moment moment(d);
    moment.add(view(queries, d), count, rotate);
    EXPECT_EQ(moment.count(), 50u);
    const oracle::matrix rotated = rotate ? oracle::matrix(q * oracle::hadamard(d)) : q;
    const oracle::matrix expected = (rotated.transpose() * rotated).triangularView<Eigen::Upper>();
    const oracle::matrix sums = matrix_of(moment.sums().data(), d);
    EXPECT_LE((sums - expected).norm(), 1e-6 * expected.norm());
    EXPECT_EQ(sums.triangularView<Eigen::StrictlyLower>().toDenseMatrix().norm(), 0.0);
  }
}

// U of C + lambda I = (U + I) D (U + I)^T: multiply it out, and compare with Eigen's own
// factorisation of the matrix with its order reversed.
TEST_P(QueryMoment, FactorIsThatOfTheDampedMoment) {
  const int d = GetParam();
  for (const float damping : {query_factor::default_damping, 0.01f, 1.0f})
    for (const int count : {1, 4 * d}) {
      const query_moment moment = kvarn_test::random_moment(d, count, 42);
      const query_factor factor(moment, damping);
      ASSERT_EQ(factor.head_dim(), d);
      const oracle::matrix u = matrix_of(factor.upper(), d);
      ASSERT_EQ(u.triangularView<Eigen::Lower>().toDenseMatrix().norm(), 0.0);

      const oracle::matrix upper = matrix_of(moment.sums().data(), d);
      oracle::matrix damped = upper.selfadjointView<Eigen::Upper>();
      damped.diagonal().array() += static_cast<double>(damping) * damped.trace() / d;
      const Eigen::MatrixXd reversed = damped.reverse();
      const Eigen::MatrixXd lower = reversed.llt().matrixL();
      const Eigen::MatrixXd unit = lower * lower.diagonal().cwiseInverse().asDiagonal();
      const oracle::matrix expected =
          oracle::matrix(unit.reverse()) - oracle::matrix::Identity(d, d);
      EXPECT_LE((u - expected).norm(), 2e-5 * expected.norm()) << damping << " " << count;
      EXPECT_GT(expected.norm(), 0.1);
    }
}

TEST_P(QueryMoment, PiecesMergesAndCopies) {
  const int d = GetParam();
  constexpr int count = 30;
  const auto queries = kvarn_test::random_tokens(count, d, 43);
  query_moment whole(d);
  whole.add(view(queries, d), count);

  // In pieces: the same sums to the bit.
  query_moment pieces(d);
  for (int first = 0, n = 1; first < count; first += n, n = (std::min)(7, count - first))
    pieces.add(view(queries, d).from(first), n);
  EXPECT_EQ(sums_of(pieces), sums_of(whole));
  EXPECT_EQ(pieces.count(), whole.count());

  // A copy goes its own way.
  query_moment front(d);
  front.add(view(queries, d), 10);
  query_moment copy = front;
  copy.add(view(queries, d).from(10), count - 10);
  EXPECT_EQ(sums_of(copy), sums_of(whole));
  EXPECT_EQ(front.count(), 10u);

  // Merged halves: the same up to the order of rounding.
  query_moment back(d);
  back.add(view(queries, d).from(10), count - 10);
  front.merge(back);
  EXPECT_EQ(front.count(), whole.count());
  const oracle::matrix expected = matrix_of(whole.sums().data(), d);
  EXPECT_LE((matrix_of(front.sums().data(), d) - expected).norm(), 1e-6 * expected.norm());

  // Saved and restored.
  const auto restored = query_moment::from_sums(d, whole.sums(), whole.count());
  ASSERT_TRUE(restored.ok());
  EXPECT_EQ(sums_of(restored.value()), sums_of(whole));
  EXPECT_EQ(restored.value().count(), whole.count());
  EXPECT_EQ(restored.value().head_dim(), d);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, QueryMoment, testing::Values(64, 80, 128, 192),
                         [](const auto& instance) { return std::to_string(instance.param); });

TEST(QueryMomentErrors, FromSumsNamesWhatIsWrong) {
  const std::vector<float> sums(64 * 64, 1.0f);
  const auto head_dim = query_moment::from_sums(65, sums, 1);
  EXPECT_EQ(head_dim.why().code(), error_code::invalid_format);
  EXPECT_EQ(head_dim.why().message().find("head_dim is 65; allowed are 64"), 0u);

  const auto size = query_moment::from_sums(80, sums, 1);
  EXPECT_EQ(size.why().code(), error_code::invalid_argument);
  EXPECT_EQ(size.why().message(),
            "query moment has 4096 sums; head_dim 80 has " + std::to_string(80 * 80));

  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    auto damaged = sums;
    damaged[77] = bad;
    const auto refused = query_moment::from_sums(64, damaged, 1);
    EXPECT_EQ(refused.why().code(), error_code::invalid_data);
    EXPECT_EQ(refused.why().message(), "query moment sum 77 is not finite");
  }
#if KVARN_EXCEPTIONS
  EXPECT_THROW(query_moment::from_sums(80, sums, 1).value(), kvarn::error);
#endif
}

TEST(QueryMomentValues, BadQueriesAreReplacedAndCounted) {
  constexpr int d = 64;
  auto queries = kvarn_test::normal_tokens(4, d, 44);
  auto cleaned = queries;
  queries[3] = std::numeric_limits<float>::quiet_NaN();
  cleaned[3] = 0.0f;
  queries[70] = std::numeric_limits<float>::infinity();
  cleaned[70] = 65504.0f;
  queries[200] = -1e30f;
  cleaned[200] = -65504.0f;
  query_moment moment(d), expected(d);
  const auto replaced = moment.add(view(queries, d), 4);
  EXPECT_EQ(replaced, (kvarn::replaced_values{1, 2}));
  EXPECT_EQ(expected.add(view(cleaned, d), 4), kvarn::replaced_values{});
  EXPECT_EQ(sums_of(moment), sums_of(expected));
}

TEST(QueryMomentValues, NarrowQueriesOfEqualValueGiveEqualSums) {
  constexpr int d = 80;
  constexpr int count = 9;
  auto queries = kvarn_test::normal_tokens(count, d, 45);
  std::vector<kvarn::float16> narrow;
  for (float& q : queries) {
    narrow.push_back(kvarn::float16(q));
    q = static_cast<float>(narrow.back());
  }
  query_moment wide(d), from_narrow(d);
  wide.add(view(queries, d), count);
  from_narrow.add(kvarn::tokens_view<const kvarn::float16>{narrow.data(), d}, count);
  EXPECT_EQ(sums_of(from_narrow), sums_of(wide));
}

std::vector<std::byte> encode_keys(const std::vector<float>& tokens, const query_factor& factor) {
  return kvarn_test::encode({.head_dim = factor.head_dim()}, tokens,
                            {.method = kvarn::encoder::query_aware, .factor = &factor})
      .record;
}

std::vector<std::byte> encode_keys_without_feedback(const std::vector<float>& tokens,
                                                    int head_dim) {
  const kvarn::tile_layout layout{.head_dim = head_dim};
  auto recipe = kvarn::recipe_of(kvarn::encoder::query_aware, layout.kind, layout.bits);
  recipe.error_feedback = false;
  std::vector<std::byte> record(layout.record_bytes());
  std::vector<float> workspace(kvarn::encode_workspace(layout));
  kvarn::encode_tile(view(tokens, head_dim), kvarn::tile_view{record.data(), layout}, recipe, true,
                     nullptr, workspace.data());
  return record;
}

// Without queries there is nothing to weigh by: the codes of the same recipe without feedback.
TEST(QueryFactor, OfAnEmptyMomentIsPlainRounding) {
  const query_factor factor{query_moment(96)};
  for (int i = 0; i < 96 * 96; ++i) ASSERT_EQ(factor.upper()[i], 0.0f);
  const auto tokens = kvarn_test::random_tokens(128, 96, 46);
  EXPECT_EQ(encode_keys(tokens, factor), encode_keys_without_feedback(tokens, 96));
  const query_factor used(kvarn_test::random_moment(96, 200, 47));
  EXPECT_NE(encode_keys(tokens, used), encode_keys(tokens, factor));
}

// Sums that no queries give, whose factor is not finite: plain rounding.
TEST(QueryFactor, OfSumsWithoutAFiniteFactorIsPlainRounding) {
  const auto tokens = kvarn_test::random_tokens(128, 64, 54);
  const auto plain = encode_keys_without_feedback(tokens, 64);
  std::vector<float> sums(64 * 64);
  sums[40] = 1e30f;
  for (const kvarn::target_info& info : kvarn::target_infos) {
    if (!kvarn::is_available(info.id)) continue;
    const query_factor factor(query_moment::from_sums(64, sums, 1).value(),
                              query_factor::default_damping, info.id);
    for (int i = 0; i < 64 * 64; ++i) ASSERT_EQ(factor.upper()[i], 0.0f) << info.name;
    EXPECT_EQ(encode_keys(tokens, factor), plain) << info.name;
  }
}

// The scale of the moment cancels: by a power of two to the bit.
TEST(QueryFactor, DoesNotDependOnTheScaleOfTheMoment) {
  const query_moment moment = kvarn_test::random_moment(64, 100, 48);
  const query_factor factor(moment);
  for (const float scale : {0x1p-10f, 0x1p10f}) {
    auto sums = sums_of(moment);
    for (float& s : sums) s *= scale;
    const query_factor scaled(query_moment::from_sums(64, sums, 7).value());
    for (int i = 0; i < 64 * 64; ++i) ASSERT_EQ(scaled.upper()[i], factor.upper()[i]) << i;
  }
}

// A factor belongs to the moment it was made of: queries that come later do not reach into it.
TEST(QueryFactor, FrozenFactorsStay) {
  query_moment moment = kvarn_test::random_moment(64, 100, 49);
  const query_factor frozen(moment);
  const auto tokens = kvarn_test::random_tokens(128, 64, 50);
  const auto before = encode_keys(tokens, frozen);
  moment.merge(kvarn_test::random_moment(64, 100, 51));
  EXPECT_EQ(encode_keys(tokens, frozen), before);
  EXPECT_NE(encode_keys(tokens, query_factor(moment)), before);
}

// What feedback is for: a smaller error of scores, paid for with a larger error of keys.
TEST(QueryFactor, LowersTheErrorOfScores) {
  for (const int head_dim : {64, 128}) {
    const auto queries = kvarn_test::random_tokens(512, head_dim, 52);
    query_moment moment(head_dim);
    moment.add(view(queries, head_dim), 512);
    const query_factor factor(moment);
    const auto tokens = kvarn_test::random_tokens(128, head_dim, 53);
    const kvarn::tile_layout layout{.head_dim = head_dim};
    const auto errors = [&](const kvarn::encode_options& options) {
      const auto decoded = kvarn_test::round_trip(layout, tokens, options);
      const auto map = [&](const std::vector<float>& x, int n) {
        return oracle::matrix(Eigen::Map<const float_matrix>(x.data(), n, head_dim).cast<double>());
      };
      const oracle::matrix error = map(decoded, 128) - map(tokens, 128);
      return std::pair((map(queries, 512) * error.transpose()).squaredNorm(), error.squaredNorm());
    };
    const auto plain = errors({});
    const auto aware = errors({.method = kvarn::encoder::query_aware, .factor = &factor});
    EXPECT_LT(aware.first, 0.6 * plain.first);
    EXPECT_GT(aware.first, 0.05 * plain.first);
    EXPECT_GT(aware.second, plain.second);
    EXPECT_LT(aware.second, 3 * plain.second);
  }
}

}  // namespace
