// The rotation: one head vector in the L1 cache, and the vectors of a tile.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <string>
#include <vector>

#include "baselines/eigen.hpp"
#include "kvarn/kvarn.hpp"
#include "sets.hpp"
#include "support/data.hpp"
#include "support/library.hpp"
#include "support/report.hpp"

namespace kvarn_bench {
namespace {

// Rotates in place, again and again: the rotation is orthonormal, so numbers stay of their size.
void run_hadamard(benchmark::State& state, kvarn::target on, int head_dim, int count) {
  std::vector<float> x = random_tokens(count, head_dim, 1);
  for (auto _ : state) {
    hadamard(x.data(), head_dim, count, on);
    benchmark::ClobberMemory();
  }
  set_counters(state, "vector", count, 0);
}

void run_eigen(benchmark::State& state, int head_dim, int count) {
  const std::vector<float> x = random_tokens(count, head_dim, 1);
  const auto n = static_cast<std::size_t>(head_dim);
  std::vector<float> matrix(n * n), out(x.size());
  for (std::size_t i = 0; i < n; ++i) {
    matrix[i * n + i] = 1.0f;
    kvarn::hadamard(matrix.data() + i * n, head_dim);
  }
  for (auto _ : state) {
    eigen_rotate(matrix.data(), x.data(), head_dim, count, out.data());
    benchmark::ClobberMemory();
  }
  set_counters(state, "vector", count, 0);
}

}  // namespace

void add_hadamard(benchmark_set set) {
  std::vector<int> head_dims{128};
  if (set == benchmark_set::full)
    head_dims.assign(std::begin(kvarn::supported_head_dims), std::end(kvarn::supported_head_dims));
  for (const int head_dim : head_dims)
    for (const int count : {1, 128}) {
      const std::string shape =
          "/d" + std::to_string(head_dim) + (count == 1 ? "" : "/batch" + std::to_string(count));
      for (const kvarn::target on : codec_targets())
        add_benchmark("hadamard/" + std::string(kvarn::name_of(on)) + shape, {},
                      [=](benchmark::State& s) { run_hadamard(s, on, head_dim, count); });
      if (eigen_is_available())
        add_benchmark("hadamard/eigen" + shape, {},
                      [=](benchmark::State& s) { run_eigen(s, head_dim, count); });
    }
}

}  // namespace kvarn_bench
