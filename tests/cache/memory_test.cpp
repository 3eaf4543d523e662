// Memory of the cache: accounts equal the allocator, nothing grows, addresses beyond 32 bits.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory_resource>
#include <new>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support.hpp"
#include "support/failing_resource.hpp"

namespace {

using kvarn::error_code;
using kvarn_test::counting_resource;
using kvarn_test::seeds;
using kvarn_test::small_config;
using kvarn_test::test_cache;

TEST(CacheMemory, AccountsEqualTheAllocator) {
  counting_resource counter;
  {
    auto config = small_config();
    config.memory = &counter;
    config.method = kvarn::encoder::query_aware;
    test_cache<> c(config);
    EXPECT_EQ(c.cache.memory().total(), counter.bytes);
    EXPECT_EQ(c.cache.memory().pages, 16 * kvarn::page_bytes(config));
    EXPECT_EQ(c.cache.memory().exact, 0u) << "nothing is reserved for tokens that are not there";
    EXPECT_EQ(c.cache.memory().statistics, 0u);
    std::mt19937 random(1);
    std::vector<kvarn::sequence_id> ids{c.create()};
    for (int step = 0; step < 400; ++step) {
      const auto i = random() % ids.size();
      switch (random() % 6) {
        case 0:
          if (ids.size() < 8) ids.push_back(c.cache.fork(ids[i]).value());
          break;
        case 1:
          if (ids.size() > 1) {
            ASSERT_TRUE(c.cache.free(ids[i]).ok());
            ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(i));
          }
          break;
        case 2:
          ASSERT_TRUE(c.cache.truncate(ids[i], c.cache.length(ids[i]) / 2).ok());
          break;
        case 3: {
          const auto queries = kvarn_test::token_tensor(seeds(random(), 1), 0, 4, 3, 64);
          ASSERT_TRUE(
              c.cache.observe(ids[i], 0, kvarn::token_major(queries.data(), 4, 64), 1).ok());
          break;
        }
        default:
          c.append(ids[i], seeds(random(), static_cast<int>(random() % 90)));
          (void)c.cache.seal(ids[i], 2, c.workspace);
      }
      // The moments count what std::vector takes for them elsewhere.
      const auto use = c.cache.memory();
      std::set<const kvarn::query_moments*> distinct;
      for (const auto id : ids)
        if (c.cache.statistics(id) != nullptr) distinct.insert(c.cache.statistics(id));
      std::size_t elsewhere = 0;
      for (const auto* moments : distinct) elsewhere += moments->allocated_bytes();
      ASSERT_EQ(use.total(), counter.bytes + elsewhere);
      ASSERT_GE(use.statistics, elsewhere);
    }
    for (const auto id : ids) ASSERT_TRUE(c.cache.free(id).ok());
    EXPECT_EQ(c.cache.memory().exact, 0u);
    EXPECT_EQ(c.cache.memory().statistics, 0u);
    EXPECT_EQ(c.cache.free_pages(), 16);
  }
  EXPECT_EQ(counter.bytes, 0u);
}

TEST(CacheMemory, CreateAndFreeTenThousandTimes) {
  counting_resource counter;
  auto config = small_config();
  config.memory = &counter;
  test_cache<> c(config);
  const auto id = c.create();
  c.append(id, seeds(0, 100));
  c.seal(id);
  std::size_t peak = 0;
  const std::size_t before = counter.bytes;
  for (int i = 0; i < 10000; ++i) {
    const auto fork = c.cache.fork(id, i % 101).value();
    const auto fresh = c.create();
    if (i % 10 == 0) {
      c.append(fresh, seeds(static_cast<std::uint64_t>(i), 7));
      c.append(fork, seeds(static_cast<std::uint64_t>(i), 3));
    }
    ASSERT_TRUE(c.cache.free(fork).ok());
    ASSERT_TRUE(c.cache.free(fresh).ok());
    ASSERT_EQ(counter.bytes, before);
    if (i == 1000) peak = counter.peak;
  }
  EXPECT_EQ(counter.peak, peak);
}

TEST(CacheMemory, ALongSequenceNeedsNoMoreThanItsTokens) {
  auto config = small_config();
  config.page_count = 200;
  test_cache<> c(config);
  const auto id = c.create();
  const std::size_t row = c.cache.exact_token_bytes();
  for (int i = 0; i < 3000; ++i) {
    c.append(id, seeds(static_cast<std::uint64_t>(i), 1));
    c.seal(id, 1);
    // The sink, at most a group and the token before a seal, room to grow by half, headers.
    ASSERT_LT(c.cache.memory().exact, row * (16 + 3 * 64 / 2 + 32) + 4 * 64);
  }
  // A long prompt is given back once it is sealed.
  const auto prompt = c.create();
  c.append(prompt, seeds(0, 5000));
  EXPECT_GT(c.cache.memory().exact, row * 5000);
  c.seal(prompt);
  EXPECT_LT(c.cache.memory().exact, row * (5000 / 8));
}

TEST(CacheMemory, ExactRowsStayBelowTheirLimit) {
  auto config = small_config();
  config.exact_memory = 160 * 2 * 2 * 128 * sizeof(kvarn::float16);  // of 160 tokens
  test_cache<> c(config);
  const auto id = c.create();
  c.append(id, seeds(0, 60));
  const auto before = c.bytes(id);
  const auto keys = kvarn_test::token_tensor(seeds(0, 60), 0, 2, 0, 64);
  const auto view = kvarn::token_major(keys.data(), 2, 64);
  ASSERT_TRUE(c.cache.append(id, 0, view, view, 60).ok());
  const auto status = c.cache.append(id, 1, view, view, 60);
  EXPECT_EQ(status.code(), kvarn::error_code::short_buffer);
  EXPECT_EQ(status.message(),
            "60 tokens more in layer 1 need " + std::to_string(60 * 2 * 128 * 2) +
                " bytes, and a copy of its rows while these move; exact rows take " +
                std::to_string(c.cache.memory().exact) + " of the " +
                std::to_string(config.exact_memory) + " bytes of exact_memory");
  EXPECT_LE(c.cache.memory().exact, config.exact_memory);
  ASSERT_TRUE(c.cache.truncate(id, c.cache.length(id)).ok());
  EXPECT_EQ(c.bytes(id), before);
}

TEST(CacheMemory, AnAccountNeverTakesMoreThanItsLimit) {
  counting_resource counter;
  kvarn::memory_account account(&counter, 100);
  EXPECT_EQ(account.try_allocate(101, 8), nullptr);
  EXPECT_EQ(counter.peak, 0u);  // not even for a moment
  void* const most = account.try_allocate(60, 8);
  ASSERT_NE(most, nullptr);
  EXPECT_EQ(account.try_allocate(41, 8), nullptr);
  void* const rest = account.try_allocate(40, 8);
  ASSERT_NE(rest, nullptr);
  EXPECT_EQ(counter.peak, 100u);
  account.deallocate(rest, 40, 8);
  account.deallocate(most, 60, 8);
}

// Both ask for more than half, and an allocation takes until both may be under way: one gets it,
// and what lies below never gives both.
TEST(CacheMemory, OfTwoThreadsOneGetsWhatFits) {
  class slow_resource final : public std::pmr::memory_resource {
   public:
    std::atomic<int> given = 0;
    std::atomic<int> most_given = 0;

   private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
      ++given;
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
      while (given < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      most_given = std::max(most_given.load(), given.load());
      return std::pmr::new_delete_resource()->allocate(bytes, alignment);
    }
    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
      --given;
      std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    }
    bool do_is_equal(const memory_resource& other) const noexcept override {
      return this == &other;
    }
  };
  slow_resource upstream;
  kvarn::memory_account account(&upstream, 100);
  for (int round = 0; round < 100; ++round) {
    void* got[2] = {};
    std::thread other([&] { got[1] = account.try_allocate(60, 8); });
    got[0] = account.try_allocate(60, 8);
    other.join();
    ASSERT_NE(got[0] == nullptr, got[1] == nullptr) << "round " << round;
    ASSERT_EQ(account.bytes(), 60u);
    account.deallocate(got[0] != nullptr ? got[0] : got[1], 60, 8);
  }
  EXPECT_EQ(upstream.most_given, 1);
}

TEST(CacheMemory, AFailedAllocationIsNotCounted) {
  kvarn::memory_account account(std::pmr::null_memory_resource(), 100);
  EXPECT_THROW((void)account.try_allocate(60, 8), std::bad_alloc);
  EXPECT_EQ(account.bytes(), 0u);
}

TEST(CacheMemory, BudgetsAndCapacities) {
  auto config = small_config();
  config.page_count = 0;
  config.page_memory = 1000000;
  test_cache<> c(config);
  const auto page = static_cast<std::int64_t>(kvarn::page_bytes(config));
  EXPECT_EQ(c.cache.capacity(), 1000000 / page * 64);
  EXPECT_LE(c.cache.memory().pages, 1000000u);
  EXPECT_GT(static_cast<std::int64_t>(c.cache.memory().pages), 1000000 - page);
  EXPECT_EQ(c.cache.sealed_token_bytes(), static_cast<double>(page) / 64);
  EXPECT_EQ(c.cache.exact_token_bytes(), 2u * 2 * 128 * 2);
  const auto id = c.create();
  c.append(id, seeds(0, 140));
  c.seal(id);
  EXPECT_EQ(c.cache.free_capacity(), c.cache.capacity() - 128);
}

TEST(CacheMemory, AFailedAllocationIsAnErrorAndChangesNothing) {
  kvarn_test::failing_resource memory;
  auto config = small_config();
  config.memory = &memory;
  config.method = kvarn::encoder::query_aware;
  int failures = 0;
  for (int allowed = 0;; ++allowed) {
    memory.left = allowed;
    const auto made = kvarn::kv_cache<>::make(config);
    if (made.ok()) break;
    ++failures;
    ASSERT_EQ(made.why().code(), error_code::out_of_memory);
  }
  EXPECT_GE(failures, 5);

  memory.left = 1 << 30;
  test_cache<> c(config);
  const auto id = c.create();
  c.append(id, seeds(0, 200));
  std::stringstream file;
  ASSERT_TRUE(kvarn::save_sequences(c.cache, std::span(&id, 1), file).ok());
  const auto queries = kvarn_test::token_tensor(seeds(7, 1), 0, 4, 3, 64);
  const auto keys = kvarn_test::token_tensor(seeds(0, 300), 0, 2, 0, 64);
  const auto view = kvarn::token_major(keys.data(), 2, 64);
  kvarn::sequence_id fork;
  const std::function<kvarn::status()> calls[] = {
      [&] { return c.cache.append(id, 0, view, view, 300); },
      [&] { return c.cache.observe(id, 0, kvarn::token_major(queries.data(), 4, 64), 1); },
      [&] { return c.cache.seal(id, 1, c.workspace).why(); },
      [&] {
        auto made = c.cache.fork(id);
        if (made.ok()) fork = made.value();
        return made.why();
      },
      [&] { return c.cache.append(fork, 0, view, view, 1); },
      [&] {
        file.clear();
        file.seekg(0);
        return kvarn::restore_sequences(c.cache, file).why();
      }};
  for (const auto& call : calls) {
    failures = 0;
    const auto before = c.bytes(id);
    const auto pages = c.cache.free_pages();
    const auto held = c.cache.memory().statistics;
    for (int allowed = 0;; ++allowed) {
      memory.left = allowed;
      const auto status = call();
      memory.left = 1 << 30;
      if (status.ok()) break;
      ++failures;
      ASSERT_EQ(status.code(), error_code::out_of_memory) << status.message();
      ASSERT_EQ(c.bytes(id), before);
      ASSERT_EQ(c.cache.free_pages(), pages);
      ASSERT_EQ(c.cache.memory().statistics, held);
    }
    EXPECT_GE(failures, 1) << &call - calls;
  }
}

// A page whose offset needs 33 bits and more, in a mapping that takes memory only where written.
TEST(CacheMemory, PagesBeyondFourGigabytes) {
  auto config = small_config();
  config.page_count = 600000;
  const std::size_t size = 600000 * kvarn::page_bytes(config);
  ASSERT_GT(size, std::size_t{5} << 30);
  void* const mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  config.pages = {static_cast<std::byte*>(mapping), size};
  {
    kvarn::memory_accounts accounts(std::pmr::get_default_resource(), 0);
    kvarn::page_table table(config, &accounts.tables);
    kvarn::host_storage<kvarn::float16> storage(config, accounts);
    const auto id = table.create().value();
    const auto keys = kvarn_test::token_tensor(seeds(0, 69), 1, 2, 0, 64);
    kvarn::replaced_values replaced;
    for (int layer = 0; layer < 2; ++layer)
      ASSERT_TRUE(storage.append(
          id, layer, table.extent(id, layer), kvarn::token_major(keys.data(), 2, 64),
          kvarn::token_major(keys.data(), 2, 64), 69, replaced, kvarn::default_target()));
    std::vector<float> workspace(storage.encode_workspace());
    std::vector<std::byte> first;
    const std::size_t bytes = storage.page_bytes(1);
    // Beyond 2^31 and 2^32 bytes within a layer, and the last one of all.
    for (const std::int64_t index :
         {std::int64_t{0}, (std::int64_t{1} << 31) / static_cast<std::int64_t>(bytes) + 1,
          std::int64_t{599999}}) {
      for (int layer = 0; layer < 2; ++layer)
        for (int head = 0; head < 2; ++head)
          storage.encode(id, layer, head, 0, static_cast<std::int32_t>(index),
                         kvarn::encoder::tuned, nullptr, workspace.data(), kvarn::default_target());
      const std::byte* const page = storage.page(1, static_cast<std::int32_t>(index));
      EXPECT_EQ(storage.layer_offset(1), 600000 * bytes);
      EXPECT_EQ(static_cast<std::size_t>(page - config.pages.data()),
                storage.layer_offset(1) + static_cast<std::size_t>(index) * bytes);
      if (first.empty()) first.assign(page, page + bytes);
      EXPECT_TRUE(std::equal(first.begin(), first.end(), page)) << index;

      kvarn::sealed_group group;
      const kvarn::sealed_page entry{5, static_cast<std::int32_t>(index), 64};
      kvarn::sequence_extent extent;
      extent.sink_count = 5;
      extent.tail_count = 64;
      EXPECT_EQ(storage.memory(id, 1, 1, extent, {&entry, 1}, &group).sealed[0].keys,
                page + storage.format(1).key_offset(1));
    }
  }
  munmap(mapping, size);
}

}  // namespace
