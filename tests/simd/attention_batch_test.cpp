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

}  // namespace
