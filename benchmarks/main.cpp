// kvarn-bench: measures every kernel on every target of this machine.
//
//   kvarn-bench [--set=quick|full] [Google Benchmark's flags]
//
// Repetitions of all benchmarks are shuffled, so that a slow minute of the machine falls on all of
// them; what is compared are medians. --benchmark_out=FILE writes the report.
#include <benchmark/benchmark.h>

#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "kvarn/kvarn.hpp"
#include "sets.hpp"
#include "support/cold_memory.hpp"
#include "support/library.hpp"
#include "support/report.hpp"

namespace {

// The program's own flag; what follows it in the list is Google Benchmark's, later flags win.
struct command_line {
  kvarn_bench::benchmark_set set = kvarn_bench::benchmark_set::quick;
  bool has_output = false;
  std::vector<std::string> arguments;
};

bool parse(int argc, char** argv, command_line& line) {
  constexpr std::string_view set_flag = "--set=";
  std::vector<std::string> rest;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--set=full") {
      line.set = kvarn_bench::benchmark_set::full;
    } else if (argument.substr(0, set_flag.size()) == set_flag && argument != "--set=quick") {
      std::cerr << "kvarn-bench: " << argument << ": sets are quick and full\n";
      return false;
    } else if (argument != "--set=quick") {
      line.has_output |= argument.substr(0, 16) == "--benchmark_out=";
      rest.emplace_back(argument);
    }
  }
  const bool full = line.set == kvarn_bench::benchmark_set::full;
  line.arguments = {argv[0], "--benchmark_enable_random_interleaving=true",
                    "--benchmark_report_aggregates_only=true",
                    full ? "--benchmark_repetitions=15" : "--benchmark_repetitions=7",
                    "--benchmark_min_time=0.03"};
  line.arguments.insert(line.arguments.end(), rest.begin(), rest.end());
  return true;
}

}  // namespace

int main(int argc, char** argv) try {
  command_line line;
  if (!parse(argc, argv, line)) return 1;
  std::vector<char*> arguments;
  for (std::string& argument : line.arguments) arguments.push_back(argument.data());
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;

  std::string names;
  for (const kvarn::target on : kvarn_bench::targets())
    names += (names.empty() ? "" : " ") + std::string(kvarn::name_of(on));
  benchmark::AddCustomContext("targets", names);
  benchmark::AddCustomContext("cold_arena_bytes", std::to_string(kvarn_bench::arena_bytes()));
#if defined(__VERSION__)
  benchmark::AddCustomContext("compiler", __VERSION__);
#endif

  kvarn_bench::add_machine();
  kvarn_bench::add_attention(line.set);
  kvarn_bench::add_hadamard(line.set);
  kvarn_bench::add_encode(line.set);
  kvarn_bench::add_decode(line.set);
  kvarn_bench::add_cache(line.set);

  kvarn_bench::table_report table;
  kvarn_bench::json_report json;
  const std::size_t ran =
      benchmark::RunSpecifiedBenchmarks(&table, line.has_output ? &json : nullptr);
  return ran > 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "kvarn-bench: " << error.what() << '\n';
  return 1;
}
