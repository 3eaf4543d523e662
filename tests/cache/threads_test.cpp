// Different sequences from different threads at once: the same bytes as one after another.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "support.hpp"

namespace {

using kvarn_test::seeds;
using kvarn_test::small_config;
using kvarn_test::test_cache;

// What one thread does with its fork of a shared parent, and a sequence of its own.
std::vector<std::byte> work(test_cache<>& c, kvarn::sequence_id fork, std::uint64_t first) {
  kvarn::cache_workspace workspace;
  std::vector<std::byte> all;
  std::vector<float> out(4 * 64);
  const auto queries = kvarn_test::token_tensor(seeds(first, 1), 0, 4, 3, 64);
  for (int round = 0; round < 10; ++round) {
    const auto own = c.create();
    for (const auto id : {fork, own}) {
      c.append(id, seeds(first + static_cast<std::uint64_t>(100 * round), 37));
      EXPECT_TRUE(c.cache.seal(id, 1, workspace).ok());
      EXPECT_TRUE(c.cache
                      .attend(id, 1,
                              kvarn::cache_queries<float, float>{
                                  kvarn::token_major<const float>(queries.data(), 4, 64),
                                  kvarn::token_major(out.data(), 4, 64)},
                              {.softmax_scale = 0.125f}, workspace)
                      .ok());
      const auto bytes = c.bytes(id);
      all.insert(all.end(), bytes.begin(), bytes.end());
      const auto* const outputs = reinterpret_cast<const std::byte*>(out.data());
      all.insert(all.end(), outputs, outputs + out.size() * sizeof(float));
    }
    EXPECT_TRUE(c.cache.truncate(fork, c.cache.length(fork) - 20).ok());
    EXPECT_GT(c.cache.memory().exact, 0u);
    EXPECT_TRUE(c.cache.free(own).ok());
  }
  EXPECT_TRUE(c.cache.free(fork).ok());
  return all;
}

TEST(CacheThreads, DifferentSequencesAtOnce) {
  auto config = small_config();
  config.page_count = 60;
  std::vector<std::vector<std::byte>> results[2];
  for (const bool at_once : {false, true}) {
    test_cache<> c(config);
    const auto parent = c.create();
    c.append(parent, seeds(0, 150));
    c.seal(parent);
    std::vector<kvarn::sequence_id> forks;
    for (int i = 0; i < 3; ++i) forks.push_back(c.cache.fork(parent).value());
    ASSERT_TRUE(c.cache.free(parent).ok());
    auto& bytes = results[at_once];
    bytes.resize(3);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] { bytes[i] = work(c, forks[i], 1000 * (i + 1)); });
      if (!at_once) threads.back().join();
    }
    if (at_once)
      for (auto& thread : threads) thread.join();
    EXPECT_EQ(c.cache.free_pages(), 60);
    EXPECT_EQ(c.cache.memory().exact, 0u);
  }
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(results[0][i], results[1][i]) << i;
}

// Its slot belongs to another thread's sequences by now.
TEST(CacheThreads, AHandleOfAFreedSequenceStaysRefused) {
  auto config = small_config();
  config.max_sequences = 1;
  test_cache<> c(config);
  const auto gone = c.create();
  ASSERT_TRUE(c.cache.free(gone).ok());
  std::thread other([&c] {
    for (int i = 0; i < 2000; ++i) EXPECT_TRUE(c.cache.free(c.create()).ok());
  });
  for (int i = 0; i < 2000; ++i) {
    EXPECT_FALSE(c.cache.is_live(gone));
    EXPECT_EQ(c.cache.commit(gone).code(), kvarn::error_code::invalid_argument);
  }
  other.join();
}

TEST(CacheThreads, AnExecutorOfThreadsSealsAndAttends) {
  auto config = small_config();
  test_cache<> c(config);
  const auto id = c.create();
  const auto serial = c.create();
  for (const auto s : {id, serial}) c.append(s, seeds(0, 400));
  const auto executor = [](std::size_t count, const auto& f) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < count; ++i) threads.emplace_back([&f, i] { f(i); });
    for (auto& thread : threads) thread.join();
  };
  ASSERT_EQ(c.cache.seal(id, 6, c.workspace, executor, 3).value(), 6);
  c.seal(serial);
  EXPECT_EQ(c.bytes(id), c.bytes(serial));
  const auto queries = kvarn_test::token_tensor(seeds(900, 1), 0, 4, 3, 64);
  std::vector<float> out(4 * 64);
  const kvarn::cache_queries<float, float> call[] = {
      {kvarn::token_major<const float>(queries.data(), 4, 64),
       kvarn::token_major(out.data(), 4, 64)}};
  ASSERT_TRUE(c.cache
                  .attend(std::span(&id, 1), 0,
                          std::span<const kvarn::cache_queries<float, float>>(call),
                          {.softmax_scale = 0.125f}, c.workspace, executor)
                  .ok());
  auto expected = c.attend(serial);
  expected.resize(out.size());
  EXPECT_EQ(out, expected);
}

}  // namespace
