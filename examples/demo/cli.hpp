// The command line of kvarn-demo.
#pragma once

#include <CLI/CLI.hpp>
#include <exception>
#include <filesystem>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "heads.hpp"
#include "methods.hpp"
#include "report.hpp"

namespace kvarn_demo {

// Returns the exit status: 0, or 1 after a message on `err`. `default_data`: the folder that is
// read without --data.
int run_cli(int argc, const char* const* argv, const std::string& default_data, std::ostream& out,
            std::ostream& err);

// implementation

// The methods that can serve every head. Prints why others cannot.
inline std::vector<method> methods_for(std::span<const head> heads, std::ostream& out) {
  const std::vector<method> all = all_methods();
  std::vector<method> methods;
  for (const method& m : all) {
    kvarn::status status;
    for (const head& h : heads)
      if (status.ok()) status = check(h, m);
    if (status.ok())
      methods.push_back(m);
    else
      out << "\nleft out: " << m.name << ", " << status.message();
  }
  if (methods.size() < all.size()) out << '\n';
  return methods;
}

inline int run_cli(int argc, const char* const* argv, const std::string& default_data,
                   std::ostream& out, std::ostream& err) {
  CLI::App app("Quantises keys and values of attention heads with every method, and compares.",
               "kvarn-demo");
  std::string data = default_data;
  std::string report = "build/demo/report.json";
  int repeats = 3;
  app.add_option("--data", data,
                 "Folder with STEM.k.npy, STEM.v.npy ([tokens, head_dim]) and STEM.q.npy "
                 "([tokens, query heads, head_dim]), float16 or float32")
      ->capture_default_str();
  app.add_option("--report", report, "JSON file to write")->capture_default_str();
  app.add_option("--repeats", repeats, "Timings of each tile, of which the fastest counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error, out, err) == 0 ? 0 : 1;
  }

  try {
    const auto names = find_heads(data);
    std::vector<head> heads;  // all are read first, so that a bad file costs no waiting
    for (const auto& name : names) heads.push_back(load_head(data, name));
    print_legend(out);
    const auto methods = methods_for(heads, out);
    std::vector<head_result> results;
    for (const head& h : heads) {
      results.push_back(evaluate_all(h, methods, repeats));
      print_head(out, results.back(), methods);
      out.flush();
    }
    print_summary(out, results, methods);
    write_json(report, to_json(results, methods));
    out << "\nreport: " << report << '\n';
  } catch (const std::exception& error) {
    err << "kvarn-demo: " << error.what() << '\n';
    return 1;
  }
  return 0;
}

}  // namespace kvarn_demo
