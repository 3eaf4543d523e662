// The executors of examples/executors: every item runs once, what it throws arrives, and attention
// does not depend on who runs it.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../examples/executors/thread_pool.hpp"
#include "kvarn/kvarn.hpp"
#include "support/tiles.hpp"
#if defined(_OPENMP)
#include "../examples/executors/openmp_executor.hpp"
#endif

namespace {

TEST(thread_pool, runs_every_item_once) {
  for (const int threads : {1, 2, 3, 8}) {
    const kvarn_examples::thread_pool pool(threads);
    for (const std::size_t count : {0u, 1u, 2u, 7u, 1000u}) {
      std::vector<std::atomic<int>> runs(count);
      pool(count, [&](std::size_t i) { ++runs[i]; });
      for (std::size_t i = 0; i < count; ++i)
        ASSERT_EQ(runs[i], 1) << threads << " threads, item " << i << " of " << count;
    }
  }
}

// Short calls one after another: a worker that wakes late must not run items of an earlier call.
TEST(thread_pool, keeps_calls_apart) {
  constexpr int calls = 20000;
  const kvarn_examples::thread_pool pool(4);
  std::vector<std::atomic<int>> runs(calls);
  for (std::atomic<int>& own : runs) pool(3, [&own](std::size_t) { ++own; });
  for (int call = 0; call < calls; ++call)
    ASSERT_EQ(runs[static_cast<std::size_t>(call)], 3) << call;
}

TEST(thread_pool, shares_the_work) {
  const kvarn_examples::thread_pool pool(3);
  std::vector<std::thread::id> who(64);
  pool(who.size(), [&](std::size_t i) {
    who[i] = std::this_thread::get_id();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  EXPECT_EQ(std::set<std::thread::id>(who.begin(), who.end()).size(), 3u);
}

// The first by number, whichever thread threw first, and after the last item; the pool works on.
TEST(thread_pool, passes_on_the_exception_of_the_first_item_that_threw) {
  for (const int threads : {1, 2, 4}) {
    const kvarn_examples::thread_pool pool(threads);
    for (int call = 0; call < 200; ++call) {
      std::atomic<int> runs = 0;
      try {
        pool(50, [&](std::size_t i) {
          ++runs;
          if (i % 10 == 7) throw std::runtime_error(std::to_string(i));
        });
        FAIL() << threads << " threads: nothing was thrown";
      } catch (const std::runtime_error& error) {
        ASSERT_STREQ(error.what(), "7");
      }
      ASSERT_EQ(runs, 50);
      pool(3, [&](std::size_t) { ++runs; });
      ASSERT_EQ(runs, 53);
    }
  }
}

// Calls of several threads come one after the other: no item of one while another is under way.
TEST(thread_pool, may_be_shared_by_threads) {
  constexpr int callers = 3, calls = 200;
  const kvarn_examples::thread_pool pool(2);
  std::atomic<int> under_way = -1, disturbed = 0, runs = 0;
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller)
    threads.emplace_back([&, caller] {
      for (int call = 0; call < calls; ++call)
        pool(5, [&](std::size_t) {
          under_way = caller;
          std::this_thread::yield();
          if (under_way != caller) ++disturbed;
          ++runs;
        });
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(runs, callers * calls * 5);
  EXPECT_EQ(disturbed, 0);
}

TEST(thread_pool, refuses_a_call_by_its_own_item) {
  for (const int threads : {1, 3}) {
    const kvarn_examples::thread_pool pool(threads);
    const kvarn_examples::thread_pool other(2);
    std::atomic<int> runs = 0;
    EXPECT_THROW(pool(4, [&](std::size_t) { pool(1, [&](std::size_t) { ++runs; }); }),
                 std::logic_error);
    EXPECT_EQ(runs, 0);
    pool(4, [&](std::size_t) { other(2, [&](std::size_t) { ++runs; }); });
    EXPECT_EQ(runs, 8);
  }
}

// Pools that call one another in a circle, on whichever threads their items run.
TEST(thread_pool, refuses_a_call_that_would_wait_for_itself) {
  for (const int threads : {1, 3}) {
    const kvarn_examples::thread_pool a(threads), b(threads), c(threads);
    std::atomic<int> runs = 0, refused = 0;
    const auto call_a = [&](std::size_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that all threads take some
      try {
        a(1, [&](std::size_t) { ++runs; });
      } catch (const std::logic_error&) {
        ++refused;
      }
    };
    a(3, [&](std::size_t) { b(3, [&](std::size_t) { c(3, call_a); }); });
    EXPECT_EQ(refused, 27);
    EXPECT_EQ(runs, 0);
    a(3, [&](std::size_t) { ++runs; });  // works on
    EXPECT_EQ(runs, 3);
  }
}

// Two KV heads: one step of three queries, cut along chunks, and a prefill of many, cut along rows.
class attention_executors : public testing::Test {
 protected:
  using task = kvarn::attention_task<float, float, float>;
  static constexpr int dim = 64, groups = 20, tail = 30, heads = 3, prefill = 25;

  attention_executors() {
    auto encode_keys = kvarn::tile_encoder::make(format_.key_layout()).value();
    auto encode_values = kvarn::tile_encoder::make(format_.value_layout()).value();
    for (int g = 0; g < groups; ++g) {
      std::byte* const keys = pages_.data() + static_cast<std::size_t>(g) * format_.page_bytes(1);
      std::byte* const values = keys + format_.value_offset(0);
      encode_keys(kvarn_test::view(std::as_const(numbers_), dim).from(g), keys);
      encode_values(kvarn_test::view(std::as_const(numbers_), dim).from(g + 1), values);
      sealed_.push_back({keys, values, std::int64_t{g} * format_.group, format_.group});
    }
  }

  template <class Executor>
  std::vector<float> attend(const Executor& executor) const {
    const std::int64_t end = std::int64_t{groups} * format_.group;
    const auto view = kvarn_test::view(numbers_, dim);
    std::vector<float> out(static_cast<std::size_t>(heads * (1 + prefill) * dim));
    task step;
    step.memory = {format_, {}, sealed_, {view, view.from(1), end, tail}};
    step.queries = {view.from(2), 1, heads, end + tail - 1};
    step.options.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dim));
    step.out = {out.data(), dim};
    task many = step;
    many.queries = {view.from(3), prefill, heads, end + tail - prefill};
    many.out = step.out.from(heads);
    const std::vector<task> tasks{step, many};
    const kvarn::attention_batch<task> batch(tasks);
    EXPECT_GT(batch.item_count(), 6u);
    std::vector<float> workspace(batch.workspace());
    batch.run(workspace.data(), executor);
    return out;
  }

 private:
  kvarn::cache_format format_{.key_head_dim = dim, .value_head_dim = dim};
  std::vector<float> numbers_ = kvarn_test::random_tokens(200, dim, 1);
  std::vector<std::byte> pages_ = std::vector<std::byte>(groups * format_.page_bytes(1));
  std::vector<kvarn::sealed_group> sealed_;
};

TEST_F(attention_executors, give_the_same_bits) {
  const std::vector<float> expected = attend(kvarn::serial_executor{});
  for (const float x : expected) ASSERT_TRUE(std::isfinite(x) && x != 0.0f);
  for (int threads = 1; threads <= 8; ++threads) {
    EXPECT_EQ(attend(kvarn_examples::thread_pool(threads)), expected) << threads << " threads";
#if defined(_OPENMP)
    EXPECT_EQ(attend(kvarn_examples::openmp_executor{threads}), expected) << threads << " (OpenMP)";
#endif
  }
}

}  // namespace
