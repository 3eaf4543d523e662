// Attention over packed tokens on every target, and beside it what it is compared with: the plain
// read of the same bytes, attention over binary16, over 8 bits, and with Eigen's matrix products.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../examples/executors/thread_pool.hpp"
#include "baselines/dense.hpp"
#include "baselines/eigen.hpp"
#include "kvarn/kvarn.hpp"
#include "sets.hpp"
#include "support/attention_case.hpp"
#include "support/cold_memory.hpp"
#include "support/data.hpp"
#include "support/library.hpp"
#include "support/report.hpp"

namespace kvarn_bench {
namespace {

constexpr int most_kv_heads = 8;
constexpr const char* per_token = "token and KV head";

// Runs with one thread or several; a pool lives as long as the program.
template <class F>
void share(int threads, std::size_t count, const F& f) {
  static const kvarn_examples::thread_pool two(2);
  if (threads == 2)
    two(count, f);
  else
    kvarn::serial_executor{}(count, f);
}

// ---- What the memories consist of. A pattern is the least that can be repeated.

constexpr int pattern_tokens = 2048;

arena& packed_arena(const attention_case& c) {
  const kvarn::cache_format format = c.format();
  return arenas().get("packed " + std::to_string(format.id()),
                      [&] { return encoded_groups(format, pattern_tokens / format.group); });
}

arena& half_arena(int head_dim) {
  return arenas().get("half " + std::to_string(head_dim), [=] {
    return to_bytes(to_half(random_tokens(pattern_tokens, head_dim, 1)));
  });
}

arena& float_arena(int head_dim) {
  return arenas().get("float " + std::to_string(head_dim),
                      [=] { return to_bytes(random_tokens(pattern_tokens, head_dim, 1)); });
}

arena& byte_arena(int head_dim) {
  return arenas().get("byte " + std::to_string(head_dim), [=] {
    const std::vector<float> tokens = random_tokens(pattern_tokens, head_dim, 1);
    const auto tile = static_cast<std::size_t>(byte_memory{{}, {}, 0, head_dim}.tile_bytes());
    std::vector<std::byte> tiles(pattern_tokens / 16 * tile);
    for (std::size_t t = 0; t < pattern_tokens / 16; ++t)
      quantize_bytes(tokens.data() + t * 16 * static_cast<std::size_t>(head_dim), head_dim,
                     tiles.data() + t * tile);
    return tiles;
  });
}

// The memory of one KV head after another: another copy each time, or always the first.
class head_rotation {
 public:
  head_rotation(arena& memory, std::size_t head_bytes, bool cold)
      : memory_(memory), head_bytes_(head_bytes), cold_(cold) {}

  std::size_t next() {
    if (cold_) return memory_.next_piece(head_bytes_);
    warm_ = (warm_ + 1) % most_kv_heads;
    return warm_;
  }
  // The same for callers that use one head at a time.
  std::size_t next_single() { return cold_ ? memory_.next_piece(head_bytes_) : 0; }
  const std::byte* at(std::size_t piece) const { return memory_.data() + piece * head_bytes_; }
  std::size_t pieces() const { return memory_.pieces(head_bytes_); }

 private:
  arena& memory_;
  std::size_t head_bytes_;
  bool cold_;
  std::size_t warm_ = 0;
};

// ---- kvarn.

using packed_task = kvarn::attention_task<float, kvarn::float16, float>;

void run_packed(benchmark::State& state, kvarn::target on, const attention_case& c) {
  const kvarn::cache_format format = c.format();
  const int groups = c.tokens / format.group;
  const std::size_t head_bytes = static_cast<std::size_t>(groups) * format.head_bytes();
  head_rotation heads(packed_arena(c), head_bytes, c.cold);

  constexpr int sink = 128;
  constexpr int tail = 64;
  const std::int64_t first = c.exact_ends ? sink : 0;
  const std::int64_t end = first + c.tokens;
  std::vector<kvarn::sealed_group> sealed;
  for (std::size_t piece = 0; piece < heads.pieces(); ++piece)
    for (int g = 0; g < groups; ++g) {
      const std::byte* const keys =
          heads.at(piece) + static_cast<std::size_t>(g) * format.head_bytes();
      sealed.push_back({keys, keys + format.value_offset(0), first + std::int64_t{g} * format.group,
                        format.group});
    }
  const auto exact = to_half(random_tokens(sink + tail, c.head_dim, 2));
  const std::vector<float> queries = random_queries(most_kv_heads * c.rows(), c.head_dim, 3);
  std::vector<float> out(queries.size());

  const auto make_task = [&](int kv_head) {
    const std::ptrdiff_t offset = std::ptrdiff_t{kv_head} * c.rows() * c.head_dim;
    packed_task task;
    task.memory.format = format;
    if (c.exact_ends) {
      const kvarn::tokens_view<const kvarn::float16> ends{exact.data(), c.head_dim};
      task.memory.sink = {ends, ends, 0, sink};
      task.memory.tail = {ends.from(sink), ends.from(sink), end, tail};
    }
    // Of several query tokens all see all packed tokens, and of the tail those before them.
    const std::int64_t last = end + (c.exact_ends ? tail : c.query_tokens);
    task.queries = {
        {queries.data() + offset, c.head_dim}, c.query_tokens, c.heads, last - c.query_tokens};
    task.options.softmax_scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    task.options.precision = c.precision;
    task.out = {out.data() + offset, c.head_dim};
    return task;
  };
  const auto set_head = [&](packed_task& task, std::size_t piece) {
    task.memory.sealed = {sealed.data() + piece * static_cast<std::size_t>(groups),
                          static_cast<std::size_t>(groups)};
  };

  if (c.threads == 0) {
    packed_task task = make_task(0);
    std::vector<float> workspace(kvarn::attention_workspace(format));
    for (auto _ : state) {
      set_head(task, heads.next_single());
      kvarn::attend(task, workspace.data(), on);
      benchmark::ClobberMemory();
    }
  } else {
    std::vector<packed_task> tasks;
    for (int h = 0; h < c.kv_heads(); ++h) {
      tasks.push_back(make_task(h));
      set_head(tasks.back(), 0);
    }
    std::vector<float> workspace(kvarn::attention_batch<packed_task>(tasks).workspace());
    for (auto _ : state) {
      for (packed_task& task : tasks) set_head(task, heads.next());
      // An engine plans once per step: this belongs to the time.
      const kvarn::attention_batch<packed_task> batch(tasks);
      batch.run(
          workspace.data(), [&](std::size_t count, const auto& f) { share(c.threads, count, f); },
          on);
      benchmark::ClobberMemory();
    }
  }
  set_counters(state, per_token, static_cast<double>(c.kv_heads()) * c.tokens,
               static_cast<double>(c.kv_heads()) * static_cast<double>(head_bytes));
}

// ---- What it is compared with. `attend(head, kv_head)` attends to one KV head.

template <class F>
void run_dense(benchmark::State& state, const attention_case& c, arena& memory,
               std::size_t head_bytes, const F& attend) {
  head_rotation heads(memory, head_bytes, c.cold);
  const std::byte* head[most_kv_heads];
  for (auto _ : state) {
    if (c.threads == 0) {
      attend(heads.at(heads.next_single()), 0);
    } else {
      for (int h = 0; h < c.kv_heads(); ++h) head[h] = heads.at(heads.next());
      share(c.threads, static_cast<std::size_t>(c.kv_heads()),
            [&](std::size_t h) { attend(head[h], h); });
    }
    benchmark::ClobberMemory();
  }
  set_counters(state, per_token, static_cast<double>(c.kv_heads()) * c.tokens,
               static_cast<double>(c.kv_heads()) * static_cast<double>(head_bytes));
}

// Queries, outputs and states for run_dense.
struct dense_work {
  std::vector<float> vectors;
  std::vector<float> out;
  std::vector<std::unique_ptr<attention_state>> states;
  attention_case c;

  explicit dense_work(const attention_case& wanted)
      : vectors(random_queries(most_kv_heads * wanted.rows(), wanted.head_dim, 3)),
        out(vectors.size()),
        c(wanted) {
    for (int h = 0; h < most_kv_heads; ++h)
      states.push_back(std::make_unique<attention_state>(c.rows(), c.head_dim));
  }
  dense_queries queries(std::size_t kv_head) {
    const std::size_t offset =
        kv_head * static_cast<std::size_t>(c.rows()) * static_cast<std::size_t>(c.head_dim);
    return {vectors.data() + offset, c.rows(), 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
            out.data() + offset};
  }
};

// Keys and values of c.tokens tokens; a number may take a part of a bit on average.
std::size_t dense_bytes(const attention_case& c, double element_bits) {
  return static_cast<std::size_t>(2 * element_bits / 8 * c.tokens * c.head_dim);
}
constexpr double byte_element_bits = 8 + 16.0 / byte_block;

void run_half(benchmark::State& state, const dense_kernels& kernels, const attention_case& c) {
  dense_work work(c);
  const std::size_t bytes = dense_bytes(c, 16);
  run_dense(state, c, half_arena(c.head_dim), bytes, [&](const std::byte* head, std::size_t h) {
    const auto* const keys = reinterpret_cast<const kvarn::float16*>(head);
    const half_memory memory{keys, keys + std::ptrdiff_t{c.tokens} * c.head_dim, c.tokens,
                             c.head_dim};
    kernels.attend_half(memory, work.queries(h), *work.states[h]);
  });
}

void run_bytes(benchmark::State& state, const dense_kernels& kernels, const attention_case& c) {
  dense_work work(c);
  const std::size_t bytes = dense_bytes(c, byte_element_bits);
  const std::size_t half = bytes / 2;
  run_dense(state, c, byte_arena(c.head_dim), bytes, [&](const std::byte* head, std::size_t h) {
    const byte_memory own{head, head + half, c.tokens, c.head_dim};
    kernels.attend_bytes(own, work.queries(h), *work.states[h]);
  });
}

void run_eigen(benchmark::State& state, const attention_case& c) {
  dense_work work(c);
  run_dense(state, c, float_arena(c.head_dim), dense_bytes(c, 32),
            [&](const std::byte* head, std::size_t h) {
              const auto* const keys = reinterpret_cast<const float*>(head);
              const dense_queries queries = work.queries(h);
              eigen_attend(keys, keys + std::ptrdiff_t{c.tokens} * c.head_dim, c.tokens, c.head_dim,
                           queries.vectors, queries.rows, queries.softmax_scale, queries.out);
            });
}

void run_floor(benchmark::State& state, const dense_kernels& kernels, const attention_case& c,
               arena& memory, std::size_t head_bytes) {
  run_dense(state, c, memory, head_bytes, [&](const std::byte* head, std::size_t) {
    benchmark::DoNotOptimize(kernels.stream_read(head, static_cast<std::ptrdiff_t>(head_bytes)));
  });
}

// ---- Names.

std::string floor_name(const std::string& memory) { return "floor/" + memory; }
std::string half_name(const attention_case& c) { return "attention/fp16/" + c.name("k16v16"); }

void add_half(const attention_case& c) {
  const dense_kernels* const kernels = best_dense_kernels();
  if (kernels == nullptr) return;
  const std::string floor = floor_name(c.memory_name("k16v16"));
  add_benchmark(
      half_name(c), {floor, ""}, [=](benchmark::State& s) { run_half(s, *kernels, c); },
      c.threads > 0);
  add_benchmark(
      floor, {},
      [=](benchmark::State& s) {
        run_floor(s, *kernels, c, half_arena(c.head_dim), dense_bytes(c, 16));
      },
      c.threads > 0);
}

void add_packed(kvarn::target on, const attention_case& c) {
  add_half(c);
  references names;
  if (const dense_kernels* const kernels = best_dense_kernels()) {
    names = {floor_name(c.memory_name()), half_name(c)};
    add_benchmark(
        names.floor, {},
        [=](benchmark::State& s) {
          run_floor(
              s, *kernels, c, packed_arena(c),
              static_cast<std::size_t>(c.tokens / c.format().group) * c.format().head_bytes());
        },
        c.threads > 0);
  }
  add_benchmark(
      "attention/" + std::string(kvarn::name_of(on)) + "/" + c.name(), names,
      [=](benchmark::State& s) { run_packed(s, on, c); }, c.threads > 0);
}

// Registers a baseline and the read of its bytes. `run(state)` is the baseline, `memory()` what it
// reads, `element_bits` of it per number.
template <class Run, class Memory>
void add_other(const std::string& kind, const std::string& bits, double element_bits,
               const attention_case& c, Run run, Memory memory) {
  const std::string floor = floor_name(c.memory_name(bits));
  if (const dense_kernels* const kernels = best_dense_kernels())
    add_benchmark(floor, {}, [=](benchmark::State& s) {
      run_floor(s, *kernels, c, memory(), dense_bytes(c, element_bits));
    });
  add_benchmark("attention/" + kind + "/" + c.name(bits), {floor, half_name(c)}, run);
}

void add_others(const attention_case& c) {
  for (const kvarn::target_info& info : kvarn::target_infos) {
    const dense_kernels* const kernels = has_kernels(info.id) ? dense_kernels_of(info.id) : nullptr;
    if (kernels == nullptr) continue;
    // Of the instruction sets whose FP16 attention is not the one that ratios refer to.
    if (kernels != best_dense_kernels())
      add_other(
          "fp16_" + std::string(kernels->name), "k16v16", 16, c,
          [=](benchmark::State& s) { run_half(s, *kernels, c); },
          [=]() -> arena& { return half_arena(c.head_dim); });
    if (kernels->attend_bytes != nullptr)
      add_other(
          "q8_0", "k8v8", byte_element_bits, c,
          [=](benchmark::State& s) { run_bytes(s, *kernels, c); },
          [=]() -> arena& { return byte_arena(c.head_dim); });
  }
  if (eigen_is_available())
    add_other(
        "eigen", "k32v32", 32, c, [=](benchmark::State& s) { run_eigen(s, c); },
        [=]() -> arena& { return float_arena(c.head_dim); });
}

// The cases of one target: one at a time departs from the first.
std::vector<attention_case> cases_of(kvarn::target on, benchmark_set set) {
  const bool full = set == benchmark_set::full;
  // The definition takes microseconds a token: its time is shown, not swept.
  if (on == kvarn::target::scalar) return {{.tokens = 1024, .cold = false}};
  constexpr auto int8 = kvarn::operand_precision::int8;
  std::vector<attention_case> cases{{},
                                    {.precision = int8},
                                    {.cold = false},
                                    {.tokens = 1024},
                                    {.heads = 1},
                                    {.heads = 2},
                                    {.heads = 8},
                                    {.query_tokens = 8},
                                    {.head_dim = 64},
                                    {.threads = 1},
                                    {.threads = 2}};
  if (!full) return cases;
  for (const int head_dim : {64, 128, 256})
    for (const int tokens : {1024, 16384, 65536})
      for (const bool cold : {true, false})
        cases.push_back({.head_dim = head_dim, .tokens = tokens, .cold = cold});
  for (const int heads : {3, 6}) cases.push_back({.heads = heads});
  for (const int heads : {1, 2, 8}) cases.push_back({.heads = heads, .precision = int8});
  for (const int key_bits : {2, 3, 4})
    for (const int value_bits : {2, 3, 4})
      cases.push_back({.key_bits = key_bits, .value_bits = value_bits});
  for (const int tokens : {1024, 65536})
    for (const int threads : {1, 2}) cases.push_back({.tokens = tokens, .threads = threads});
  cases.push_back({.cold = false, .precision = int8});
  cases.push_back({.query_tokens = 8, .precision = int8});
  cases.push_back({.heads = 1, .query_tokens = 8});
  cases.push_back({.exact_ends = true});
  return cases;
}

}  // namespace

void add_attention(benchmark_set set) {
  for (const kvarn::target on : targets())
    for (const attention_case& c : cases_of(on, set)) add_packed(on, c);
  add_others({});
  if (set == benchmark_set::full) {
    for (const int tokens : {1024, 65536}) add_others({.tokens = tokens});
    for (const int heads : {1, 8}) add_others({.heads = heads});
    add_others({.cold = false});
  }
}

}  // namespace kvarn_bench
