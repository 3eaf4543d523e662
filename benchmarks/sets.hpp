// The benchmarks by what they measure; each function registers its own.
#pragma once

namespace kvarn_bench {

// `quick` takes a minute or two and has what the goals of docs/performance.md name; `full` sweeps.
enum class benchmark_set { quick, full };

void add_machine();
void add_attention(benchmark_set set);
void add_hadamard(benchmark_set set);
void add_encode(benchmark_set set);
void add_decode(benchmark_set set);
void add_cache(benchmark_set set);

}  // namespace kvarn_bench
