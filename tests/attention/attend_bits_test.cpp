// What may not change a single bit of attention: other queries, unseen tokens, how memory is cut
// and stored, who computes what. And the one cut that does.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/scene.hpp"

namespace {

using kvarn::attention_options;
using kvarn::cache_format;
using kvarn::operand_precision;
using namespace kvarn_test;

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr cache_format format{.key_head_dim = 64, .value_head_dim = 80, .value_bits = 3};

struct named_options {
  std::string name;
  attention_options options;
};

std::vector<named_options> option_sets() {
  static const float sink_logits[16] = {0.5f, -2.0f, 3.0f};
  const attention_options plain = options_for(format);
  std::vector<named_options> sets(6, {"plain", plain});
  sets[1].name = "int8";
  sets[1].options.precision = operand_precision::int8;
  sets[2].name = "window";
  sets[2].options.window = 100;
  sets[3].name = "soft cap";
  sets[3].options.logit_soft_cap = 3.0f;
  sets[4].name = "sink logits";
  sets[4].options.sink_logits = sink_logits;
  sets[5].name = "rotated";
  sets[5].options.queries_rotated = true;
  sets[5].options.rotate_output = false;
  return sets;
}

// Two chunks of sealed groups, one group cut.
scene_shape long_shape() {
  scene_shape shape{format, 20, std::vector<int>(10, 128), 150};
  shape.groups[3] = 70;
  return shape;
}

// Rows [first, first + count) of a result.
template <class O>
attention_output<O> rows_of(const attention_output<O>& all, int first, int count) {
  const std::size_t dim = all.out.size() / all.lse.size();
  const auto begin = static_cast<std::size_t>(first);
  const auto end = begin + static_cast<std::size_t>(count);
  const auto cut = [](const auto& v, std::size_t from, std::size_t to) {
    return std::decay_t<decltype(v)>(v.begin() + static_cast<std::ptrdiff_t>(from),
                                     v.begin() + static_cast<std::ptrdiff_t>(to));
  };
  return {cut(all.out, begin * dim, end * dim), cut(all.lse, begin, end)};
}

TEST(AttendBits, QueryAloneOrAmongOthers) {
  const scene<float> s(long_shape(), 1);
  constexpr int tokens = 9, heads = 3;  // more rows than are taken together
  const int position = s.shape.tokens() - tokens;
  const auto q = random_queries(tokens * heads, 64, 2);
  for (auto [name, options] : option_sets()) {
    SCOPED_TRACE(name);
    const auto all = run_attention(s, q, {tokens, heads, position}, options);
    const float* const sink_logits = options.sink_logits;
    for (int row = 0; row < tokens * heads; ++row) {
      if (sink_logits != nullptr) options.sink_logits = sink_logits + row % heads;
      const auto alone = run_attention(s, q.row(row), {1, 1, position + row / heads}, options);
      ASSERT_TRUE(alone == rows_of(all, row, 1)) << "row " << row;
    }
  }
}

TEST(AttendBits, ContentsOfTheWorkspace) {
  const scene<float> s(long_shape(), 2);
  std::vector<kvarn::sealed_group> groups;
  const auto memory = s.memory(groups);
  const query_shape shape{2, 4, s.shape.tokens() - 2};
  const auto q = random_queries(8, 64, 3);
  for (const auto& [name, options] : option_sets()) {
    const auto dirty = run_attention(memory, q, shape, options, nan);
    EXPECT_TRUE(dirty == run_attention(memory, q, shape, options, 0.0f)) << name;
    EXPECT_TRUE(dirty == run_attention(memory, q, shape, options, 1e30f)) << name;
  }
}

TEST(AttendBits, AlignmentAndStrides) {
  const scene<float> s(long_shape(), 3);
  std::vector<kvarn::sealed_group> groups;
  auto memory = s.memory(groups);
  const query_shape shape{1, 2, s.shape.tokens() - 1};
  const auto q = random_queries(2, 64, 3);
  const auto options = options_for(format);
  const auto unaligned = run_attention(memory, q, shape, options);

  // Records in memory of their own; tokens dense, and channel after channel.
  std::vector<std::vector<std::byte>> records;
  for (auto& group : groups) {
    records.emplace_back(group.keys, group.keys + format.key_layout().record_bytes());
    group.keys = records.back().data();
    records.emplace_back(group.values, group.values + format.value_layout().record_bytes());
    group.values = records.back().data();
  }
  std::vector<float> dense, transposed;
  for (int t = 0; t < s.shape.tail; ++t)
    for (int d = 0; d < 64; ++d) dense.push_back(memory.tail.keys.load(t, d));
  for (int d = 0; d < 80; ++d)
    for (int t = 0; t < s.shape.tail; ++t) transposed.push_back(memory.tail.values.load(t, d));
  memory.tail.keys = {dense.data(), 64, 1};
  memory.tail.values = {transposed.data(), 1, s.shape.tail};
  EXPECT_TRUE(unaligned == run_attention(memory, q, shape, options));
}

// Reads a record, lets `change` edit its fields, writes it back.
template <class Change>
void edit_record(const std::byte* record, const kvarn::tile_layout& layout, Change change) {
  auto fields = oracle::read_record(record, layout);
  change(fields);
  const auto edited = oracle::write_record(fields, layout);
  std::memcpy(const_cast<std::byte*>(record), edited.data(), edited.size());
}

// Replaces everything about the token at `position`.
void overwrite_token(scene<float>& s, int position) {
  for (const auto& group : s.sealed_groups()) {
    const auto token = static_cast<std::size_t>(position - group.position);
    if (position < group.position || position >= group.position + group.count) continue;
    edit_record(group.keys, format.key_layout(), [&](oracle::record_fields& fields) {
      fields.scale_code[token] = fields.scale_code[token] == 40 ? 41 : 40;
      for (std::size_t d = 0; d < 64; ++d) fields.codes[token * 64 + d] ^= 1;
    });
    edit_record(group.values, format.value_layout(), [&](oracle::record_fields& fields) {
      fields.step_code[token] = oracle::unsigned_e5m3.max_code;
      fields.zero_bits[token] = oracle::binary16.max_code;
      for (std::size_t d = 0; d < 80; ++d) fields.codes[d * 128 + token] ^= 1;
    });
    return;
  }
  const auto overwrite = [](auto& keys, auto& values, int token) {
    for (int d = 0; d < 64; ++d) keys.at(token, d) = nan;
    for (int d = 0; d < 80; ++d) values.at(token, d) = nan;
  };
  if (position < s.shape.sink)
    overwrite(s.sink_keys, s.sink_values, position);
  else
    overwrite(s.tail_keys, s.tail_values, position - s.shape.sink - s.shape.sealed());
}

// A query sees exactly the tokens from its window's first to its own: the others may be anything,
// and the first and the last of them count.
TEST(AttendBits, ExactlyTheVisibleTokensCount) {
  const scene_shape shape{format, 20, {128, 90}, 60};
  const auto q = random_queries(2, 64, 4);
  const struct {
    int position, window;
  } cases[] = {{297, 0},   {297, 40}, {297, 61}, {297, 100}, {297, 200}, {297, 285},
               {260, 10},  {240, 1},  {237, 30}, {200, 0},   {180, 100}, {148, 1},
               {147, 128}, {100, 60}, {30, 15},  {19, 0},    {10, 4}};
  for (const auto& [position, window] : cases) {
    SCOPED_TRACE("query at " + std::to_string(position) + ", window " + std::to_string(window));
    auto options = options_for(format);
    options.window = window;
    options.precision = operand_precision::int8;
    const query_shape query{1, 2, position};
    const int first = window == 0 ? 0 : (std::max)(0, position + 1 - window);
    const scene<float> original(shape, 5);
    const auto want = run_attention(original, q, query, options);

    scene<float> poisoned(shape, 5);
    for (int t = 0; t < shape.tokens(); ++t)
      if (t < first || t > position) overwrite_token(poisoned, t);
    EXPECT_TRUE(run_attention(poisoned, q, query, options) == want);

    const auto sealed = [&](int t) { return t >= 20 && t < 238; };
    for (const int edge : {first, position}) {
      if (!sealed(edge)) continue;  // NaN would fail the checks of run_attention
      scene<float> changed(shape, 5);
      overwrite_token(changed, edge);
      EXPECT_FALSE(run_attention(changed, q, query, options) == want) << "token " << edge;
    }
  }
}

// Tokens behind a query need not be there: a longer memory gives the same bits.
TEST(AttendBits, LaterTokens) {
  const scene<float> s(long_shape(), 6);
  const auto q = random_queries(2, 64, 4);
  for (const auto& [name, options] : option_sets())
    for (const int position : {10, 60, 500, 700, 1200, s.shape.tokens() - 100}) {
      SCOPED_TRACE(name + ", query at " + std::to_string(position));
      std::vector<kvarn::sealed_group> groups;
      auto memory = s.memory(groups);
      const auto want = run_attention(memory, q, {1, 2, position}, options);

      const auto until = [&](std::int64_t start, int count) {
        return static_cast<int>(std::clamp<std::int64_t>(position + 1 - start, 0, count));
      };
      memory.sink.count = until(0, memory.sink.count);
      memory.tail.count = until(memory.tail.position, memory.tail.count);
      for (auto& group : groups) group.count = until(group.position, group.count);
      while (!groups.empty() && groups.back().count == 0) groups.pop_back();
      memory.sealed = groups;
      EXPECT_TRUE(run_attention(memory, q, {1, 2, position}, options) == want);
    }
}

// Chunks are counted from the first group of the list. A cache that drops groups which no window
// reaches keeps the bits if it drops whole chunks; else the same numbers are joined in other pairs.
TEST(AttendBits, DroppedGroups) {
  const scene<float> s({format, 0, std::vector<int>(20, 128), 40}, 7);
  const auto q = random_queries(4, 64, 4);
  const query_shape last{1, 4, s.shape.tokens() - 1};
  auto options = options_for(format);
  options.window = 40 + 10 * 128 + 5;  // sees 11 of the 20 groups
  std::vector<kvarn::sealed_group> groups;
  auto memory = s.memory(groups);
  const auto all = run_attention(memory, q, last, options);
  bool all_equal = true;
  for (std::size_t dropped = 0; dropped <= 9; ++dropped) {
    memory.sealed = std::span<const kvarn::sealed_group>(groups).subspan(dropped);
    const auto rest = run_attention(memory, q, last, options);
    if (dropped % kvarn::groups_per_chunk == 0) {
      EXPECT_TRUE(rest == all) << dropped;
    }
    all_equal = all_equal && rest == all;
    for (std::size_t i = 0; i < all.out.size(); ++i)
      ASSERT_NEAR(rest.out[i], all.out[i], 1e-6) << dropped;
  }
  EXPECT_FALSE(all_equal);
}

// Exact tokens are one chunk wherever they stand.
TEST(AttendBits, SinkOrTail) {
  const auto q = random_queries(3, 64, 4);
  for (const int count : {1, 128, 300}) {
    const scene<float> s({format, count, {}, 0}, 8);
    std::vector<kvarn::sealed_group> groups;
    auto memory = s.memory(groups);
    for (const auto& [name, options] : option_sets()) {
      const auto sink = run_attention(memory, q, {1, 3, count - 1}, options);
      auto moved = memory;
      std::swap(moved.sink, moved.tail);
      EXPECT_TRUE(run_attention(moved, q, {1, 3, count - 1}, options) == sink) << name;
    }
  }
}

template <class O>
void expect_rounded(const attention_output<O>& got, const attention_output<float>& exact) {
  EXPECT_EQ(got.lse, exact.lse);
  ASSERT_EQ(got.out.size(), exact.out.size());
  for (std::size_t i = 0; i < got.out.size(); ++i)
    ASSERT_EQ(got.out[i].bits, O::saturated(exact.out[i]).bits);
}

TEST(AttendBits, TypesOfOutput) {
  const scene<float> s(long_shape(), 9);
  const query_shape shape{1, 4, s.shape.tokens() - 1};
  const auto q = random_queries(4, 64, 4);
  for (const auto& [name, options] : option_sets()) {
    SCOPED_TRACE(name);
    const auto exact = run_attention(s, q, shape, options);
    expect_rounded(run_attention<kvarn::float16>(s, q, shape, options), exact);
    expect_rounded(run_attention<kvarn::bfloat16>(s, q, shape, options), exact);
  }
}

TEST(AttendBits, OutputBeyondFp16Saturates) {
  scene<float> s({format, 3, {}, 0}, 10);
  for (int t = 0; t < 3; ++t)
    for (int d = 0; d < 80; ++d) s.sink_values.at(t, d) = d % 2 == 0 ? 1e6f : -1e6f;
  auto options = options_for(format);
  options.rotate_output = false;
  const auto got = run_attention<kvarn::float16>(s, random_queries(1, 64, 4), {1, 1, 2}, options);
  for (std::size_t d = 0; d < 80; ++d)
    EXPECT_EQ(static_cast<float>(got.out[d]), d % 2 == 0 ? 65504.0f : -65504.0f);
}

template <class T>
void expect_same_as_floats() {
  // Memory: a scene of T, and one of floats with the same numbers.
  const scene<T> stored(long_shape(), 11);
  std::vector<kvarn::sealed_group> groups;
  const auto memory = stored.memory(groups);
  const auto widened = [](const strided_tokens<T>& tokens, int count, int dim) {
    strided_tokens<float> wide(count, dim);
    for (int t = 0; t < count; ++t)
      for (int d = 0; d < dim; ++d) wide.at(t, d) = tokens.view().load(t, d);
    return wide;
  };
  const auto sink_keys = widened(stored.sink_keys, stored.shape.sink, 64);
  const auto sink_values = widened(stored.sink_values, stored.shape.sink, 80);
  const auto tail_keys = widened(stored.tail_keys, stored.shape.tail, 64);
  const auto tail_values = widened(stored.tail_values, stored.shape.tail, 80);
  const kvarn::attention_memory<float> wide{
      format,
      {std::as_const(sink_keys).view(), std::as_const(sink_values).view(), 0, stored.shape.sink},
      groups,
      {std::as_const(tail_keys).view(), std::as_const(tail_values).view(), memory.tail.position,
       stored.shape.tail}};

  // Queries: those of T, and floats of the same numbers.
  auto q = random_queries(4, 64, 4);
  for (double& x : q.reshaped())
    x = static_cast<double>(static_cast<float>(T(static_cast<float>(x))));
  const query_shape shape{2, 2, stored.shape.tokens() - 2};
  for (const auto& [name, options] : option_sets()) {
    const auto want = run_attention<float, float>(wide, q, shape, options);
    EXPECT_TRUE((run_attention<float, float>(memory, q, shape, options) == want)) << name;
    EXPECT_TRUE((run_attention<float, T>(memory, q, shape, options) == want)) << name;
  }
}

TEST(AttendBits, TypesOfMemoryAndQueries) {
  expect_same_as_floats<kvarn::float16>();
  expect_same_as_floats<kvarn::bfloat16>();
}

}  // namespace
