// What has broken in other caches, one test for each kind. Kinds that other tests here cover by
// name: edge lengths and chunked prefill (KvCache.BytesDoNotDependOnChunks), division of work
// (KvCache.ABatchEqualsItsSequences), unsupported geometry (KvCache.ConfigurationsAreChecked),
// memory without bound (CacheMemory).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "support.hpp"
#include "support/layouts.hpp"

namespace {

using kvarn_test::seeds;
using kvarn_test::small_config;
using kvarn_test::test_cache;

// Outputs of the kernels on the same codes; above what they reach, below any wrong token or layout.
constexpr double kernel_error = 2e-3;

TEST(CacheFaults, KeysAndValuesOfDifferentWidths) {
  const kvarn::layer_bits bits[] = {{4, 2}, {2, 4}, {3, 2}, kvarn::exact_layer};
  auto config = small_config();
  config.layers = 4;
  config.bits = bits;
  config.format.value_head_dim = 112;
  test_cache<> c(config);
  const auto id = c.create();
  c.append(id, seeds(0, 300));
  EXPECT_EQ(c.seal(id), 4);
  for (int layer = 0; layer < 4; ++layer) EXPECT_LT(c.error(id, layer), kernel_error) << layer;
}

TEST(CacheFaults, WriterAndReaderDisagreeAboutALayout) {
  for (const int head_dim : kvarn::supported_head_dims)
    for (const int group : kvarn::supported_groups)
      for (const int bits : kvarn::supported_bits)
        for (const auto scale : kvarn_test::scale_types) {
          auto config = small_config();
          config.layers = config.kv_heads = 1;
          config.query_heads = 1;
          config.format = {head_dim, head_dim == 64 ? 80 : 64, group, bits, 6 - bits, scale};
          config.page_count = 2;
          test_cache<> c(config);
          const auto id = c.create();
          c.append(id, seeds(0, 5 + 2 * group + 3));
          EXPECT_EQ(c.seal(id), 2);
          EXPECT_LT(c.error(id, 0), kernel_error) << head_dim << " " << group << " " << bits;
        }
}

TEST(CacheFaults, TruncationAcrossASealedGroup) {
  for (const int sink : {0, 5}) {
    auto config = small_config();
    config.sink = sink;
    test_cache<> c(config);
    const auto id = c.create();
    c.append(id, seeds(0, sink + 129));
    EXPECT_EQ(c.seal(id), 2);
    ASSERT_TRUE(c.cache.truncate(id, sink + 127).ok());
    EXPECT_EQ(c.cache.length(id), sink + 127);
    EXPECT_EQ(c.cache.table().pages(id).back().count, 63);
    EXPECT_LT(c.error(id, 1), kernel_error);
    c.append(id, seeds(5000, 70));
    EXPECT_EQ(c.cache.length(id), sink + 197);
    EXPECT_LT(c.error(id, 1), kernel_error);
    EXPECT_EQ(c.seal(id), 1);
    EXPECT_EQ(c.cache.table().pages(id).back().position, sink + 127);
    EXPECT_LT(c.error(id, 1), kernel_error);

    // Without seals in between nothing tells that the tokens were ever there.
    const auto never = c.create();
    const auto undone = c.create();
    c.append(undone, seeds(0, sink + 129));
    ASSERT_TRUE(c.cache.truncate(undone, sink + 127).ok());
    c.append(undone, seeds(5000, 70));
    c.append(never, seeds(0, sink + 127));
    c.append(never, seeds(5000, 70));
    EXPECT_EQ(c.bytes(never), c.bytes(undone));
  }
}

TEST(CacheFaults, TruncationIntoTheSink) {
  test_cache<> c(small_config());
  const auto id = c.create();
  const auto fresh = c.create();
  c.append(id, seeds(0, 200));
  c.seal(id);
  ASSERT_TRUE(c.cache.truncate(id, 3).ok());
  EXPECT_EQ(c.cache.free_pages(), 16);
  c.append(fresh, seeds(0, 3));
  for (const auto s : {id, fresh}) {
    c.append(s, seeds(7000, 100));
    c.seal(s);
  }
  EXPECT_EQ(c.bytes(id), c.bytes(fresh));
}

TEST(CacheFaults, RecycledPageReadWithItsOldContents) {
  auto config = small_config();
  config.page_count = 2;
  test_cache<> used(config);
  for (int i = 0; i < 3; ++i) {
    const auto old = used.create();
    used.append(old, seeds(static_cast<std::uint64_t>(100000 + 1000 * i), 140));
    used.seal(old);
    ASSERT_TRUE(used.cache.free(old).ok());
  }
  test_cache<> fresh(config);
  std::vector<std::vector<float>> outs;
  for (auto* c : {&used, &fresh}) {
    const auto id = c->create();
    c->append(id, seeds(0, 100));
    EXPECT_EQ(c->seal(id), 1);
    outs.push_back(c->attend(id, 1));
    EXPECT_LT(c->error(id, 1), kernel_error);
  }
  EXPECT_EQ(outs[0], outs[1]);
}

TEST(CacheFaults, CopyInTheMiddleOfAGroup) {
  test_cache<> c(small_config());
  const auto parent = c.create();
  c.append(parent, seeds(0, 100));
  c.seal(parent);
  const auto child = c.cache.fork(parent).value();
  for (int step = 0; step < 12; ++step) {
    c.append(parent, seeds(static_cast<std::uint64_t>(1000 + 7 * step), 7));
    c.append(child, seeds(static_cast<std::uint64_t>(2000 + 5 * step), 5));
    c.seal(parent, 1);
    c.seal(child, 1);
  }
  for (const auto& [id, first, count] :
       {std::tuple{parent, 1000, 84}, std::tuple{child, 2000, 60}}) {
    const auto alone = c.create();
    c.append(alone, seeds(0, 100));
    c.append(alone, seeds(static_cast<std::uint64_t>(first), count));
    c.seal(alone);
    EXPECT_EQ(c.bytes(id), c.bytes(alone));
  }
}

TEST(CacheFaults, NanOrInfinityDamagesOtherTokens) {
  for (const bool exact : {false, true}) {
    test_cache<> c(small_config());
    const auto id = c.create();
    c.append(id, seeds(0, 20));
    std::vector<float> keys(2 * 64, 0.25f), values(2 * 64, 0.5f);
    keys[3] = std::numeric_limits<float>::quiet_NaN();
    values[70] = -std::numeric_limits<float>::infinity();
    kvarn::replaced_values replaced;
    for (int layer = 0; layer < 2; ++layer)
      ASSERT_TRUE(c.cache
                      .append(id, layer, kvarn::token_major(keys.data(), 2, 64),
                              kvarn::token_major(values.data(), 2, 64), 1, &replaced)
                      .ok());
    EXPECT_EQ(replaced, (kvarn::replaced_values{2, 2}));
    ASSERT_TRUE(c.cache.commit(id).ok());
    c.append(id, seeds(100, 60));
    EXPECT_EQ(c.seal(id, exact ? 0 : 1), exact ? 0 : 1);
    const auto out = c.attend(id);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
    // KV head 0 has no infinite value: its outputs are those of ordinary numbers.
    EXPECT_LT(*std::max_element(out.begin(), out.begin() + 2 * 64), 2.0f);
  }
}

TEST(CacheFaults, ValuesBeyondFp16AndTheirRotation) {
  test_cache<kvarn::float16> c(small_config());
  const auto id = c.create();
  std::vector<kvarn::bfloat16> keys(2 * 64), values(2 * 64);
  keys[5] = kvarn::bfloat16(1e5f);
  for (auto& x : values) x = kvarn::bfloat16(65504.0f);  // rotation makes it 8 times as large
  kvarn::replaced_values replaced;
  for (int layer = 0; layer < 2; ++layer)
    ASSERT_TRUE(c.cache
                    .append(id, layer, kvarn::token_major(keys.data(), 2, 64),
                            kvarn::token_major(values.data(), 2, 64), 1, &replaced)
                    .ok());
  ASSERT_TRUE(c.cache.commit(id).ok());
  EXPECT_GE(replaced.saturated, 2);
  c.append(id, seeds(0, 80));
  for (int i = 0; i < 2; ++i) {
    const auto out = c.attend(id);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
    c.seal(id);
  }
}

// Rows of float are clamped as those of float16 are: else sealing would do it, where attention has
// read more before.
TEST(CacheFaults, ExactRowsBeyondWhatARecordHolds) {
  test_cache<float> c(small_config());
  const auto id = c.create();
  constexpr int tokens = 5 + 4 * 64 + 39;
  const std::vector<float> x(tokens * 2 * 64, 65504.0f);  // rotation makes it 8 times as large
  const auto view = kvarn::token_major(x.data(), 2, 64);
  for (int layer = 0; layer < 2; ++layer) {
    kvarn::replaced_values replaced;
    ASSERT_TRUE(c.cache.append(id, layer, view, view, tokens, &replaced).ok());
    EXPECT_EQ(replaced, (kvarn::replaced_values{0, 2 * 2 * tokens}));
  }
  ASSERT_TRUE(c.cache.commit(id).ok());
  for (const int sealed : {0, 4}) {
    EXPECT_EQ(c.seal(id, sealed), sealed);
    const auto out = c.attend(id);
    // What a scale's 3 bits of mantissa lose: up to 1 / 16.
    for (std::size_t i = 0; i < std::size_t{4} * 64; ++i)
      ASSERT_NEAR(out[i], 65504.0f / 8, 65504.0f / 8 / 16) << sealed << " " << i;
  }
}

TEST(CacheFaults, PrefixesFreedByTheirOwnerLiveOnInForks) {
  test_cache<> c(small_config());
  const auto parent = c.create();
  c.append(parent, seeds(0, 150));
  c.seal(parent);
  const auto before = c.attend(parent);
  const auto child = c.cache.fork(parent).value();
  ASSERT_TRUE(c.cache.free(parent).ok());
  const auto other = c.create();
  c.append(other, seeds(9000, 800));
  c.seal(other);
  EXPECT_EQ(c.attend(child), before);
}

TEST(CacheFaults, AHandleOfAFreedSequenceReachesItsSuccessor) {
  test_cache<> c(small_config());
  const auto old = c.create();
  ASSERT_TRUE(c.cache.free(old).ok());
  const auto next = c.create();
  EXPECT_EQ(next.slot, old.slot);
  EXPECT_FALSE(c.cache.truncate(old, 0).ok());
  EXPECT_TRUE(c.cache.is_live(next));
}

}  // namespace
