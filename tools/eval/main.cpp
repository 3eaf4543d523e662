// kvarn-eval: what each way to store the KV cache changes in a model's predictions.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
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
#include "method.hpp"
#include "progress_bar.hpp"
#include "results.hpp"
#include "retrieval.hpp"
#include "statistics.hpp"
#include "windows.hpp"

namespace {

using kvarn_eval::layout;

struct arguments {
  std::string model;
  std::string text;
  std::vector<std::string> methods;
  std::string out = "build/eval";
  int window = 2048;
  int windows = 1;
  std::vector<std::int64_t> offsets;
  layout stored;
  std::optional<int> first_scored;  // none: sink + group
  int threads = 2;
  bool with_static = false;
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
  app.add_option("--out", a.out, "Folder for results; what is there already is not computed again")
      ->capture_default_str();
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
  app.add_flag("--static", a.with_static,
               "Run each method on the keys and values of the exact run too: errors of layers and "
               "heads, and how much of the KL is accumulated");
  auto* retrieval = app.add_flag(
      "--retrieval", a.retrieval,
      "Line retrieval too, with 20 lines, twice as many, and so on, as the model's context holds");
  app.add_option("--retrieval-lines", a.retrieval_lines, "Numbers of lines for --retrieval")
      ->delimiter(',')
      ->check(CLI::Range(1, kvarn_eval::most_retrieval_lines()))
      ->needs(retrieval);
  app.add_flag("--fresh", a.fresh, "Compute everything again");
}

// Runs what the folder lacks of one window.
class window_runner {
 public:
  window_runner(const arguments& a, kvarn_engine::transformer& model,
                const kvarn_examples::thread_pool& pool, kvarn_eval::result_folder& folder,
                kvarn_eval::progress_bar& bar)
      : a_(a), model_(model), pool_(pool), folder_(folder), bar_(bar) {}

  void run(const kvarn_eval::window& w, const kvarn_eval::window_key& key,
           const std::vector<kvarn_eval::method>& methods, kvarn_eval::evaluation& all) {
    std::unique_ptr<kvarn_eval::exact_run> exact;
    auto exact_result = a_.fresh ? std::nullopt : folder_.load_exact(key);
    const auto run_exact = [&] {
      bar_.start(key.name + " exact");
      exact = std::make_unique<kvarn_eval::exact_run>(model_, a_.stored, w.tokens, *a_.first_scored,
                                                      pool_, update());
      exact_result = kvarn_eval::exact_result{exact->nll(), exact->skipped_nll()};
      folder_.save_exact(key, *exact_result);
      bar_.finish("");
    };
    for (std::size_t i = 0; i < methods.size(); ++i) {
      auto result = a_.fresh ? std::nullopt : folder_.load(key, methods[i].name);
      if (!result || (a_.with_static && result->static_kl.empty())) {
        if (exact == nullptr) run_exact();
        result = run_method(*exact, key, methods[i]);
        folder_.save(key, methods[i].name, *result);
      } else {
        bar_.skip();
      }
      all.results[i].push_back(*result);
    }
    if (!exact_result) run_exact();
    all.windows.push_back(key);
    all.exact.push_back(*exact_result);
  }

 private:
  kvarn_eval::progress update() {
    return [this](double done) { bar_.update(done); };
  }

  kvarn_eval::method_result run_method(kvarn_eval::exact_run& exact,
                                       const kvarn_eval::window_key& key,
                                       const kvarn_eval::method& m) {
    bar_.start(key.name + " " + m.name);
    const auto start = std::chrono::steady_clock::now();
    kvarn_eval::method_result result;
    result.bits = kvarn_eval::bits_per_element(m, a_.stored, model_.config().layers,
                                               model_.config().head_dim, a_.window);
    result.pseudo_decode = exact.pseudo_decode(m, update());
    result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (a_.with_static) result.static_kl = exact.static_run(m, &result.heads, update()).kl;
    char text[128];
    std::snprintf(text, sizeof(text), "KL mean %.4f median %.4f, perplexity %.3f, %.1f s",
                  kvarn_eval::mean(result.pseudo_decode.kl),
                  kvarn_eval::percentile(result.pseudo_decode.kl, 50),
                  std::exp(kvarn_eval::mean(result.pseudo_decode.nll)), result.seconds);
    bar_.finish(text);
    return result;
  }

  const arguments& a_;
  kvarn_engine::transformer& model_;
  const kvarn_examples::thread_pool& pool_;
  kvarn_eval::result_folder& folder_;
  kvarn_eval::progress_bar& bar_;
};

std::string share_of(const kvarn_eval::retrieval_result& r) {
  return std::to_string(r.right) + " of " + std::to_string(r.questions);
}

// Every method on the same lines, and exact rows first, which says what the model can do at all.
nlohmann::ordered_json retrieve(const arguments& a, const std::vector<kvarn_eval::method>& methods,
                                const kvarn_engine::tokenizer& vocabulary,
                                kvarn_engine::transformer& model,
                                const kvarn_examples::thread_pool& pool,
                                const kvarn_eval::result_folder& folder) {
  const std::vector<int> sizes =
      a.retrieval_lines.empty() ? kvarn_eval::retrieval_sizes(vocabulary, model.config().context)
                                : a.retrieval_lines;
  kvarn_eval::progress_bar bar(static_cast<int>(sizes.size() * (methods.size() + 1)));
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  std::string weak;
  for (std::size_t i = 0; i <= methods.size(); ++i) {
    const kvarn_eval::method* const m = i == 0 ? nullptr : &methods[i - 1];
    const std::string name = m == nullptr ? "exact" : m->name;
    nlohmann::ordered_json results = nlohmann::ordered_json::array();
    for (const int lines : sizes) {
      const std::string file = "lines" + std::to_string(lines) + "." + name;
      const nlohmann::ordered_json settings{
          {"model", std::filesystem::path(a.model).filename().string()},
          {"sink", a.stored.sink},
          {"group", a.stored.group}};
      auto result = a.fresh ? std::nullopt : folder.load_retrieval(file, settings);
      if (result) {
        bar.skip();
      } else {
        bar.start(std::to_string(lines) + " lines " + name);
        result = kvarn_eval::run_retrieval(model, vocabulary, a.stored, m, lines, pool,
                                           [&](double done) { bar.update(done); });
        bar.finish(share_of(*result) + " right");
        folder.save_retrieval(file, settings, *result);
      }
      if (m == nullptr && result->right != result->questions)
        weak += (weak.empty() ? "" : ", ") + std::to_string(lines) + " (" + share_of(*result) + ")";
      results.push_back(kvarn_eval::to_json(*result));
    }
    all.push_back({{"name", name}, {"results", results}});
  }
  if (!weak.empty())
    std::printf(
        "line retrieval: the model itself, with an exact cache, fails with these numbers of lines: "
        "%s\n",
        weak.c_str());
  return all;
}

void run(arguments a) {
  if (a.methods.empty() || a.methods == std::vector<std::string>{"all"})
    a.methods = kvarn_eval::all_method_names();
  std::vector<kvarn_eval::method> methods;
  for (const std::string& name : a.methods) methods.push_back(kvarn_eval::find_method(name));
  if (!a.first_scored) a.first_scored = a.stored.sink + a.stored.group;
  const int first_scored = *a.first_scored;
  if (first_scored >= a.window - 1)
    throw std::runtime_error("positions are scored from " + std::to_string(first_scored) +
                             " on (--score-from; else --sink + --group); it must be below "
                             "--window - 1 = " +
                             std::to_string(a.window - 1));

  const auto file = kvarn_engine::gguf_file::open(a.model).value();
  kvarn_engine::read_config(file);  // refuses other architectures, whatever their tokenizer
  const auto vocabulary = kvarn_engine::tokenizer::from_gguf(file).value();
  const std::string text = kvarn_engine::read_text(a.text).value();
  const auto windows = a.offsets.empty()
                           ? kvarn_eval::spread_windows(vocabulary, text, a.windows, a.window)
                           : kvarn_eval::windows_at(vocabulary, text, a.offsets, a.window);
  kvarn_eval::result_folder folder(a.out);
  const kvarn_engine::model_weights weights = kvarn_engine::load_model(file);
  const kvarn_examples::thread_pool pool(a.threads);
  kvarn_engine::transformer model(weights, pool);
  // What does not fit the model is refused before anything is computed.
  for (const kvarn_eval::method& m : methods)
    kvarn_eval::make_memory(model.config(), a.stored, &m, 1, nullptr, pool);

  kvarn_eval::evaluation all;
  all.settings = {{"model", std::filesystem::path(a.model).filename().string()},
                  {"text", std::filesystem::path(a.text).filename().string()},
                  {"window", a.window},
                  {"sink", a.stored.sink},
                  {"group", a.stored.group},
                  {"first_scored", first_scored}};
  all.first_scored = first_scored;
  all.group = a.stored.group;
  all.methods = a.methods;
  all.results.resize(methods.size());
  {
    kvarn_eval::progress_bar bar(static_cast<int>(windows.size() * (methods.size() + 1)));
    window_runner runner(a, model, pool, folder, bar);
    for (const kvarn_eval::window& w : windows) {
      const auto skipped = static_cast<std::size_t>(first_scored);
      kvarn_eval::window_key key{w.name, all.settings, w.tokens.size() - 1 - skipped, skipped};
      key.settings["tokens"] = kvarn_eval::hash_of(w.tokens);
      runner.run(w, key, methods, all);
    }
  }
  if (a.retrieval) all.retrieval = retrieve(a, methods, vocabulary, model, pool, folder);
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
