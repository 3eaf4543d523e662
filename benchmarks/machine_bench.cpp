// The machine itself: what the other times are to be seen against on a faster or slower clock.
#include <benchmark/benchmark.h>

#include <cstdint>

#include "sets.hpp"
#include "support/report.hpp"

namespace kvarn_bench {
namespace {

// A chain of 64-bit multiplications, each of which waits for the one before: 3 cycles each on the
// x86-64 processors of the last decade.
void run_multiply(benchmark::State& state) {
  constexpr int chain = 1000;
  std::uint64_t x = 3;
  for (auto _ : state)
    for (int i = 0; i < chain; ++i) {
      x *= x;
      benchmark::DoNotOptimize(x);
    }
  set_counters(state, "multiplication", chain, 0);
}

}  // namespace

void add_machine() { add_benchmark("machine/multiply", {}, run_multiply); }

}  // namespace kvarn_bench
