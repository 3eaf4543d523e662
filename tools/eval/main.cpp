// kvarn-eval: what each way to store the KV cache changes in a model's predictions.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../examples/engine/file_bytes.hpp"
#include "../../examples/engine/gguf.hpp"
#include "../../examples/engine/model_file.hpp"
#include "../../examples/engine/tokenizer.hpp"
#include "../../examples/engine/transformer.hpp"
#include "evaluate.hpp"
#include "hash.hpp"
#include "method.hpp"
#include "results.hpp"
#include "resume.hpp"
#include "retrieval.hpp"
#include "statistics.hpp"
#include "windows.hpp"

namespace {

struct arguments {
  std::string model;
  std::string text;
  std::vector<std::string> methods;
  std::vector<std::string> static_methods;
  std::string out;  // empty: build/eval/NAME
  int window = 2048;
  int windows = 1;
  std::vector<std::int64_t> offsets;
  kvarn_eval::layout stored;
  std::optional<int> first_scored;  // none: sink + group
  int threads = 2;
  bool fresh = false;
  bool retrieval = false;
  std::vector<int> retrieval_lines;
};

void add_options(CLI::App& app, arguments& a) {
  app.add_option("--model", a.model, "GGUF file")->required();
  app.add_option("--text", a.text, "Text file, UTF-8")->required();
  app.add_option("--methods", a.methods,
                 "Names, separated by commas: encoders as tuned_k2v2, baselines, fp16; all")
      ->delimiter(',')
      ->default_str("all");
  app.add_option("--out", a.out,
                 "Folder for results, one for each model and text; what is there already is not "
                 "computed again")
      ->default_str("build/eval/NAME, that of the text");
  app.add_option("--window", a.window, "Tokens of a window")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  auto* windows = app.add_option("--windows", a.windows, "Windows, evenly spread over the text")
                      ->check(CLI::Range(1, 100000))
                      ->capture_default_str();
  app.add_option("--offsets", a.offsets,
                 "Where windows start in the text, in characters, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->excludes(windows);
  app.add_option("--sink", a.stored.sink, "First tokens that stay exact")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--group", a.stored.group, "Tokens that are quantised together, and fed at once")
      ->check(CLI::IsMember({64, 128}))
      ->capture_default_str();
  app.add_option("--score-from", a.first_scored,
                 "First position that is scored; by default sink + group, the first that sees "
                 "quantised tokens")
      ->check(CLI::Range(0, 1 << 20));
  app.add_option("--threads", a.threads, "Threads")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--static", a.static_methods,
                 "Those of the methods, or all, that run on the keys and values of the exact run "
                 "too: errors of layers and heads, and how much of the KL is accumulated")
      ->delimiter(',');
  auto* retrieval = app.add_flag(
      "--retrieval", a.retrieval,
      "Line retrieval too, with 20 lines, twice as many, and so on, as the model's context holds");
  app.add_option("--retrieval-lines", a.retrieval_lines, "Numbers of lines for --retrieval")
      ->delimiter(',')
      ->check(CLI::Range(1, kvarn_eval::most_retrieval_lines()))
      ->needs(retrieval);
  app.add_flag("--fresh", a.fresh,
               "Delete what --out has of these windows and methods, and compute it again");
}

// By the whole file: a model and its fine-tuned sibling may differ in the weights only. Takes less
// than loading them, 0.1 s for 98 MB.
nlohmann::ordered_json identity_of(const std::string& model) {
  const auto file = kvarn_engine::file_bytes::map(model).value();
  return {{"model", std::filesystem::path(model).filename().string()},
          {"model_hash", kvarn_eval::hash_of(file.bytes())}};
}

std::vector<kvarn_eval::window> windows_of(const arguments& a,
                                           const kvarn_engine::tokenizer& vocabulary) {
  const std::string text = kvarn_engine::read_text(a.text).value();
  try {
    return a.offsets.empty() ? kvarn_eval::spread_windows(vocabulary, text, a.windows, a.window)
                             : kvarn_eval::windows_at(vocabulary, text, a.offsets, a.window);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(a.text + ": " + error.what());
  }
}

// Says with how many lines the model fails even with exact rows.
void print_weakness(const nlohmann::ordered_json& retrieval) {
  std::string weak;
  for (const auto& json : retrieval.at(0).at("results")) {
    const kvarn_eval::retrieval_result r = kvarn_eval::retrieval_of(json);
    if (r.right == r.questions) continue;
    weak += (weak.empty() ? "" : ", ") + std::to_string(r.lines) + " (" + std::to_string(r.right) +
            " of " + std::to_string(r.questions) + ")";
  }
  if (!weak.empty())
    std::printf(
        "line retrieval: the model itself, with an exact cache, fails with these numbers of lines: "
        "%s\n",
        weak.c_str());
}

// The methods by name; the static ones are some of them.
void choose_methods(arguments& a, kvarn_eval::request& wanted) {
  const std::vector<std::string> all{"all"};
  if (a.methods.empty() || a.methods == all) a.methods = kvarn_eval::all_method_names();
  if (a.static_methods == all) a.static_methods = a.methods;
  for (const std::string& name : a.methods) {
    if (std::ranges::count(a.methods, name) > 1)
      throw std::runtime_error("--methods names " + name + " twice");
    wanted.methods.push_back(kvarn_eval::find_method(name));
  }
  for (const std::string& name : a.static_methods) {
    if (std::ranges::count(a.static_methods, name) > 1)
      throw std::runtime_error("--static names " + name + " twice");
    if (std::ranges::count(a.methods, name) == 0)
      throw std::runtime_error("--static names " + name + ", which is not one of --methods");
  }
  wanted.static_methods = a.static_methods;
}

void run(arguments a) {
  kvarn_eval::request wanted{
      .text = std::filesystem::path(a.text).filename().string(),
      .window = a.window,
      .stored = a.stored,
      .first_scored = a.first_scored.value_or(a.stored.sink + a.stored.group),
      .fresh = a.fresh};
  choose_methods(a, wanted);
  if (a.out.empty()) a.out = "build/eval/" + std::filesystem::path(a.text).stem().string();
  if (wanted.first_scored >= a.window - 1)
    throw std::runtime_error("positions are scored from " + std::to_string(wanted.first_scored) +
                             " on (--score-from; else --sink + --group); it must be below "
                             "--window - 1 = " +
                             std::to_string(a.window - 1));

  const auto file = kvarn_engine::gguf_file::open(a.model).value();
  const auto config = kvarn_engine::read_config(file);  // refuses other architectures at once
  const auto vocabulary = kvarn_engine::tokenizer::from_gguf(file).value();
  if (a.window > config.context)
    std::fprintf(stderr,
                 "--window is %d: the model was trained on %d tokens at most, its predictions "
                 "beyond them mean little\n",
                 a.window, config.context);
  const std::vector<kvarn_eval::window> windows = windows_of(a, vocabulary);
  wanted.model = identity_of(a.model);
  if (a.retrieval && a.retrieval_lines.empty())
    a.retrieval_lines = kvarn_eval::retrieval_sizes(vocabulary, config.context);
  // What does not fit the model is refused before anything is deleted or computed.
  const kvarn_examples::thread_pool pool(a.threads);
  for (const kvarn_eval::method& m : wanted.methods)
    kvarn_eval::make_memory(config, a.stored, &m, 1, nullptr, pool);

  const kvarn_eval::result_folder folder(a.out);
  kvarn_eval::window_runs runs(wanted, windows, folder);
  std::optional<kvarn_eval::retrieval_runs> retrieval;
  if (a.retrieval) retrieval.emplace(wanted, a.retrieval_lines, folder);
  const int missing = runs.missing() + (retrieval ? retrieval->missing() : 0);
  const int total = runs.total() + (retrieval ? retrieval->total() : 0);
  if (missing < total)
    std::fprintf(stderr, "%s: %d of %d runs of the model are left to do\n", a.out.c_str(), missing,
                 total);

  const kvarn_engine::model_weights weights = kvarn_engine::load_model(file);
  kvarn_engine::transformer model(weights, pool);

  kvarn_eval::evaluation all = runs.finish(model, pool);
  if (retrieval) {
    all.retrieval = retrieval->finish(vocabulary, model, pool);
    print_weakness(all.retrieval);
  }
  kvarn_eval::write_file(folder.path() / "report.json", kvarn_eval::to_json(all).dump(1) + "\n");
  kvarn_eval::write_file(folder.path() / "report.csv", kvarn_eval::to_csv(all));
  for (std::size_t w = 0; w < all.windows.size(); ++w)
    std::printf("%s: exact perplexity %.3f (all positions %.3f)\n", all.windows[w].name.c_str(),
                std::exp(kvarn_eval::mean(all.exact[w].nll)),
                kvarn_eval::perplexity_of_all(all.exact[w]));
  std::fflush(stdout);
  kvarn_eval::print_table(std::cout, all);
  std::cout << "report: " << (folder.path() / "report.json").string() << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Runs a language model with its KV cache stored in many ways, and compares its predictions "
      "with those of an exact cache.",
      "kvarn-eval");
  arguments a;
  add_options(app, a);
  CLI11_PARSE(app, argc, argv);
  try {
    run(a);
  } catch (const std::exception& error) {
    std::cerr << "kvarn-eval: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
