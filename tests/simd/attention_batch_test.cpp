// Attention cut into items and run in any order, by any number of threads, on every target: the
// bits of one call of the scalar code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "kvarn/attention/attend.hpp"
#include "support/attention_scenes.hpp"
#include "support/targets.hpp"

namespace {

using kvarn::float16;
using kvarn::target;
using kvarn_test::canaries;
using kvarn_test::kPoison;
using kvarn_test::options_of;
using kvarn_test::outputs;
using kvarn_test::run;
using kvarn_test::same_bits;
using kvarn_test::scene;
using kvarn_test::shape;

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

  std::vector<outputs> results;
  std::vector<outputs> expected;
  std::vector<scene<float16>::task> tasks;
  for (std::size_t i = 0; i < scenes.size(); ++i) {
    const auto options = options_of(scenes[i], static_cast<int>(i));
    results.emplace_back(scenes[i].rows(), scenes[i].dims().format.value_head_dim);
    expected.push_back(run(scenes[i], options, target::scalar));
    tasks.push_back(scenes[i].make_task(options, nullptr, nullptr));
  }
  const kvarn::attention_batch<scene<float16>::task> batch(tasks);
  EXPECT_GT(batch.item_count(), tasks.size());
  std::vector<float> workspace(batch.workspace() + canaries);

  const auto check = [&](target on, const std::string& how, const auto& executor) {
    std::fill(workspace.begin(), workspace.end(), kPoison);
    std::fill_n(workspace.end() - canaries, canaries, -77.0f);
    for (std::size_t i = 0; i < scenes.size(); ++i) {
      results[i] = outputs(scenes[i].rows(), scenes[i].dims().format.value_head_dim);
      tasks[i].out.data = results[i].out.data();
      tasks[i].lse = results[i].lse.data();
    }
    batch.run(workspace.data(), executor, on);
    for (std::size_t i = 0; i < canaries; ++i)
      EXPECT_EQ(workspace[workspace.size() - 1 - i], -77.0f);
    for (std::size_t i = 0; i < scenes.size(); ++i) {
      results[i].check_canaries();
      EXPECT_TRUE(same_bits(results[i].out, expected[i].out) &&
                  same_bits(results[i].lse, expected[i].lse))
          << kvarn::name_of(on) << ", " << how << ": " << kvarn_test::describe(scenes[i].dims());
    }
  };
  std::vector<target> targets = kvarn_test::covered_targets();
  targets.push_back(target::scalar);
  for (const target on : targets) {
    check(on, "serial", kvarn::serial_executor{});
    check(on, "reversed", reversed_executor{});
    for (std::size_t threads = 1; threads <= 8; ++threads)
      check(on, std::to_string(threads) + " threads", thread_executor{threads});
  }
}

// Queries, outputs and sums of each query token with gaps between them, as where a task takes some
// of the query heads of [tokens][query_heads][head_dim].
TEST(AttentionBatch, QueryTokensMayStandApart) {
  shape s;
  s.format = {64, 80, 64, 2, 2, kvarn::scale_type::ue5m3};
  s.tokens = 7;
  s.heads = 3;
  scene<float16> together(s);
  const auto options = options_of(together, 8);
  const outputs expected = run(together, options, target::scalar);
  constexpr int query_gap = 2 * 64 + 1, out_gap = 80 + 5, lse_gap = 2;

  std::vector<float> queries;
  for (int t = 0; t < s.tokens; ++t) {
    const auto from = together.queries().begin() + t * s.heads * 64;
    queries.insert(queries.end(), from, from + s.heads * 64);
    queries.insert(queries.end(), query_gap, kPoison);
  }
  std::vector<float> out(static_cast<std::size_t>(s.tokens * (s.heads * 80 + out_gap)), -77.0f);
  std::vector<float> lse(static_cast<std::size_t>(s.tokens * (s.heads + lse_gap)), -77.0f);
  auto task = together.make_task(options, out.data(), lse.data());
  task.queries.vectors.data = queries.data();
  task.queries.token_gap = query_gap;
  task.out_token_gap = out_gap;
  task.lse_token_gap = lse_gap;
  std::vector<float> workspace(kvarn::attention_workspace(s.format));
  kvarn::attend(task, workspace.data());

  const auto same_with_gaps = [&](const std::vector<float>& got, const std::vector<float>& want,
                                  int size, int gap) {
    for (int t = 0; t < s.tokens; ++t)
      for (int i = 0; i < size + gap; ++i)
        if (got[static_cast<std::size_t>(t * (size + gap) + i)] !=
            (i < size ? want[static_cast<std::size_t>(t * size + i)] : -77.0f))
          return false;
    return true;
  };
  EXPECT_TRUE(same_with_gaps(out, expected.out, s.heads * 80, out_gap));
  EXPECT_TRUE(same_with_gaps(lse, expected.lse, s.heads, lse_gap));
}

}  // namespace
