// Merging attention over parts of a memory: equal to attention over all of it, up to rounding.
#include "kvarn/attention/merge.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "attention/scene.hpp"
#include "kvarn/format/float16.hpp"

namespace {

namespace oracle = kvarn_test::oracle;
using kvarn_test::attention_output;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int head_dim = 64;
constexpr kvarn::cache_format format{head_dim, head_dim, 64, 2, 3};

template <class T>
void merge(attention_output<T>& into, const attention_output<T>& other) {
  kvarn::merge_attention(kvarn::tokens_view<T>{into.out.data(), head_dim}, into.lse.data(),
                         kvarn::tokens_view<const T>{other.out.data(), head_dim}, other.lse.data(),
                         static_cast<int>(into.lse.size()), head_dim);
}

// The same in double precision, from the formula.
kvarn_test::attended exact_merge(const attention_output<float>& a,
                                 const attention_output<float>& b) {
  const auto rows = static_cast<Eigen::Index>(a.lse.size());
  kvarn_test::attended result{oracle::matrix(rows, head_dim), oracle::vector(rows)};
  for (Eigen::Index r = 0; r < rows; ++r) {
    const auto i = static_cast<std::size_t>(r);
    const auto first = static_cast<double>(a.lse[i]);
    const auto second = static_cast<double>(b.lse[i]);
    const double share = 1 / (1 + std::exp(second - first));
    for (int d = 0; d < head_dim; ++d) {
      const std::size_t at = i * head_dim + static_cast<std::size_t>(d);
      result.out(r, d) =
          share * static_cast<double>(a.out[at]) + (1 - share) * static_cast<double>(b.out[at]);
    }
    result.lse[r] = first - std::log(share);
  }
  return result;
}

// A memory and queries behind it, cut in two at a group.
class MergeAttention : public testing::TestWithParam<std::size_t> {
 protected:
  using output = attention_output<float>;

  // Attention over what `keep` leaves of the memory.
  template <class O = float, class F>
  attention_output<O> attend(const F& keep) const {
    std::vector<kvarn::sealed_group> groups;
    auto memory = scene.memory(groups);
    keep(memory);
    return kvarn_test::run_attention<O>(memory, queries, shape, kvarn_test::options_for(format));
  }
  template <class O = float>
  attention_output<O> whole() const {
    return attend<O>([](auto&) {});
  }
  template <class O = float>
  attention_output<O> front() const {
    return attend<O>([](auto& memory) {
      memory.sealed = memory.sealed.first(GetParam());
      memory.tail.count = 0;
    });
  }
  template <class O = float>
  attention_output<O> back() const {
    return attend<O>([](auto& memory) {
      memory.sealed = memory.sealed.subspan(GetParam());
      memory.sink.count = 0;
    });
  }

  kvarn_test::scene<float> scene{{format, 5, {64, 64, 40, 64}, 17}, 91};
  kvarn_test::query_shape shape{3, 4, scene.shape.tokens() - 3};
  oracle::matrix queries = kvarn_test::random_queries(12, head_dim, 92);
};

// The bounds are several times what was measured, from both sides.
TEST_P(MergeAttention, OfTwoPartsIsThatOfTheWhole) {
  const output first = front();
  const output second = back();
  output merged = first;
  merge(merged, second);

  const auto rounding = kvarn_test::deviation(merged, exact_merge(first, second));
  EXPECT_LT(rounding.out, 6e-7);
  EXPECT_GT(rounding.out, 1e-9);
  EXPECT_LT(rounding.lse, 2e-6);

  const output all = whole();
  oracle::matrix out(shape.tokens * shape.heads, head_dim);
  oracle::vector lse(out.rows());
  for (Eigen::Index r = 0; r < out.rows(); ++r) {
    lse[r] = static_cast<double>(all.lse[static_cast<std::size_t>(r)]);
    for (int d = 0; d < head_dim; ++d)
      out(r, d) = static_cast<double>(all.out[static_cast<std::size_t>(r * head_dim + d)]);
  }
  const auto from_whole = kvarn_test::deviation(merged, {out, lse});
  EXPECT_LT(from_whole.out, 2e-6);
  EXPECT_GT(from_whole.out, 1e-9);
  EXPECT_LT(from_whole.lse, 2e-6);

  // Either part alone is something else.
  EXPECT_GT(kvarn_test::deviation(first, {out, lse}).out, 0.1);
  EXPECT_GT(kvarn_test::deviation(second, {out, lse}).out, 0.1);
}

TEST_P(MergeAttention, OrderMattersInRoundingOnly) {
  output forward = front();
  merge(forward, back());
  output backward = back();
  merge(backward, front());
  float largest = 0;
  for (std::size_t i = 0; i < forward.out.size(); ++i) {
    EXPECT_NEAR(forward.out[i], backward.out[i], 1e-6f);
    largest = (std::max)(largest, std::abs(forward.out[i] - backward.out[i]));
  }
  EXPECT_GT(largest, 0.0f) << "one order was compared with itself";
  for (std::size_t i = 0; i < forward.lse.size(); ++i) EXPECT_EQ(forward.lse[i], backward.lse[i]);
}

// FP16 rows are merged in binary32 and rounded once.
TEST_P(MergeAttention, RoundsNarrowOutputOnce) {
  auto narrow = front<kvarn::float16>();
  const auto other = back<kvarn::float16>();
  const auto widen = [](const attention_output<kvarn::float16>& from) {
    output to;
    for (const kvarn::float16 x : from.out) to.out.push_back(static_cast<float>(x));
    to.lse = from.lse;
    return to;
  };
  output wide = widen(narrow);
  merge(wide, widen(other));
  merge(narrow, other);
  EXPECT_EQ(narrow.lse, wide.lse);
  for (std::size_t i = 0; i < wide.out.size(); ++i)
    EXPECT_EQ(narrow.out[i].bits, kvarn::float16(wide.out[i]).bits) << i;
}

INSTANTIATE_TEST_SUITE_P(Cuts, MergeAttention, testing::Values(0, 1, 3, 4),
                         [](const auto& instance) {
                           return "at_group_" + std::to_string(instance.param);
                         });

attention_output<float> row_of(float value, float lse) {
  return {std::vector<float>(head_dim, value), {lse}};
}

TEST(MergeAttentionRows, NothingVisibleChangesNothing) {
  const auto something = row_of(0.7f, -3.25f);
  auto merged = something;
  merge(merged, row_of(std::numeric_limits<float>::quiet_NaN(), -infinity));
  EXPECT_EQ(merged, something);

  merged = row_of(0.0f, -infinity);
  merge(merged, something);
  EXPECT_EQ(merged, something);

  const auto nothing = row_of(0.0f, -infinity);
  merged = nothing;
  merge(merged, nothing);
  EXPECT_EQ(merged, nothing);
}

TEST(MergeAttentionRows, WeighsByLogSumExp) {
  for (const float level : {-1e4f, -20.0f, 0.0f, 300.0f}) {
    auto merged = row_of(1.0f, level);
    merge(merged, row_of(3.0f, level));
    EXPECT_EQ(merged.out.front(), 2.0f) << level;
    EXPECT_FLOAT_EQ(merged.lse.front(), level + std::numbers::ln2_v<float>) << level;

    // So far below that binary32 does not see it.
    merged = row_of(1.0f, level);
    merge(merged, row_of(-5.0f, level - 500.0f));
    EXPECT_EQ(merged, row_of(1.0f, level));
    merged = row_of(-5.0f, level - 500.0f);
    merge(merged, row_of(1.0f, level));
    EXPECT_EQ(merged, row_of(1.0f, level));
  }
  auto merged = row_of(1.0f, std::log(3.0f));
  merge(merged, row_of(5.0f, 0.0f));
  EXPECT_FLOAT_EQ(merged.out.back(), 2.0f);
  EXPECT_FLOAT_EQ(merged.lse.front(), std::log(4.0f));
}

TEST(MergeAttentionRows, LeavesRowsAndChannelsBehindAlone) {
  std::vector<float> out(3 * 70, 8.0f), lse(3, 1.0f);
  const std::vector<float> other(2 * 64, 4.0f), other_lse(2, 1.0f);
  kvarn::merge_attention(kvarn::tokens_view<float>{out.data(), 70}, lse.data(),
                         kvarn::tokens_view<const float>{other.data(), 64}, other_lse.data(), 2,
                         64);
  for (std::size_t i = 0; i < out.size(); ++i)
    EXPECT_EQ(out[i], i / 70 < 2 && i % 70 < 64 ? 6.0f : 8.0f) << i;
  EXPECT_EQ(lse[2], 1.0f);
  EXPECT_GT(lse[1], 1.0f);
}

}  // namespace
