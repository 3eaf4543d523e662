// Attention against the softmax over the decoded keys and values in double precision.
#include "kvarn/attention/attend.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "attention/scene.hpp"
#include "support/layouts.hpp"

namespace {

using kvarn::attention_options;
using kvarn::cache_format;
using kvarn::operand_precision;
using kvarn::scale_type;
using namespace kvarn_test;

// Largest relative error of an output, and of a log-sum-exp in nats: exact tokens; int16.
constexpr double exact_limit = 1e-6;
constexpr double int16_limit = 7e-4;

// Runs the queries and requires outputs and log-sum-exps close to the oracle's.
template <class T>
attention_deviation expect_close(const scene<T>& s, const oracle::matrix& q,
                                 const query_shape& shape, const attention_options& options) {
  const auto worst = deviation(run_attention(s, q, shape, options),
                               expected_attention(s.keys, s.values, q, shape, options));
  const double limit = s.shape.groups.empty() ? exact_limit : int16_limit;
  EXPECT_LT(worst.out, limit);
  EXPECT_LT(worst.lse, limit);
  return worst;
}

template <class T>
attention_deviation expect_close(const scene<T>& s, const query_shape& shape,
                                 const attention_options& options) {
  const auto q = random_queries(shape.tokens * shape.heads, s.shape.format.key_head_dim, 5);
  return expect_close(s, q, shape, options);
}

constexpr cache_format small{.key_head_dim = 64, .value_head_dim = 64};

// A sink, two groups of which the first is cut, and a tail.
scene_shape mixed_shape(const cache_format& format) {
  return {format, 20, {format.group - 37, format.group}, 30};
}

TEST(Attend, Lengths) {
  for (const int sink : {0, 40, 128, 300})
    for (const int length : {1, 127, 128, 129, 255, 256, 257, 428, 2600}) {
      SCOPED_TRACE(std::to_string(length) + " tokens, sink " + std::to_string(sink));
      const scene<float> s(shape_of_length(small, length, sink),
                           static_cast<std::uint64_t>(length + sink));
      expect_close(s, {2, 2, length - 2}, options_for(small));
    }
}

TEST(Attend, TailsOfAnyLength) {
  for (const int tail : {0, 1, 15, 16, 17, 127, 128, 129, 400}) {
    SCOPED_TRACE(std::to_string(tail) + " tokens in the tail");
    const scene<float> s({small, 3, {128}, tail}, static_cast<std::uint64_t>(tail));
    expect_close(s, {1, 2, s.shape.tokens() - 1}, options_for(small));
  }
}

TEST(Attend, CutGroups) {
  for (const int count : {1, 2, 63, 64, 65, 127}) {
    SCOPED_TRACE(std::to_string(count) + " tokens of a group");
    for (const auto& groups :
         {std::vector<int>{count}, std::vector<int>{count, 128}, std::vector<int>{128, count}}) {
      const scene<float> s({small, 0, groups, 0}, static_cast<std::uint64_t>(count));
      expect_close(s, {1, 2, s.shape.tokens() - 1}, options_for(small));
      const scene<float> more({small, 5, groups, 9}, static_cast<std::uint64_t>(count));
      expect_close(more, {1, 2, more.shape.tokens() - 1}, options_for(small));
    }
  }
  const scene<float> empty({small, 2, {0, 128, 0}, 2}, 1);
  expect_close(empty, {1, 2, 131}, options_for(small));
}

TEST(Attend, EveryHeadDimension) {
  for (const int key_dim : kvarn::supported_head_dims)
    for (const int value_dim : {64, 112, key_dim}) {
      const int group = key_dim == value_dim ? 64 : 128;
      const cache_format format{
          .key_head_dim = key_dim, .value_head_dim = value_dim, .group = group};
      SCOPED_TRACE("D " + std::to_string(key_dim) + " and " + std::to_string(value_dim));
      const scene<float> s(mixed_shape(format), static_cast<std::uint64_t>(key_dim + value_dim));
      expect_close(s, {1, 3, s.shape.tokens() - 1}, options_for(format));
    }
}

TEST(Attend, EveryWidthAndScaleType) {
  for (const int key_bits : kvarn::supported_bits)
    for (const int value_bits : kvarn::supported_bits)
      for (const int group : kvarn::supported_groups)
        for (const scale_type scale : scale_types) {
          const cache_format format{80, 96, group, key_bits, value_bits, scale};
          SCOPED_TRACE("format " + std::to_string(format.id()));
          const scene<float> s(mixed_shape(format), format.id());
          expect_close(s, {1, 3, s.shape.tokens() - 1}, options_for(format));
        }
}

TEST(Attend, QueryHeads) {
  const scene<float> s(mixed_shape(small), 8);
  for (int heads = 1; heads <= 16; ++heads) {
    SCOPED_TRACE(std::to_string(heads) + " heads");
    expect_close(s, {1, heads, s.shape.tokens() - 1}, options_for(small));
    expect_close(s, {3, heads, s.shape.tokens() - 3}, options_for(small));
  }
}

// Query tokens within the tail, a sealed group, the sink, and across their borders.
TEST(Attend, SeveralQueryTokensAreCausal) {
  const scene<float> s(mixed_shape(small), 9);
  const int tokens = s.shape.tokens();
  for (const int position : {0, 10, 18, 50, 109, 130, 200, tokens - 40, tokens - 6})
    for (const int count : {2, 5, 40}) {
      SCOPED_TRACE(std::to_string(count) + " queries from " + std::to_string(position));
      expect_close(s, {count, 2, position}, options_for(small));
    }
}

TEST(Attend, SlidingWindow) {
  const scene<float> s(mixed_shape(small), 10);
  const int tokens = s.shape.tokens();
  auto options = options_for(small);
  // One token; within the tail; the tail; a part of a full and of a cut group; all but one; more.
  for (const int window : {1, 2, 29, 30, 31, 64, 158, 170, tokens - 1, tokens, 10 * tokens}) {
    SCOPED_TRACE("window " + std::to_string(window));
    options.window = window;
    expect_close(s, {4, 2, tokens - 4}, options);
    expect_close(s, {4, 2, 120}, options);
  }
}

TEST(Attend, PositionsMayHaveGaps) {
  // A sink and a tail far behind it, as after a cache has dropped what no window reaches.
  const scene<float> s({small, 4, {128}, 6}, 11);
  std::vector<kvarn::sealed_group> groups;
  auto memory = s.memory(groups);
  groups[0].position += 1000;
  memory.tail.position += 1000;
  auto options = options_for(small);
  options.window = 40;
  const query_shape at_the_end{1, 2, 1000 + s.shape.tokens() - 1};
  const auto q = random_queries(2, 64, 5);
  const auto want = expected_attention(s.keys, s.values, q, {1, 2, s.shape.tokens() - 1}, options);
  EXPECT_LT(deviation(run_attention(memory, q, at_the_end, options), want).out, int16_limit);

  // A query in the gap sees the sink alone.
  options.window = 0;
  const auto sink = expected_attention(s.keys, s.values, q, {1, 2, 3}, options);
  EXPECT_LT(deviation(run_attention(memory, q, {1, 2, 500}, options), sink).out, exact_limit);
}

TEST(Attend, LogitSoftCap) {
  const scene<float> s(mixed_shape(small), 12);
  auto options = options_for(small);
  for (const float cap : {0.5f, 2.0f, 30.0f, 1000.0f}) {
    SCOPED_TRACE("cap " + std::to_string(cap));
    options.logit_soft_cap = cap;
    expect_close(s, {2, 3, s.shape.tokens() - 2}, options);
  }
  // Logits far beyond the cap: tanh is 1 and must not overflow on the way.
  options.logit_soft_cap = 3.0f;
  options.softmax_scale = 50.0f;
  expect_close(s, {2, 3, s.shape.tokens() - 2}, options);
}

TEST(Attend, SinkLogits) {
  const scene<float> s(mixed_shape(small), 13);
  auto options = options_for(small);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float size : {-50.0f, 0.0f, 4.0f, 50.0f}) {
    // One per query head; that of another head would be noticed.
    const float logits[] = {size, size + 1.5f, -infinity};
    options.sink_logits = logits;
    expect_close(s, {3, 3, s.shape.tokens() - 3}, options);
  }
}

TEST(Attend, RotatedQueriesAndOutput) {
  for (const int dim : {64, 80}) {
    const scene<float> s(mixed_shape({.key_head_dim = dim, .value_head_dim = dim + 16}), 14);
    auto options = options_for(s.shape.format);
    options.rotate_output = false;
    expect_close(s, {1, 3, s.shape.tokens() - 1}, options);
    options.queries_rotated = true;
    expect_close(s, {1, 3, s.shape.tokens() - 1}, options);
    options.rotate_output = true;
    expect_close(s, {1, 3, s.shape.tokens() - 1}, options);
  }
}

TEST(Attend, AllOptionsAtOnce) {
  const scene<float> s(mixed_shape({.key_head_dim = 96, .value_head_dim = 64, .key_bits = 4}), 15);
  const float logits[] = {0.5f, -1.0f};
  expect_close(s, {3, 2, s.shape.tokens() - 3},
               {.softmax_scale = 0.07f,
                .logit_soft_cap = 5.0f,
                .window = 90,
                .sink_logits = logits,
                .queries_rotated = true,
                .rotate_output = false});
}

TEST(Attend, NothingVisible) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto q = random_queries(6, 64, 5);
  const scene<float> empty({small, 0, {}, 0}, 1);
  const scene<float> s(mixed_shape(small), 16);
  auto options = options_for(small);
  std::vector<kvarn::sealed_group> groups;
  auto later = s.memory(groups);
  later.sink.position = 100;
  for (auto& group : groups) group.position += 100;
  later.tail.position += 100;

  for (const auto& got : {run_attention(empty, q, {3, 2, 50}, options),
                          run_attention(later, q, {3, 2, 90}, options)}) {
    EXPECT_EQ(got.out, std::vector<float>(6 * 64, 0.0f));
    EXPECT_EQ(got.lse, std::vector<float>(6, -infinity));
  }
  // Of three query tokens the last sees one token: its value, whatever the score.
  const auto first = run_attention(later, q, {3, 2, 98}, options);
  EXPECT_EQ(first.lse[3], -infinity);
  EXPECT_GT(first.lse[4], -infinity);
  EXPECT_LT(deviation(first, expected_attention(s.keys, s.values, q, {3, 2, -2}, options)).out,
            exact_limit);

  // With a sink logit the softmax has one term, without a value.
  const float logits[] = {0.25f, -3.0f};
  options.sink_logits = logits;
  const auto sunk = run_attention(empty, q, {3, 2, 50}, options);
  EXPECT_EQ(sunk.out, std::vector<float>(6 * 64, 0.0f));
  for (int i = 0; i < 6; ++i)
    EXPECT_NEAR(sunk.lse[static_cast<std::size_t>(i)], logits[i % 2], 1e-6);
}

// Sums of q k beyond binary16 (and scores of thousands of nats): nothing overflows.
TEST(Attend, LargeQueries) {
  const cache_format format{.key_head_dim = 256, .value_head_dim = 256};
  const scene<float> s(mixed_shape(format), 17);
  const query_shape last{1, 3, s.shape.tokens() - 1};
  auto options = options_for(format);
  for (const double size : {1e2, 1e3, 1e4}) {
    const oracle::matrix q = random_queries(3, 256, 5) * size;
    SCOPED_TRACE("queries of size " + std::to_string(size));
    ASSERT_GT((q * oracle::hadamard(256) * s.keys.transpose()).cwiseAbs().maxCoeff(),
              size == 1e2 ? 5e3 : 65504);
    // Scores of ordinary size from large products.
    options.softmax_scale = static_cast<float>(1 / 16.0 / size);
    expect_close(s, q, last, options);
    // Scores of their real size: one token takes it all. The two best are far apart.
    options.softmax_scale = 1 / 16.0f;
    const auto got = run_attention(s, q, last, options);
    const auto want = expected_attention(s.keys, s.values, q, last, options);
    if (size >= 1e3) {
      EXPECT_LT(deviation(got, want).out, int16_limit);
    }
    for (int i = 0; i < 3; ++i)
      EXPECT_NEAR(got.lse[static_cast<std::size_t>(i)] / want.lse[i], 1.0, 1e-3);
  }
}

TEST(Attend, NotFiniteQueriesAreReplacedAsInKeys) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const scene<float> s(mixed_shape(small), 18);
  const query_shape last{1, 4, s.shape.tokens() - 1};
  auto damaged = random_queries(4, 64, 5);
  auto repaired = damaged;
  const struct {
    int row, col;
    float value, instead;
  } faults[] = {{0, 3, nan, 0.0f},          {0, 9, -nan, 0.0f},
                {1, 0, infinity, 65504.0f}, {1, 63, -infinity, -65504.0f},
                {2, 5, 1e30f, 65504.0f},    {2, 6, -70000.0f, -65504.0f}};
  for (const auto& fault : faults) {
    damaged(fault.row, fault.col) = fault.value;
    repaired(fault.row, fault.col) = fault.instead;
  }
  for (const bool rotated : {false, true}) {
    auto options = options_for(small);
    options.queries_rotated = rotated;
    EXPECT_TRUE(run_attention(s, damaged, last, options) ==
                run_attention(s, repaired, last, options));
    options.softmax_scale = 1e-5f;
    expect_close(s, repaired, last, options);
  }
}

TEST(Attend, StoredTypesOfMemory) {
  const scene<kvarn::float16> half(mixed_shape(small), 19);
  expect_close(half, {2, 2, half.shape.tokens() - 2}, options_for(small));
  const scene<kvarn::bfloat16> brain(mixed_shape(small), 20);
  expect_close(brain, {2, 2, brain.shape.tokens() - 2}, options_for(small));
  const scene<kvarn::float16> exact({small, 40, {}, 300}, 21);
  expect_close(exact, {2, 2, exact.shape.tokens() - 2}, options_for(small));
}

// The error that the precision of operands adds, on scores with a standard deviation of 1.5 nats.
// Lower bounds too: a precision that costs nothing was not measured, or not used.
TEST(Attend, ErrorOfOperandPrecision) {
  const scene<float> s(shape_of_length({}, 2048, 0), 22);
  const query_shape last{1, 16, 2047};
  const auto q = random_queries(16, 128, 5);
  auto options = options_for(s.shape.format);
  const oracle::matrix scores =
      static_cast<double>(options.softmax_scale) * (q * oracle::hadamard(128)) * s.keys.transpose();
  const double spread = std::sqrt((scores.array() - scores.mean()).square().mean());
  EXPECT_NEAR(spread, 1.5, 0.2);

  const auto want = expected_attention(s.keys, s.values, q, last, options);
  const auto relative_error = [&](operand_precision precision) {
    options.precision = precision;
    const auto got = run_attention(s, q, last, options);
    const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>
        out(got.out.data(), 16, 128);
    return (out.cast<double>() - want.out).norm() / want.out.norm();
  };
  const double int16 = relative_error(operand_precision::int16);
  EXPECT_GT(int16, 1e-6);
  EXPECT_LT(int16, 2e-4);
  const double int8 = relative_error(operand_precision::int8);
  EXPECT_GT(int8, 1e-3);
  EXPECT_LT(int8, 3e-2);
  EXPECT_GT(int8, 50 * int16);
  RecordProperty("int16", std::to_string(int16));
  RecordProperty("int8", std::to_string(int8));
}

}  // namespace
