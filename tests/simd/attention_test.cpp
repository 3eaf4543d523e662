// Attention of every target that this machine has against the scalar code, bit for bit, for every
// shape and option; and of every way to cut the work.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <iterator>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "kvarn/attention/attend.hpp"
#include "support/layouts.hpp"
#include "support/targets.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::float16;
using kvarn::operand_precision;
using kvarn::target;

// A stand-in for a record: any codes, steps and scales near 1, zeros near 0. The bytes end where
// the allocation ends, and start at an odd address.
struct record {
  std::vector<std::byte> bytes;

  record(const kvarn::tile_layout& layout, std::uint64_t seed) : bytes(layout.record_bytes() + 1) {
    kvarn_test::gaussian_source random(seed);
    std::byte* const out = bytes.data() + 1;
    for (std::size_t i = 0; i < layout.zero_offset(); ++i)
      out[i] = static_cast<std::byte>(random.index(256));
    for (int c = 0; c < layout.cols(); ++c) {
      const float16 zero(static_cast<float>(random.normal()));
      std::memcpy(out + layout.zero_offset() + 2 * static_cast<std::size_t>(c), &zero,
                  sizeof(zero));
    }
    for (std::size_t i = layout.step_offset(); i < layout.record_bytes(); ++i) {
      // Now and then a subnormal.
      const float value = random.index(16) == 0
                              ? 0x1p-8f
                              : static_cast<float>(0.1 + 0.5 * std::fabs(random.normal()));
      out[i] =
          layout.scale == kvarn::scale_type::ue5m3
              ? static_cast<std::byte>(kvarn::ue5m3(random.index(16) == 0 ? 0x1p-16f : value).bits)
              : static_cast<std::byte>(kvarn::e4m3(value).bits);
    }
  }
  const std::byte* data() const { return bytes.data() + 1; }
};

template <class T>
std::vector<T> numbers(std::size_t count, std::uint64_t seed, float size = 1.0f) {
  kvarn_test::gaussian_source random(seed);
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i)
    values.push_back(static_cast<T>(size * static_cast<float>(random.normal())));
  return values;
}

struct shape {
  kvarn::cache_format format;
  int groups = 10;  // two chunks
  int sink = 5;
  int tail = 37;
  int tokens = 1;
  int heads = 4;
  int ahead = 0;  // how far the queries stand before the end of the memory
  bool strided = false;
};

std::string describe(const shape& s) {
  const kvarn::cache_format& f = s.format;
  return kvarn_test::name_of(f.key_layout()) + ", " + kvarn_test::name_of(f.value_layout()) + ", " +
         std::to_string(s.groups) + " groups, sink " + std::to_string(s.sink) + ", tail " +
         std::to_string(s.tail) + ", " + std::to_string(s.tokens) + " x " +
         std::to_string(s.heads) + " queries";
}

// A memory with everything that a memory can have, and queries for it.
template <class T>
class scene {
 public:
  explicit scene(const shape& s, std::uint64_t seed = 1, float query_size = 2.0f) : shape_(s) {
    const kvarn::cache_format& f = s.format;
    std::int64_t position = s.sink;
    for (int g = 0; g < s.groups; ++g) {
      const auto at = seed + 2 * static_cast<std::uint64_t>(g);
      records_.emplace_back(f.key_layout(), at);
      records_.emplace_back(f.value_layout(), at + 1);
    }
    for (int g = 0; g < s.groups; ++g) {
      // Some groups are cut, one is empty.
      const int count = g == 2 ? f.group / 2 + 3 : g == 5 ? 1 : g == 6 ? 0 : f.group;
      const auto i = 2 * static_cast<std::size_t>(g);
      groups_.push_back({records_[i].data(), records_[i + 1].data(), position, count});
      position += count;
    }
    const int stride = s.strided ? 3 : 1;
    const auto exact = [&](int count, int dim, std::uint64_t salt) {
      return numbers<T>(static_cast<std::size_t>(count * dim * stride), seed + salt);
    };
    sink_keys_ = exact(s.sink, f.key_head_dim, 100);
    sink_values_ = exact(s.sink, f.value_head_dim, 101);
    tail_keys_ = exact(s.tail, f.key_head_dim, 102);
    tail_values_ = exact(s.tail, f.value_head_dim, 103);
    const auto view = [&](const std::vector<T>& tokens, int dim) {
      return kvarn::tokens_view<const T>{tokens.data(), std::ptrdiff_t{dim} * stride, stride};
    };
    memory_ = {
        f,
        {view(sink_keys_, f.key_head_dim), view(sink_values_, f.value_head_dim), 0, s.sink},
        groups_,
        {view(tail_keys_, f.key_head_dim), view(tail_values_, f.value_head_dim), position, s.tail}};
    queries_ =
        numbers<float>(static_cast<std::size_t>(rows() * f.key_head_dim), seed + 104, query_size);
    position_ = position + s.tail - s.tokens - s.ahead;
    sink_logits_ = numbers<float>(static_cast<std::size_t>(s.heads), seed + 105);
    plain_.softmax_scale = kvarn::hadamard_norm(f.key_head_dim);
  }

  scene(scene&&) = default;  // the views stay valid
  scene(const scene&) = delete;

  int rows() const { return shape_.tokens * shape_.heads; }
  const shape& dims() const { return shape_; }
  const kvarn::attention_options& plain() const { return plain_; }
  const float* sink_logits() const { return sink_logits_.data(); }
  std::vector<float>& queries() { return queries_; }

  using task = kvarn::attention_task<float, T, float>;
  task make_task(const kvarn::attention_options& options, float* out, float* lse) const {
    const int key_dim = shape_.format.key_head_dim;
    return {{{queries_.data(), key_dim}, shape_.tokens, shape_.heads, position_},
            memory_,
            options,
            {out, shape_.format.value_head_dim},
            lse};
  }

 private:
  shape shape_;
  std::vector<record> records_;
  std::vector<kvarn::sealed_group> groups_;
  std::vector<T> sink_keys_, sink_values_, tail_keys_, tail_values_;
  std::vector<float> queries_;
  std::vector<float> sink_logits_;
  std::int64_t position_ = 0;
  kvarn::attention_memory<T> memory_;
  kvarn::attention_options plain_;
};

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
constexpr std::size_t canaries = 16;

// Outputs and logarithms of the sums, with canaries behind both.
struct outputs {
  std::vector<float> out;
  std::vector<float> lse;

  outputs(int rows, int dim)
      : out(static_cast<std::size_t>(rows * dim) + canaries, -77.0f),
        lse(static_cast<std::size_t>(rows) + canaries, -77.0f) {}

  void check_canaries() const {
    for (std::size_t i = 1; i <= canaries; ++i) {
      EXPECT_EQ(out[out.size() - i], -77.0f);
      EXPECT_EQ(lse[lse.size() - i], -77.0f);
    }
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class T>
outputs run(const scene<T>& s, const kvarn::attention_options& options, target on) {
  outputs result(s.rows(), s.dims().format.value_head_dim);
  std::vector<float> workspace(kvarn::attention_workspace(s.dims().format), kPoison);
  kvarn::attend(s.make_task(options, result.out.data(), result.lse.data()), workspace.data(), on);
  result.check_canaries();
  return result;
}

// Compares every target with the definition, whose outputs it returns.
template <class T>
outputs expect_equal_targets(const scene<T>& s, const kvarn::attention_options& options) {
  const outputs expected = run(s, options, target::scalar);
  for (const target on : kvarn_test::covered_targets()) {
    const outputs got = run(s, options, on);
    EXPECT_TRUE(same_bits(got.out, expected.out) && same_bits(got.lse, expected.lse))
        << kvarn::name_of(on) << ": " << describe(s.dims());
  }
  return expected;
}

// Every combination of options, walked through by `index`.
template <class T>
kvarn::attention_options options_of(const scene<T>& s, int index) {
  kvarn::attention_options options = s.plain();
  options.precision = index % 2 == 0 ? operand_precision::int16 : operand_precision::int8;
  if (index / 2 % 2 == 1) options.logit_soft_cap = 2.5f;
  if (index / 4 % 2 == 1) options.window = s.dims().tail + 5 * s.dims().format.group / 2;
  if (index / 8 % 2 == 1) options.sink_logits = s.sink_logits();
  options.queries_rotated = index / 16 % 2 == 1;
  options.rotate_output = index / 32 % 2 == 0;
  return options;
}
constexpr int option_sets = 64;

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
TEST(AttentionTargets, TakeExactTokensInFloat16) { expect_equal_memories<float16>(); }
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

struct reversed_executor {
  template <class F>
  void operator()(std::size_t count, const F& f) const {
    for (std::size_t i = count; i > 0; --i) f(i - 1);
  }
};

// Thread t takes items t, t + threads, ...
struct thread_executor {
  std::size_t threads;

  template <class F>
  void operator()(std::size_t count, const F& f) const {
    std::vector<std::thread> pool;
    for (std::size_t t = 0; t < threads; ++t)
      pool.emplace_back([&, t] {
        for (std::size_t i = t; i < count; i += threads) f(i);
      });
    for (std::thread& thread : pool) thread.join();
  }
};

// Tasks that are cut along their chunks and tasks that are cut along their rows.
TEST(AttentionBatch, GivesTheBitsOfOneCall) {
  std::vector<scene<float16>> scenes;
  for (const int tokens : {1, 4, 5, 8, 11}) {
    shape s;
    s.format = {64, 80, 64, 2, 4, kvarn::scale_type::e4m3};
    s.groups = 3 * tokens;
    s.tail = 20 * tokens;
    s.tokens = tokens;
    scenes.emplace_back(s, static_cast<std::uint64_t>(tokens));
  }
  shape empty;
  empty.format = scenes[0].dims().format;
  empty.groups = empty.sink = empty.tail = 0;
  scenes.emplace_back(empty);

  std::vector<target> targets = kvarn_test::covered_targets();
  targets.push_back(target::scalar);
  for (const target on : targets) {
    std::vector<outputs> results;
    std::vector<scene<float16>::task> tasks;
    results.reserve(scenes.size());
    for (const auto& s : scenes) results.emplace_back(s.rows(), s.dims().format.value_head_dim);
    for (std::size_t i = 0; i < scenes.size(); ++i)
      tasks.push_back(scenes[i].make_task(options_of(scenes[i], static_cast<int>(i)),
                                          results[i].out.data(), results[i].lse.data()));
    const kvarn::attention_batch<scene<float16>::task> batch(tasks);
    EXPECT_GT(batch.item_count(), tasks.size());
    std::vector<float> workspace(batch.workspace() + canaries);
    const auto check = [&](const char* how, const auto& executor) {
      std::fill(workspace.begin(), workspace.end(), kPoison);
      std::fill_n(workspace.end() - canaries, canaries, -77.0f);
      for (std::size_t i = 0; i < scenes.size(); ++i) {
        const int dim = scenes[i].dims().format.value_head_dim;
        results[i] = outputs(scenes[i].rows(), dim);
        tasks[i].out.data = results[i].out.data();
        tasks[i].lse = results[i].lse.data();
      }
      batch.run(workspace.data(), executor, on);
      for (std::size_t i = 0; i < canaries; ++i)
        EXPECT_EQ(workspace[workspace.size() - 1 - i], -77.0f);
      for (std::size_t i = 0; i < scenes.size(); ++i) {
        results[i].check_canaries();
        const outputs expected =
            run(scenes[i], options_of(scenes[i], static_cast<int>(i)), target::scalar);
        EXPECT_TRUE(same_bits(results[i].out, expected.out) &&
                    same_bits(results[i].lse, expected.lse))
            << kvarn::name_of(on) << ", " << how << ": " << describe(scenes[i].dims());
      }
    };
    check("serial", kvarn::serial_executor{});
    check("reversed", reversed_executor{});
    for (std::size_t threads = 1; threads <= 8; ++threads)
      check(("threads " + std::to_string(threads)).c_str(), thread_executor{threads});
  }
}

}  // namespace
