// The cache against the bare kernels it calls: append, seal and attend for batches of sequences,
// forks and truncations, saving and restoring.
//
// Beside each stands the work below it: rotating the same tokens, encoding the same tiles,
// attention_batch over the same memories, a copy of the same bytes. What is above is the
// bookkeeping.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <streambuf>
#include <string>
#include <utility>
#include <vector>

#include "kvarn/cache/cache_file.hpp"
#include "kvarn/kvarn.hpp"
#include "sets.hpp"
#include "support/data.hpp"
#include "support/report.hpp"

namespace kvarn_bench {
namespace {

constexpr int head_dim = 128;
constexpr int kv_heads = 2;
constexpr int shared = 4;  // query heads per KV head
constexpr int query_heads = kv_heads * shared;
constexpr int group = 128;
constexpr int tail = 40;  // exact tokens behind the sealed ones

// Memory of a stream, written and read in place: what a file on the fastest disk is.
class memory_stream final : public std::streambuf {
 public:
  explicit memory_stream(std::size_t size) : bytes_(size) { rewind(); }
  void rewind() {
    setp(bytes_.data(), bytes_.data() + bytes_.size());
    setg(bytes_.data(), bytes_.data(), bytes_.data() + bytes_.size());
  }

 protected:
  pos_type seekoff(off_type off, std::ios_base::seekdir from, std::ios_base::openmode) override {
    char* const base = from == std::ios_base::beg   ? eback()
                       : from == std::ios_base::cur ? gptr()
                                                    : egptr();
    setg(eback(), base + off, egptr());
    return gptr() - eback();
  }
  pos_type seekpos(pos_type at, std::ios_base::openmode which) override {
    return seekoff(at, std::ios_base::beg, which);
  }

 private:
  std::vector<char> bytes_;
};

// One layer with `sequences` sequences of `tokens` tokens, sealed as far as they can be, and `tail`
// more.
class filled_cache {
 public:
  filled_cache(int sequences, int tokens)
      : config_(make_config(sequences, tokens)),
        tokens_(to_half(random_tokens(64 * group, kv_heads * head_dim, 1))),
        cache_(kvarn::kv_cache<>::make(config_).value()) {
    for (int i = 0; i < sequences; ++i) ids_.push_back(fill(i, tokens));
  }

  kvarn::kv_cache<>& cache() { return cache_; }
  const std::vector<kvarn::sequence_id>& ids() const { return ids_; }
  const kvarn::cache_config& config() const { return config_; }
  kvarn::cache_workspace& workspace() { return workspace_; }

  // At least 32 groups of tokens, others for each i.
  kvarn::heads_view<const kvarn::float16> tokens(int i) const {
    return kvarn::token_major<const kvarn::float16>(
        tokens_.data() + std::ptrdiff_t{i % 32} * group * kv_heads * head_dim, kv_heads, head_dim);
  }
  void append(kvarn::sequence_id id, int i, int count) {
    cache_.append(id, 0, tokens(i), tokens(i + 1), count).or_throw();
    cache_.commit(id).or_throw();
  }

 private:
  static kvarn::cache_config make_config(int sequences, int tokens) {
    kvarn::cache_config config{.layers = 1, .kv_heads = kv_heads, .query_heads = query_heads};
    config.max_sequences = 2 * sequences + 2;
    config.page_count = std::int64_t{2} * (tokens / group + 2) * sequences;
    return config;
  }

  kvarn::sequence_id fill(int i, int tokens) {
    const kvarn::sequence_id id = cache_.create().value();
    for (int at = 0; at < tokens; at += 16 * group) {
      append(id, i + at / group, (std::min)(16 * group, tokens - at));
      (void)cache_.seal(id, 16, workspace_).value();
    }
    append(id, i, tail);
    return id;
  }

  kvarn::cache_config config_;
  std::vector<kvarn::float16> tokens_;
  kvarn::kv_cache<> cache_;
  kvarn::cache_workspace workspace_;
  std::vector<kvarn::sequence_id> ids_;
};

// Made once per shape: repetitions come in shuffled order.
filled_cache& filled(int sequences, int tokens) {
  static std::vector<std::pair<std::pair<int, int>, std::unique_ptr<filled_cache>>> all;
  for (auto& [shape, cache] : all)
    if (shape == std::pair(sequences, tokens)) return *cache;
  all.emplace_back(std::pair(sequences, tokens), std::make_unique<filled_cache>(sequences, tokens));
  return *all.back().second;
}

// ---- Attention of one query token of each sequence.

struct query_work {
  std::vector<float> vectors;
  std::vector<float> out;
  explicit query_work(int sequences)
      : vectors(random_queries(sequences * query_heads, head_dim, 3)), out(vectors.size()) {}
};

const kvarn::attention_options options{.softmax_scale = 0.08838835f};

void run_attend(benchmark::State& state, int sequences, int tokens) {
  filled_cache& f = filled(sequences, tokens);
  query_work work(sequences);
  std::vector<kvarn::cache_queries<float, float>> queries;
  for (int i = 0; i < sequences; ++i) {
    const std::ptrdiff_t at = std::ptrdiff_t{i} * query_heads * head_dim;
    queries.push_back(
        {kvarn::token_major<const float>(work.vectors.data() + at, query_heads, head_dim),
         kvarn::token_major(work.out.data() + at, query_heads, head_dim)});
  }
  for (auto _ : state) {
    for (std::size_t i = 0; i < queries.size(); ++i)
      f.cache().attend(f.ids()[i], 0, queries[i], options, f.workspace()).or_throw();
    benchmark::ClobberMemory();
  }
  set_counters(state, "sequence", sequences, 0);
}

void run_bare_attend(benchmark::State& state, int sequences, int tokens) {
  filled_cache& f = filled(sequences, tokens);
  query_work work(sequences);
  using task = kvarn::attention_task<float, kvarn::float16, float>;
  const kvarn::page_table& table = f.cache().table();
  const auto& storage = f.cache().storage();
  std::vector<std::vector<kvarn::sealed_group>> groups;
  std::vector<task> tasks;
  for (int i = 0; i < sequences; ++i) {
    const kvarn::sequence_id id = f.ids()[static_cast<std::size_t>(i)];
    const auto extent = table.extent(id, 0);
    for (int head = 0; head < kv_heads; ++head) {
      const std::ptrdiff_t at =
          (std::ptrdiff_t{i} * query_heads + std::ptrdiff_t{head} * shared) * head_dim;
      groups.emplace_back(table.pages(id).size());
      task t;
      t.queries = {{work.vectors.data() + at, head_dim}, 1, shared, extent.length - 1};
      t.memory = storage.memory(id, 0, head, extent, table.pages(id), groups.back().data());
      t.options = options;
      t.out = {work.out.data() + at, head_dim};
      tasks.push_back(t);
    }
  }
  std::vector<float> workspace(kvarn::attention_workspace(storage.format(0)));
  for (auto _ : state) {
    for (const task& t : tasks) kvarn::attend(t, workspace.data());
    benchmark::ClobberMemory();
  }
  set_counters(state, "sequence", sequences, 0);
}

// ---- Appending `count` tokens to each sequence, and taking them back.

void run_append(benchmark::State& state, int sequences, int tokens, int count) {
  filled_cache& f = filled(sequences, tokens);
  for (auto _ : state) {
    for (const kvarn::sequence_id id : f.ids()) {
      f.append(id, 0, count);
      f.cache().truncate(id, tokens + tail).or_throw();
    }
    benchmark::ClobberMemory();
  }
  set_counters(state, "sequence", sequences, 0);
}

void run_bare_append(benchmark::State& state, int sequences, int tokens, int count) {
  filled_cache& f = filled(sequences, tokens);
  // One place for each sequence and KV head, as the tails have.
  std::vector<kvarn::float16> rows(static_cast<std::size_t>(sequences) * 2 * kv_heads *
                                   static_cast<std::size_t>(count) * head_dim);
  for (auto _ : state) {
    kvarn::float16* row = rows.data();
    for (int i = 0; i < sequences; ++i)
      for (int head = 0; head < kv_heads; ++head)
        for (int kind = 0; kind < 2; ++kind, row += std::ptrdiff_t{count} * head_dim)
          benchmark::DoNotOptimize(kvarn::rotate_tokens(
              f.tokens(kind).head(head), kvarn::tokens_view<kvarn::float16>{row, head_dim}, count,
              head_dim));
    benchmark::ClobberMemory();
  }
  set_counters(state, "sequence", sequences, 0);
}

// ---- Sealing 16 groups of one sequence.

constexpr int sealed_groups = 16;

void run_seal(benchmark::State& state) {
  filled_cache& f = filled(1, sealed_groups * group);
  const kvarn::sequence_id full = f.cache().create().value();
  for (int g = 0; g <= sealed_groups; ++g) f.append(full, g, group);
  for (auto _ : state) {
    state.PauseTiming();
    const kvarn::sequence_id id = f.cache().fork(full).value();
    state.ResumeTiming();
    if (f.cache().seal(id, sealed_groups, f.workspace()).value() != sealed_groups)
      state.SkipWithError("not all could be sealed");
    state.PauseTiming();
    f.cache().free(id).or_throw();
    state.ResumeTiming();
  }
  f.cache().free(full).or_throw();
  set_counters(state, "page", sealed_groups, 0);
}

void run_bare_seal(benchmark::State& state) {
  filled_cache& f = filled(1, sealed_groups * group);
  const kvarn::sequence_id full = f.cache().create().value();
  for (int g = 0; g <= sealed_groups; ++g) f.append(full, g, group);
  const auto& storage = f.cache().storage();
  std::vector<float> workspace(storage.encode_workspace());
  for (auto _ : state) {
    // As seal in its timed part, the two pauses included.
    state.PauseTiming();
    state.ResumeTiming();
    const auto& tail = storage.rows(full, 0).tail;
    const kvarn::cache_format& format = storage.format(0);
    for (int head = 0; head < kv_heads; ++head)
      for (int g = 0; g < sealed_groups; ++g) {
        std::byte* const page = storage.page(0, g);
        const kvarn::encode_options as_stored{.rotate = false};
        kvarn::encode_tile(tail.keys(storage.shape(), head, g * group),
                           {page + format.key_offset(head), format.key_layout()}, as_stored,
                           workspace.data());
        kvarn::encode_tile(tail.values(storage.shape(), head, g * group),
                           {page + format.value_offset(head), format.value_layout()}, as_stored,
                           workspace.data());
      }
    state.PauseTiming();
    state.ResumeTiming();
  }
  f.cache().free(full).or_throw();
  set_counters(state, "page", sealed_groups, 0);
}

// ---- Forks, truncation, files.

void run_fork(benchmark::State& state, int tokens) {
  filled_cache& f = filled(1, tokens);
  for (auto _ : state) f.cache().free(f.cache().fork(f.ids()[0]).value()).or_throw();
  set_counters(state, "fork and free", 1, 0);
}

void run_truncate(benchmark::State& state, int tokens) {
  filled_cache& f = filled(1, tokens);
  for (auto _ : state) {
    const kvarn::sequence_id id = f.cache().fork(f.ids()[0]).value();
    f.cache().truncate(id, tokens / 2 + 3).or_throw();
    f.cache().free(id).or_throw();
  }
  set_counters(state, "fork, truncate, free", 1, 0);
}

std::size_t file_bytes(int sequences, int tokens) {
  filled_cache& f = filled(sequences, tokens);
  std::ostringstream file;
  kvarn::save_sequences(f.cache(), f.ids(), file).or_throw();
  return file.str().size();
}

void run_save(benchmark::State& state, int sequences, int tokens) {
  filled_cache& f = filled(sequences, tokens);
  const std::size_t bytes = file_bytes(sequences, tokens);
  memory_stream memory(bytes);
  std::ostream stream(&memory);
  for (auto _ : state) {
    memory.rewind();
    kvarn::save_sequences(f.cache(), f.ids(), stream).or_throw();
  }
  set_counters(state, "byte", static_cast<double>(bytes), static_cast<double>(bytes));
}

void run_restore(benchmark::State& state, int sequences, int tokens) {
  filled_cache& f = filled(sequences, tokens);
  const std::size_t bytes = file_bytes(sequences, tokens);
  memory_stream memory(bytes);
  std::ostream out(&memory);
  kvarn::save_sequences(f.cache(), f.ids(), out).or_throw();
  std::istream in(&memory);
  for (auto _ : state) {
    memory.rewind();
    const auto restored = kvarn::restore_sequences(f.cache(), in).value();
    for (const kvarn::sequence_id id : restored) f.cache().free(id).or_throw();
  }
  set_counters(state, "byte", static_cast<double>(bytes), static_cast<double>(bytes));
}

void run_copy(benchmark::State& state, std::size_t bytes) {
  const std::vector<char> from(bytes, 'k');
  std::vector<char> to(bytes);
  for (auto _ : state) {
    std::copy(from.begin(), from.end(), to.begin());
    benchmark::ClobberMemory();
  }
  set_counters(state, "byte", static_cast<double>(bytes), static_cast<double>(bytes));
}

std::string shape_name(int sequences, int tokens) {
  return "s" + std::to_string(sequences) + "/t" + std::to_string(tokens);
}

void add_shape(int sequences, int tokens) {
  const std::string shape = shape_name(sequences, tokens);
  const auto add = [&](const std::string& what, auto run, auto bare) {
    add_benchmark("bare/" + what + "/" + shape, {}, bare);
    add_benchmark("cache/" + what + "/" + shape, {"bare/" + what + "/" + shape, ""}, run);
  };
  add(
      "attend", [=](benchmark::State& s) { run_attend(s, sequences, tokens); },
      [=](benchmark::State& s) { run_bare_attend(s, sequences, tokens); });
  for (const int count : {1, 64})
    add(
        "append" + std::to_string(count),
        [=](benchmark::State& s) { run_append(s, sequences, tokens, count); },
        [=](benchmark::State& s) { run_bare_append(s, sequences, tokens, count); });
}

void add_files(int sequences, int tokens) {
  const std::string shape = shape_name(sequences, tokens);
  add_benchmark("bare/file/" + shape, {},
                [=](benchmark::State& s) { run_copy(s, file_bytes(sequences, tokens)); });
  for (const bool save : {true, false})
    add_benchmark(std::string("cache/") + (save ? "save/" : "restore/") + shape,
                  {"bare/file/" + shape, ""}, [=](benchmark::State& s) {
                    save ? run_save(s, sequences, tokens) : run_restore(s, sequences, tokens);
                  });
}

}  // namespace

void add_cache(benchmark_set set) {
  const bool full = set == benchmark_set::full;
  add_shape(1, 4096);
  add_shape(16, 4096);
  if (full) {
    for (const int tokens : {1024, 16384, 65536}) add_shape(1, tokens);
    for (const int sequences : {4, 64, 256}) add_shape(sequences, 1024);
    add_shape(16, 16384);
  }
  add_benchmark("bare/seal", {}, run_bare_seal);
  add_benchmark("cache/seal", {"bare/seal", ""}, run_seal);
  for (const int tokens : full ? std::vector{1024, 4096, 65536} : std::vector{4096}) {
    const std::string at = "t" + std::to_string(tokens);
    add_benchmark("cache/fork/" + at, {}, [=](benchmark::State& s) { run_fork(s, tokens); });
    add_benchmark("cache/truncate/" + at, {},
                  [=](benchmark::State& s) { run_truncate(s, tokens); });
  }
  add_files(1, 4096);
  if (full) add_files(16, 16384);
}

}  // namespace kvarn_bench
