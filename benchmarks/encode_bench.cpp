// Encoding: the normalisation alone, whole tiles from binary16 tokens with every encoder, rotation
// included, and the factor that error feedback needs.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <string>
#include <vector>

#include "baselines/dense.hpp"
#include "baselines/eigen.hpp"
#include "kvarn/kvarn.hpp"
#include "sets.hpp"
#include "support/data.hpp"
#include "support/library.hpp"
#include "support/report.hpp"

namespace kvarn_bench {
namespace {

// Tiles that take turns: more than the L1 cache holds, so that a tile comes from the L2 as it does
// when an engine seals it.
constexpr int tiles_in_turn = 16;

std::vector<kvarn::float16> tokens_in_turn(int head_dim, int group) {
  return to_half(random_tokens(tiles_in_turn * group, head_dim, 1));
}

class turns {
 public:
  std::size_t next() { return turn_ = (turn_ + 1) % tiles_in_turn; }

 private:
  std::size_t turn_ = 0;
};

void run_encode(benchmark::State& state, kvarn::target on, const kvarn::tile_layout& layout,
                kvarn::encoder method) {
  const auto tokens = tokens_in_turn(layout.head_dim, layout.group);
  const kvarn::query_factor factor(random_moment(layout.head_dim));
  const kvarn::encode_options options{.method = method, .factor = &factor};
  std::vector<float> workspace(kvarn::encode_workspace(layout));
  std::vector<std::byte> record(layout.record_bytes());
  const std::size_t numbers = tokens.size() / tiles_in_turn;
  turns turn;
  for (auto _ : state) {
    kvarn::encode_tile(
        kvarn::tokens_view<const kvarn::float16>{tokens.data() + turn.next() * numbers,
                                                 layout.head_dim},
        kvarn::tile_view{record.data(), layout}, options, workspace.data(), on);
    benchmark::ClobberMemory();
  }
  set_counters(state, "tile", 1, static_cast<double>(numbers * sizeof(kvarn::float16)));
}

void run_floor(benchmark::State& state, const dense_kernels& kernels, int head_dim, int group) {
  const auto tokens = to_bytes(tokens_in_turn(head_dim, group));
  const std::size_t bytes = tokens.size() / tiles_in_turn;
  turns turn;
  for (auto _ : state)
    benchmark::DoNotOptimize(kernels.stream_read(tokens.data() + turn.next() * bytes,
                                                 static_cast<std::ptrdiff_t>(bytes)));
  set_counters(state, "tile", 1, static_cast<double>(bytes));
}

void run_normalize(benchmark::State& state, kvarn::target on, int head_dim) {
  const int rows = kvarn::max_group;
  const std::vector<float> x = random_tokens(rows, head_dim, 1);
  std::vector<float> row_scale(static_cast<std::size_t>(rows));
  std::vector<float> col_scale(static_cast<std::size_t>(head_dim));
  std::vector<float> workspace(normalize_workspace(rows, head_dim, on));
  const kvarn::normalize_options options{
      .iterations = kvarn::recipe_of(kvarn::encoder::paper, kvarn::tile_kind::key, 2).iterations};
  for (auto _ : state) {
    variance_normalize(x.data(), rows, head_dim, options, row_scale.data(), col_scale.data(),
                       workspace.data(), on);
    benchmark::ClobberMemory();
  }
  set_counters(state, "tile", 1, 0);
}

void run_factor(benchmark::State& state, kvarn::target on, int head_dim) {
  const kvarn::query_moment moment = random_moment(head_dim);
  std::vector<float> matrix(moment.sums().size());
  std::vector<float> workspace(kvarn::factor_workspace(head_dim));
  for (auto _ : state) {
    factorize(moment, matrix.data(), workspace.data(), on);
    benchmark::ClobberMemory();
  }
  set_counters(state, "factor", 1, 0);
}

void run_eigen_factor(benchmark::State& state, int head_dim) {
  const kvarn::query_moment moment = random_moment(head_dim);
  const auto n = static_cast<std::size_t>(head_dim);
  std::vector<float> symmetric(n * n);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = i; j < n; ++j)
      symmetric[i * n + j] = symmetric[j * n + i] =
          moment.sums()[i * n + j] + (i == j ? 1.0f : 0.0f);
  for (auto _ : state) {
    std::vector<float> matrix = symmetric;
    eigen_factorize(matrix.data(), head_dim);
    benchmark::DoNotOptimize(matrix.data());
  }
  set_counters(state, "factor", 1, 0);
}

void add_tile(kvarn::target on, const kvarn::tile_layout& layout,
              const kvarn::encoder_info& encoder) {
  const bool is_key = layout.kind == kvarn::tile_kind::key;
  const std::string shape = "d" + std::to_string(layout.head_dim);
  std::string floor;
  if (const dense_kernels* const kernels = best_dense_kernels()) {
    floor = "floor/tile/" + shape;
    add_benchmark(floor, {}, [=](benchmark::State& s) {
      run_floor(s, *kernels, layout.head_dim, layout.group);
    });
  }
  add_benchmark("encode/" + std::string(kvarn::name_of(on)) + "/" + shape + "/" +
                    (is_key ? "k" : "v") + std::to_string(layout.bits) + "/" + encoder.name,
                {floor, ""}, [=](benchmark::State& s) { run_encode(s, on, layout, encoder.id); });
}

void add_target(kvarn::target on, int head_dim, const std::vector<int>& all_bits) {
  const std::string place = std::string(kvarn::name_of(on)) + "/d" + std::to_string(head_dim);
  for (const int bits : all_bits)
    for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value})
      for (const kvarn::encoder_info& encoder : kvarn::encoder_infos) {
        // Values know no queries: query_aware is tuned.
        if (kind == kvarn::tile_kind::value && encoder.id == kvarn::encoder::query_aware) continue;
        add_tile(on, {.kind = kind, .head_dim = head_dim, .bits = bits}, encoder);
      }
  add_benchmark("normalize/" + place, {},
                [=](benchmark::State& s) { run_normalize(s, on, head_dim); });
  add_benchmark("factor/" + place, {}, [=](benchmark::State& s) { run_factor(s, on, head_dim); });
  if (eigen_is_available())
    add_benchmark("factor/eigen/d" + std::to_string(head_dim), {},
                  [=](benchmark::State& s) { run_eigen_factor(s, head_dim); });
}

}  // namespace

void add_encode(benchmark_set set) {
  for (const kvarn::target on : codec_targets()) {
    if (set == benchmark_set::quick) {
      add_target(on, 128, {2});
      continue;
    }
    for (const int head_dim : {64, 128, 256}) add_target(on, head_dim, {2, 3, 4});
  }
}

}  // namespace kvarn_bench
