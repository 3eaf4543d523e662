// Attention of every target that this machine has against the scalar code, bit for bit, for every
// shape and option.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "kvarn/attention/attend.hpp"
#include "support/attention_scenes.hpp"
#include "support/layouts.hpp"
#include "support/targets.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::operand_precision;
using kvarn::target;
using kvarn_test::kPoison;
using kvarn_test::option_sets;
using kvarn_test::options_of;
using kvarn_test::outputs;
using kvarn_test::run;
using kvarn_test::same_bits;
using kvarn_test::scene;
using kvarn_test::shape;

// Compares every target with the definition, whose outputs it returns.
template <class T>
outputs expect_equal_targets(const scene<T>& s, const kvarn::attention_options& options) {
  const outputs expected = run(s, options, target::scalar);
  for (const target on : kvarn_test::covered_targets()) {
    const outputs got = run(s, options, on);
    EXPECT_TRUE(same_bits(got.out, expected.out) && same_bits(got.lse, expected.lse))
        << kvarn::name_of(on) << ": " << kvarn_test::describe(s.dims());
  }
  return expected;
}

TEST(AttentionTargets, AreNamed) {
  const std::vector<target> covered = kvarn_test::covered_targets();
  std::cout << "compared with the scalar code:" << kvarn_test::names_of(covered) << "\n";
#if defined(__aarch64__)
  EXPECT_EQ(kvarn_test::names_of(covered), " neon");
#endif
  EXPECT_EQ(covered.empty(),
            !kvarn::is_available(target::avx2) && !kvarn::is_available(target::neon));
}

// All pairs of head dimensions; bits, groups, scale types, heads and options take turns.
class AttentionShapes : public testing::TestWithParam<int> {};

TEST_P(AttentionShapes, EqualTheDefinition) {
  int turn = GetParam();
  for (const int value_head_dim : kvarn::supported_head_dims) {
    shape s;
    s.format = {GetParam(),
                value_head_dim,
                kvarn::supported_groups[turn % 2],
                kvarn::supported_bits[turn % 3],
                kvarn::supported_bits[turn / 3 % 3],
                kvarn_test::scale_types[turn / 2 % 2]};
    s.groups = 7;
    s.heads = 1 + turn % 6;
    s.sink = turn % 4 == 0 ? 0 : 3 * (turn % 7);
    const scene<float> memory(s, static_cast<std::uint64_t>(turn));
    for (const int set : {turn % option_sets, (turn + 21) % option_sets})
      expect_equal_targets(memory, options_of(memory, set));
    ++turn;
  }
}

INSTANTIATE_TEST_SUITE_P(KeyHeadDims, AttentionShapes,
                         testing::ValuesIn(kvarn::supported_head_dims),
                         [](const auto& test) { return "D" + std::to_string(test.param); });

TEST(AttentionTargets, TakeEveryFormatOfOneHeadDim) {
  for (const int group : kvarn::supported_groups)
    for (const int key_bits : kvarn::supported_bits)
      for (const int value_bits : kvarn::supported_bits)
        for (const auto scale : kvarn_test::scale_types) {
          shape s;
          s.format = {80, 112, group, key_bits, value_bits, scale};
          s.groups = 4;
          const scene<float> memory(s);
          expect_equal_targets(memory, options_of(memory, 0));
          expect_equal_targets(memory, options_of(memory, 1));
        }
}

TEST(AttentionTargets, TakeEverySetOfOptions) {
  shape s;
  s.tokens = 2;
  s.heads = 3;
  const scene<float> memory(s);
  std::vector<std::vector<float>> seen;
  for (int set = 0; set < option_sets; ++set) {
    const outputs expected = expect_equal_targets(memory, options_of(memory, set));
    // Every option matters.
    for (const auto& other : seen) EXPECT_FALSE(same_bits(expected.out, other)) << set;
    seen.push_back(expected.out);
  }
}

TEST(AttentionTargets, TakeAnyNumberOfHeadsAndTokens) {
  for (int heads = 1; heads <= 16; ++heads)
    for (const int tokens : {1, 3, 8}) {
      shape s;
      s.format.key_head_dim = s.format.value_head_dim = 64;
      s.groups = 3;
      s.tokens = tokens;
      s.heads = heads;
      const scene<float> memory(s);
      expect_equal_targets(memory, options_of(memory, heads % 2));
    }
}

// Queries in the middle of the memory: some rows see a group in part, others not at all.
TEST(AttentionTargets, TakeQueriesAnywhere) {
  for (const int ahead : {0, 30, 37, 40, 100, 300, 700, 975, 990})
    for (const std::int64_t window : {0, 1, 20, 128}) {
      shape s;
      s.format.group = 64;
      s.groups = 16;
      s.tokens = 12;
      s.heads = 2;
      s.ahead = ahead;
      const scene<float> memory(s);
      kvarn::attention_options options = memory.plain();
      options.window = window;
      expect_equal_targets(memory, options);
    }
}

template <class T>
void expect_equal_memories() {
  for (const bool strided : {false, true})
    for (const int sink : {0, 1, 4, 129, 260})
      for (const int heads : {1, 2, 3, 4, 7}) {
        shape s;
        s.format.key_head_dim = 96;
        s.format.value_head_dim = 80;
        s.groups = 1;
        s.sink = sink;
        s.tail = 260 - sink;
        s.heads = heads;
        s.strided = strided;
        const scene<T> memory(s);
        expect_equal_targets(memory, options_of(memory, heads));
      }
}
TEST(AttentionTargets, TakeExactTokensInFloat) { expect_equal_memories<float>(); }
TEST(AttentionTargets, TakeExactTokensInFloat16) { expect_equal_memories<kvarn::float16>(); }
TEST(AttentionTargets, TakeExactTokensInBfloat16) { expect_equal_memories<kvarn::bfloat16>(); }

TEST(AttentionTargets, GiveZerosWhereNothingIsSeen) {
  shape s;
  s.groups = s.sink = s.tail = 0;
  const scene<float> memory(s);
  const outputs expected = expect_equal_targets(memory, memory.plain());
  EXPECT_EQ(expected.out[0], 0.0f);
  EXPECT_EQ(expected.lse[0], kvarn::minus_infinity);
}

// The largest sums: all codes at their maximum, all bytes of the operands at -128 or at 127.
TEST(AttentionTargets, HoldTheLargestSums) {
  for (const int bits : kvarn::supported_bits)
    for (const float value : {128.0f, 127.0f, -128.0f, -129.0f, 32512.0f, -32512.0f}) {
      const kvarn::cache_format format{512, 64, 128, bits, bits, kvarn::scale_type::ue5m3};
      const auto make = [&](const kvarn::tile_layout& layout) {
        std::vector<std::byte> bytes(layout.record_bytes(), std::byte{0});
        std::fill_n(bytes.begin(), layout.zero_offset(), std::byte{0xff});
        std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(layout.step_offset()), bytes.end(),
                  static_cast<std::byte>(kvarn::ue5m3(1.0f).bits));
        return bytes;
      };
      const auto keys = make(format.key_layout());
      const auto values = make(format.value_layout());
      const kvarn::sealed_group group{keys.data(), values.data(), 0, 128};
      std::vector<float> query(512, value);
      query[0] = 32512.0f;
      const kvarn::attention_memory<float> memory{format, {}, {&group, 1}, {}};
      kvarn::attention_options options;
      options.softmax_scale = 0x1p-20f;
      options.queries_rotated = true;
      for (const auto precision : {operand_precision::int16, operand_precision::int8}) {
        options.precision = precision;
        const auto attend = [&](target on) {
          outputs result(1, 64);
          std::vector<float> workspace(kvarn::attention_workspace(format));
          kvarn::attend<float, float, float>({{query.data(), 512}, 1, 1, 127}, memory, options,
                                             {result.out.data(), 64}, result.lse.data(),
                                             workspace.data(), on);
          return result;
        };
        const outputs expected = attend(target::scalar);
        // The score of every token, from the sum of the products.
        const double sum = (511.0 * static_cast<double>(value) + 32512.0) * ((1 << bits) - 1);
        if (precision == operand_precision::int16) {
          EXPECT_NEAR(expected.lse[0], sum * 0x1p-20 + std::log(128.0), 1e-4);
        }
        for (const target on : kvarn_test::covered_targets()) {
          const outputs got = attend(on);
          EXPECT_TRUE(same_bits(got.out, expected.out) && same_bits(got.lse, expected.lse))
              << kvarn::name_of(on) << ", " << bits << " bits, operands " << value;
        }
      }
    }
}

TEST(AttentionTargets, AgreeOnRealHeads) {
  for (const char* name : kvarn_test::real_heads) {
    const kvarn_test::real_head head(name);
    const int dim = head.head_dim;
    const kvarn::cache_format format{dim, dim, 128, 2, 2, kvarn::scale_type::ue5m3};
    std::vector<kvarn_test::encoded_tile> tiles;
    for (int i = 0; i < kvarn_test::real_tiles; ++i)
      for (const auto kind : kvarn_test::tile_kinds)
        tiles.push_back(kvarn_test::encode(
            kind == kvarn::tile_kind::key ? format.key_layout() : format.value_layout(),
            head.tile(kind, i)));
    std::vector<kvarn::sealed_group> groups;
    for (std::size_t i = 0; i < tiles.size(); i += 2)
      groups.push_back({tiles[i].record.data(), tiles[i + 1].record.data(),
                        static_cast<std::int64_t>(64 * i), 128});
    const kvarn::attention_memory<float> memory{format, {}, groups, {}};
    const int heads = head.query_heads;
    kvarn::attention_options options;
    options.softmax_scale = kvarn::hadamard_norm(dim);
    const auto attend = [&](target on) {
      outputs result(4 * heads, dim);
      std::vector<float> workspace(kvarn::attention_workspace(format), kPoison);
      kvarn::attend<float, float, float>({{head.queries.values.data(), dim}, 4, heads, 508}, memory,
                                         options, {result.out.data(), dim}, result.lse.data(),
                                         workspace.data(), on);
      return result;
    };
    const outputs expected = attend(target::scalar);
    for (const target on : kvarn_test::covered_targets()) {
      const outputs got = attend(on);
      EXPECT_TRUE(same_bits(got.out, expected.out) && same_bits(got.lse, expected.lse))
          << kvarn::name_of(on) << ": " << name;
    }
  }
}

}  // namespace
