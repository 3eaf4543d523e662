// Many tasks cut into items: whoever runs them, in whatever order, the bits are those of attend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "attention/scene.hpp"

namespace {

using namespace kvarn_test;

constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr kvarn::cache_format format{.key_head_dim = 64, .value_head_dim = 80};
using task = kvarn::attention_task<float, float, float>;

// One KV head with its queries and outputs.
struct work {
  work(const scene_shape& shape, const query_shape& query, std::uint64_t seed)
      : memory(shape, seed),
        queries(query.tokens * query.heads, 64),
        out(query.tokens * query.heads, 80),
        lse(static_cast<std::size_t>(query.tokens * query.heads), nan) {
    const auto q = random_queries(query.tokens * query.heads, 64, seed);
    for (int i = 0; i < q.rows(); ++i)
      for (int d = 0; d < 64; ++d) queries.at(i, d) = static_cast<float>(q(i, d));
    item.queries = {std::as_const(queries).view(), query.tokens, query.heads, query.position};
    item.memory = memory.memory(groups);
    item.options = options_for(format);
    item.out = out.view();
    item.lse = lse.data();
  }

  scene<float> memory;
  std::vector<kvarn::sealed_group> groups;
  strided_tokens<float> queries, out;
  std::vector<float> lse;
  task item;
};

// Few rows and many, long and short memories, one without any token, one without lse.
std::vector<std::unique_ptr<work>> make_work() {
  std::vector<std::unique_ptr<work>> all;
  const auto add = [&](const scene_shape& shape, const query_shape& query) {
    all.push_back(std::make_unique<work>(shape, query, all.size()));
  };
  add({format, 30, std::vector<int>(19, 128), 50}, {1, 4, 30 + 19 * 128 + 49});
  add({format, 30, std::vector<int>(9, 128), 50}, {8, 4, 30 + 9 * 128 + 42});
  add({format, 0, {}, 0}, {1, 4, 0});
  add({format, 10, {}, 0}, {1, 1, 9});
  add({format, 0, {128}, 0}, {4, 4, 124});
  add({format, 0, {40, 128}, 7}, {3, 5, 172});
  add({format, 0, {}, 300}, {17, 1, 283});
  all[5]->item.lse = nullptr;
  return all;
}

template <class Executor>
void expect_bits_of_attend(const Executor& executor) {
  const auto one_by_one = make_work();
  const auto together = make_work();
  std::vector<float> workspace(kvarn::attention_workspace(format), nan);
  for (const auto& w : one_by_one) kvarn::attend(w->item, workspace.data(), kvarn::target::scalar);

  std::vector<task> tasks;
  for (const auto& w : together) tasks.push_back(w->item);
  const kvarn::attention_batch<task> batch{std::span<const task>(tasks)};
  EXPECT_GT(batch.item_count(), tasks.size());
  constexpr float canary = 4711.0f;
  std::vector<float> shared(batch.workspace() + 1, nan);
  shared.back() = canary;
  for (int run = 0; run < 2; ++run) {  // the second in the workspace that the first has left
    batch.run(shared.data(), executor, kvarn::target::scalar);
    EXPECT_EQ(shared.back(), canary);
    for (std::size_t i = 0; i < together.size(); ++i) {
      const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
      };
      EXPECT_TRUE(same(together[i]->out.all(), one_by_one[i]->out.all())) << "task " << i;
      EXPECT_TRUE(same(together[i]->lse, one_by_one[i]->lse)) << "task " << i;
    }
  }
}

TEST(AttentionBatch, Serial) { expect_bits_of_attend(kvarn::serial_executor{}); }

TEST(AttentionBatch, AnyOrder) {
  std::mt19937 engine(1);
  for (int round = 0; round < 4; ++round)
    expect_bits_of_attend([&](std::size_t count, const auto& f) {
      std::vector<std::size_t> order(count);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::shuffle(order.begin(), order.end(), engine);
      for (const std::size_t i : order) f(i);
    });
}

TEST(AttentionBatch, Threads) {
  expect_bits_of_attend([](std::size_t count, const auto& f) {
    std::vector<std::thread> threads;
    for (std::size_t first = 0; first < 3; ++first)
      threads.emplace_back([first, count, &f] {
        for (std::size_t i = first; i < count; i += 3) f(i);
      });
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(AttentionBatch, NoTasks) {
  const kvarn::attention_batch<task> batch{std::span<const task>()};
  EXPECT_EQ(batch.item_count(), 0u);
  EXPECT_EQ(batch.workspace(), 0u);
  batch.run(nullptr, kvarn::serial_executor{}, kvarn::target::scalar);
}

}  // namespace
