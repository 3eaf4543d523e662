// Attention of a small model's layer on several threads: the outputs do not depend on who runs the
// items, and this program says so or fails.
#include <kvarn/kvarn.hpp>

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "thread_pool.hpp"
#if defined(_OPENMP)
#include "openmp_executor.hpp"
#endif

namespace {

constexpr int head_dim = 64;
constexpr int kv_heads = 4;
constexpr int query_heads = 3;  // per KV head
constexpr int groups = 24;
constexpr int tail = 50;

std::vector<float> normal_numbers(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<std::size_t>(count));
  for (float& x : numbers) x = normal(random);
  return numbers;
}

using task = kvarn::attention_task<float, float, float>;

// What the KV heads of one layer have stored, and the queries of one step.
struct layer {
  kvarn::cache_format format{.key_head_dim = head_dim, .value_head_dim = head_dim};
  std::vector<std::byte> pages = std::vector<std::byte>(groups * format.page_bytes(kv_heads));
  std::vector<kvarn::sealed_group> sealed[kv_heads];
  std::vector<float> tail_keys = normal_numbers(kv_heads * tail * head_dim, 1);
  std::vector<float> tail_values = normal_numbers(kv_heads * tail * head_dim, 2);
  std::vector<float> queries = normal_numbers(kv_heads * query_heads * head_dim, 3);

  layer() {
    auto encode_keys = kvarn::tile_encoder::make(format.key_layout()).value();
    auto encode_values = kvarn::tile_encoder::make(format.value_layout()).value();
    for (int g = 0; g < groups; ++g)
      for (int head = 0; head < kv_heads; ++head) {
        std::byte* const page =
            pages.data() + static_cast<std::size_t>(g) * format.page_bytes(kv_heads);
        std::byte* const keys = page + format.key_offset(head);
        std::byte* const values = page + format.value_offset(head);
        const auto seed = static_cast<unsigned>(10 + 2 * (kv_heads * g + head));
        const std::vector<float> k = normal_numbers(format.group * head_dim, seed);
        const std::vector<float> v = normal_numbers(format.group * head_dim, seed + 1);
        encode_keys(kvarn::tokens_view<const float>{k.data(), head_dim}, keys);
        encode_values(kvarn::tokens_view<const float>{v.data(), head_dim}, values);
        sealed[head].push_back({keys, values, std::int64_t{g} * format.group, format.group});
      }
  }

  std::vector<task> tasks(std::vector<float>& out) const {
    const std::int64_t position = std::int64_t{groups} * format.group;
    std::vector<task> all;
    for (int head = 0; head < kv_heads; ++head) {
      const std::ptrdiff_t first = std::ptrdiff_t{head} * tail * head_dim;
      const std::ptrdiff_t query = std::ptrdiff_t{head} * query_heads * head_dim;
      task t;
      t.memory.format = format;
      t.memory.sealed = sealed[head];
      t.memory.tail = {{tail_keys.data() + first, head_dim},
                       {tail_values.data() + first, head_dim},
                       position,
                       tail};
      t.queries = {{queries.data() + query, head_dim}, 1, query_heads, position + tail - 1};
      t.options.softmax_scale = 0.125f;  // 1/sqrt(head_dim)
      t.out = {out.data() + query, head_dim};
      all.push_back(t);
    }
    return all;
  }
};

template <class Executor>
std::vector<float> attend(const layer& memory, const Executor& executor) {
  std::vector<float> out(kv_heads * query_heads * head_dim);
  const std::vector<task> tasks = memory.tasks(out);
  const kvarn::attention_batch<task> batch(tasks);
  std::vector<float> workspace(batch.workspace());
  batch.run(workspace.data(), executor);
  return out;
}

}  // namespace

int main() {
  const layer memory;
  const std::vector<float> expected = attend(memory, kvarn::serial_executor{});
  int different = 0;
  const auto compare = [&](const char* name, int threads, const std::vector<float>& out) {
    const bool same = std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0;
    std::printf("%s, %d threads: %s\n", name, threads, same ? "the same bits" : "DIFFERENT");
    if (!same) ++different;
  };
  for (const int threads : {1, 2, 3, 8}) {
    const kvarn_examples::thread_pool pool(threads);
    compare("std::thread", threads, attend(memory, pool));
#if defined(_OPENMP)
    compare("OpenMP", threads, attend(memory, kvarn_examples::openmp_executor{threads}));
#endif
  }
  return different == 0 ? 0 : 1;
}
