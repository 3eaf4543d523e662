// Query statistics in the cache: per sequence, shared by forks, frozen; off they cost nothing.
#include "kvarn/cache/query_moments.hpp"

#include <gtest/gtest.h>

#include <sstream>
#include <vector>

#include "support.hpp"

namespace {

using kvarn_test::seeds;
using kvarn_test::small_config;
using kvarn_test::test_cache;

kvarn::cache_config aware_config() {
  auto config = small_config();
  config.method = kvarn::encoder::query_aware;
  return config;
}

void observe(test_cache<>& c, kvarn::sequence_id id, std::uint64_t first, int tokens) {
  for (int layer = 0; layer < c.config.layers; ++layer) {
    const auto queries = kvarn_test::token_tensor(seeds(first, tokens), layer, 4, 3, 64);
    ASSERT_TRUE(c.cache.observe(id, layer, kvarn::token_major(queries.data(), 4, 64), tokens).ok());
  }
}

TEST(CacheStatistics, OffCostsNothing) {
  test_cache<> c(small_config());
  const auto id = c.create();
  observe(c, id, 0, 10);
  EXPECT_EQ(c.cache.statistics(id), nullptr);
  EXPECT_EQ(c.cache.memory().statistics, 0u);
}

TEST(CacheStatistics, AMomentIsThatOfItsQueryHeads) {
  test_cache<> c(aware_config());
  const auto id = c.create();
  observe(c, id, 0, 10);
  const auto queries = kvarn_test::token_tensor(seeds(0, 10), 1, 4, 3, 64);
  kvarn::query_moment expected(64);  // of query heads 2 and 3, which share KV head 1
  for (int t = 0; t < 10; ++t)
    expected.add(kvarn::tokens_view<const float>{queries.data() + (t * 4 + 2) * 64, 64}, 2);
  const auto& moment = c.cache.statistics(id)->at(1, 1);
  EXPECT_EQ(moment.count(), 20u);
  EXPECT_TRUE(std::equal(expected.sums().begin(), expected.sums().end(), moment.sums().begin()));
}

TEST(CacheStatistics, SharedByForksUpToTheFork) {
  test_cache<> c(aware_config());
  const auto parent = c.create();
  observe(c, parent, 0, 10);
  const auto before = c.cache.memory().statistics;
  const auto child = c.cache.fork(parent).value();
  EXPECT_EQ(c.cache.statistics(parent), c.cache.statistics(child));
  EXPECT_EQ(c.cache.memory().statistics, before);
  observe(c, child, 50, 1);
  EXPECT_EQ(c.cache.statistics(parent)->at(0, 0).count(), 20u);
  EXPECT_EQ(c.cache.statistics(child)->at(0, 0).count(), 22u);
  EXPECT_EQ(c.cache.memory().statistics, 2 * before);
  ASSERT_TRUE(c.cache.clear(child).ok());
  EXPECT_EQ(c.cache.statistics(child), nullptr);
}

TEST(CacheStatistics, FrozenFactorsFromAFileRoundAsTheRunningOnes) {
  test_cache<> running(aware_config());
  const auto a = running.create();
  observe(running, a, 0, 40);
  running.append(a, seeds(0, 140));
  running.seal(a);

  std::stringstream file;
  ASSERT_TRUE(kvarn::save_moments(*running.cache.statistics(a), file).ok());
  const auto loaded = kvarn::load_moments(file).value();
  const kvarn::query_factors factors(loaded);
  test_cache<> frozen(aware_config(), &factors);
  const auto b = frozen.create();
  observe(frozen, b, 900, 5);  // does nothing
  EXPECT_EQ(frozen.cache.statistics(b), nullptr);
  frozen.append(b, seeds(0, 140));
  frozen.seal(b);
  EXPECT_EQ(running.bytes(a), frozen.bytes(b));

  test_cache<> none(aware_config());
  const auto d = none.create();
  none.append(d, seeds(0, 140));
  none.seal(d);
  EXPECT_NE(running.bytes(a), none.bytes(d));
}

TEST(CacheStatistics, MomentsOfSequencesMerge) {
  kvarn::query_moments both(2, 2, 64);
  test_cache<> c(aware_config());
  for (const std::uint64_t first : {0u, 10u}) {
    const auto id = c.create();
    observe(c, id, first, 10);
    both.merge(*c.cache.statistics(id));
  }
  EXPECT_EQ(both.at(1, 1).count(), 40u);
}

TEST(CacheStatistics, FactorsOfAnotherShapeAreRefused) {
  const kvarn::query_factors factors(kvarn::query_moments(3, 2, 64));
  EXPECT_EQ(kvarn::kv_cache<>::make(aware_config(), &factors).why().message(),
            "query factors have 3 layers, 2 KV heads and head_dim 64; the cache has 2, 2 and 64");
  EXPECT_EQ(kvarn::kv_cache<>::make(small_config(), &factors).why().message(),
            "query factors are given; they need encoder query_aware");
}

TEST(CacheStatistics, DamagedCalibrationFiles) {
  std::stringstream file;
  ASSERT_TRUE(kvarn::save_moments(kvarn::query_moments(1, 1, 64), file).ok());
  const std::string good = file.str();
  const auto load = [](const std::string& bytes) {
    std::stringstream stream(bytes);
    return kvarn::load_moments(stream).why().code();
  };
  EXPECT_EQ(load(good), kvarn::error_code::ok);
  for (std::size_t i = 0; i < good.size(); i += i < 64 ? 1 : 997) {
    auto bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x10);
    EXPECT_NE(load(bad), kvarn::error_code::ok) << i;
    EXPECT_NE(load(good.substr(0, i)), kvarn::error_code::ok) << i;
  }
}

}  // namespace
