// The report: every benchmark's median and least time with, beside it, the floor and the FP16
// attention of the same run.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvarn_bench {

// What a benchmark is held against: names of other benchmarks, empty for none.
struct references {
  std::string floor;      // a plain read of the same bytes
  std::string half;       // the same work on binary16
  std::size_t order = 0;  // in which benchmarks were added, and are reported
};

inline std::map<std::string, references>& all_references() {
  static std::map<std::string, references> names;
  return names;
}

// Registers a benchmark under a name, once. `f(state)` runs it.
template <class F>
void add_benchmark(const std::string& name, references held_against, F f, bool real_time = false) {
  held_against.order = all_references().size();
  if (!all_references().emplace(name, std::move(held_against)).second) return;
  auto* const added = benchmark::RegisterBenchmark(name.c_str(), std::move(f));
  added->ComputeStatistics("min", [](const std::vector<double>& v) {
    return v.empty() ? 0.0 : *std::min_element(v.begin(), v.end());
  });
  if (real_time) added->UseRealTime();
}

// Call behind the loop: `unit` is what one iteration does `count` times, reading `bytes` bytes in
// all. Gives the counters ns (per unit) and bytes_per_second.
inline void set_counters(benchmark::State& state, const std::string& unit, double count,
                         double bytes) {
  using benchmark::Counter;
  state.SetLabel(unit);
  state.counters["ns"] =
      Counter(1e-9 * count, Counter::kIsIterationInvariantRate | Counter::kInvert);
  if (bytes > 0)
    state.counters["bytes_per_second"] = Counter(bytes, Counter::kIsIterationInvariantRate);
}

using benchmark_runs = std::vector<benchmark::BenchmarkReporter::Run>;

// Sorts the runs, which come shuffled, and adds floor_percent and fp16_ratio to the medians and
// minima: how near a benchmark comes to its floor, and how many times faster it is than FP16.
inline void finish_runs(std::vector<benchmark_runs>& all) {
  const auto order = [](const benchmark_runs& runs) {
    const auto found = all_references().find(runs.front().run_name.function_name);
    return found == all_references().end() ? std::size_t{0} : found->second.order;
  };
  std::erase_if(all, [](const benchmark_runs& runs) { return runs.empty(); });
  std::stable_sort(all.begin(), all.end(), [&](const benchmark_runs& a, const benchmark_runs& b) {
    return order(a) < order(b);
  });

  std::map<std::pair<std::string, std::string>, double> times;
  const auto is_compared = [](const benchmark_runs::value_type& run) {
    return run.aggregate_name == "median" || run.aggregate_name == "min";
  };
  for (const benchmark_runs& runs : all)
    for (const auto& run : runs)
      if (const auto ns = run.counters.find("ns"); is_compared(run) && ns != run.counters.end())
        times[{run.run_name.function_name, run.aggregate_name}] = ns->second.value;
  for (benchmark_runs& runs : all)
    for (auto& run : runs) {
      const auto names = all_references().find(run.run_name.function_name);
      const auto own = times.find({run.run_name.function_name, run.aggregate_name});
      if (!is_compared(run) || names == all_references().end() || own == times.end()) continue;
      const auto floor = times.find({names->second.floor, run.aggregate_name});
      if (floor != times.end())
        run.counters["floor_percent"] = benchmark::Counter(100.0 * floor->second / own->second);
      const auto half = times.find({names->second.half, run.aggregate_name});
      if (half != times.end())
        run.counters["fp16_ratio"] = benchmark::Counter(half->second / own->second);
    }
}

// Google Benchmark's JSON with the ratios among the counters.
class json_report final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override {
    inner_.SetOutputStream(&GetOutputStream());
    inner_.SetErrorStream(&GetErrorStream());
    return inner_.ReportContext(context);
  }
  void ReportRuns(const std::vector<Run>& runs) override { all_.push_back(runs); }
  void Finalize() override {
    finish_runs(all_);
    for (const benchmark_runs& runs : all_) inner_.ReportRuns(runs);
    inner_.Finalize();
  }

 private:
  benchmark::JSONReporter inner_;
  std::vector<benchmark_runs> all_;
};

// The same as a table for people.
class table_report final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override {
    PrintBasicContext(&std::cerr, context);
    return true;
  }
  void ReportRuns(const std::vector<Run>& runs) override { all_.push_back(runs); }
  void Finalize() override {
    finish_runs(all_);
    std::printf("%-58s %10s %10s  %-20s %8s %9s %6s\n", "benchmark", "median ns", "least ns", "per",
                "GB/s", "of floor", "FP16 x");
    for (const benchmark_runs& runs : all_) print(runs);
    std::fflush(stdout);
  }

 private:
  static double counter(const Run& run, const char* name) {
    const auto found = run.counters.find(name);
    return found == run.counters.end() ? std::nan("") : found->second.value;
  }
  static std::string shown(double value, const char* format) {
    if (std::isnan(value)) return "";
    char text[32];
    std::snprintf(text, sizeof(text), format, value);
    return text;
  }
  static void print(const benchmark_runs& runs) {
    const Run* median = nullptr;
    const Run* least = nullptr;
    for (const Run& run : runs) {
      if (run.error_occurred)
        std::printf("%-58s %s\n", run.run_name.function_name.c_str(), run.error_message.c_str());
      // One repetition has no aggregates: it is both.
      if (run.aggregate_name == "median" || run.aggregate_name.empty()) median = &run;
      if (run.aggregate_name == "min" || run.aggregate_name.empty()) least = &run;
    }
    if (median == nullptr || least == nullptr) return;
    std::printf("%-58s %10s %10s  %-20s %8s %9s %6s\n", median->run_name.function_name.c_str(),
                shown(counter(*median, "ns"), "%.2f").c_str(),
                shown(counter(*least, "ns"), "%.2f").c_str(), median->report_label.c_str(),
                shown(counter(*median, "bytes_per_second") * 1e-9, "%.1f").c_str(),
                shown(counter(*median, "floor_percent"), "%.0f %%").c_str(),
                shown(counter(*median, "fp16_ratio"), "%.2f").c_str());
  }

  std::vector<benchmark_runs> all_;
};

}  // namespace kvarn_bench
