#include "resume.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <utility>

#include "hash.hpp"
#include "statistics.hpp"

namespace kvarn_eval {

namespace {

using json = nlohmann::ordered_json;

std::string said_of(const std::vector<float>& kl, const std::vector<float>& nll, double seconds) {
  char text[128];
  std::snprintf(text, sizeof(text), "KL mean %.4f median %.4f, perplexity %.3f, %.1f s", mean(kl),
                percentile(kl, 50), std::exp(mean(nll)), seconds);
  return text;
}

template <class Run>
double seconds_of(const Run& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

window_runs::window_runs(const request& wanted, const std::vector<window>& windows,
                         const result_folder& folder)
    : wanted_(wanted), windows_(windows), folder_(folder), settings_(wanted.model) {
  settings_.update({{"text", wanted.text},
                    {"window", wanted.window},
                    {"sink", wanted.stored.sink},
                    {"group", wanted.stored.group},
                    {"first_scored", wanted.first_scored}});
  for (const window& w : windows) {
    const auto skipped = static_cast<std::size_t>(wanted.first_scored);
    window_key key{w.name, settings_, w.tokens.size() - 1 - skipped, skipped};
    key.settings["tokens"] = hash_of(std::span<const int>(w.tokens));
    if (wanted.fresh) {
      folder.forget(w.name, "exact");
      for (const method& m : wanted.methods) folder.forget(w.name, m.name);
    }
    exact_.push_back(folder.load_exact(key));
    results_.emplace_back();
    for (const method& m : wanted.methods) results_.back().push_back(folder.load(key, m.name));
    keys_.push_back(std::move(key));
  }
}

bool window_runs::lacks_static(std::size_t window, std::size_t method) const {
  const auto& result = results_[window][method];
  return std::ranges::count(wanted_.static_methods, wanted_.methods[method].name) != 0 &&
         (!result || result->static_kl.empty());
}

int window_runs::missing_of(std::size_t window) const {
  int count = 0;
  for (std::size_t m = 0; m < wanted_.methods.size(); ++m)
    count += (results_[window][m] ? 0 : 1) + (lacks_static(window, m) ? 1 : 0);
  return count > 0 || !exact_[window] ? count + 1 : 0;  // the exact run is compared with
}

int window_runs::total() const {
  return static_cast<int>(windows_.size() *
                          (1 + wanted_.methods.size() + wanted_.static_methods.size()));
}

int window_runs::missing() const {
  int count = 0;
  for (std::size_t w = 0; w < windows_.size(); ++w) count += missing_of(w);
  return count;
}

void window_runs::complete(std::size_t window, kvarn_engine::transformer& model,
                           const kvarn_examples::thread_pool& pool, progress_bar& bar) {
  const window_key& key = keys_[window];
  const progress update = [&](double done) { bar.update(done); };
  bar.start(key.name + " exact");
  exact_run exact(model, wanted_.stored, windows_[window].tokens, wanted_.first_scored, pool,
                  update);
  if (!exact_[window]) {
    exact_[window] = {exact.nll(), exact.skipped_nll()};
    folder_.save_exact(key, *exact_[window]);
  }
  bar.finish("");
  for (std::size_t i = 0; i < wanted_.methods.size(); ++i) {
    const method& m = wanted_.methods[i];
    auto& result = results_[window][i];
    if (!result) {
      bar.start(key.name + " " + m.name);
      method_result r;
      r.bits = bits_per_element(m, wanted_.stored, model.config().layers, model.config().head_dim,
                                wanted_.window);
      r.seconds = seconds_of([&] { r.pseudo_decode = exact.pseudo_decode(m, update); });
      bar.finish(said_of(r.pseudo_decode.kl, r.pseudo_decode.nll, r.seconds));
      folder_.save(key, m.name, r);
      result = std::move(r);
    }
    if (lacks_static(window, i)) {
      bar.start(key.name + " " + m.name + " static");
      token_scores scores;
      const double seconds =
          seconds_of([&] { scores = exact.static_run(m, &result->heads, update); });
      bar.finish(said_of(scores.kl, scores.nll, seconds));
      result->static_kl = std::move(scores.kl);
      folder_.save(key, m.name, *result);
    }
  }
}

evaluation window_runs::finish(kvarn_engine::transformer& model,
                               const kvarn_examples::thread_pool& pool) {
  {
    progress_bar bar(missing());
    for (std::size_t w = 0; w < windows_.size(); ++w)
      if (missing_of(w) > 0) complete(w, model, pool, bar);
  }
  evaluation all;
  all.settings = settings_;
  all.first_scored = wanted_.first_scored;
  all.group = wanted_.stored.group;
  all.windows = keys_;
  for (const auto& exact : exact_) all.exact.push_back(exact.value());
  for (std::size_t m = 0; m < wanted_.methods.size(); ++m) {
    all.methods.push_back(wanted_.methods[m].name);
    all.results.emplace_back();
    for (const auto& results : results_) all.results.back().push_back(results[m].value());
  }
  return all;
}

retrieval_runs::retrieval_runs(const request& wanted, std::vector<int> lines,
                               const result_folder& folder)
    : wanted_(wanted), lines_(std::move(lines)), folder_(folder), settings_(wanted.model) {
  for (const int number : lines_)
    if (std::ranges::count(lines_, number) > 1)
      throw std::runtime_error("line retrieval: " + std::to_string(number) +
                               " lines are given twice; each number may be given once");
  settings_.update({{"sink", wanted.stored.sink}, {"group", wanted.stored.group}});
  for (std::size_t row = 0; row <= wanted.methods.size(); ++row) {
    results_.emplace_back();
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      if (wanted.fresh) folder.forget_retrieval(file_of(row, i));
      results_.back().push_back(folder.load_retrieval(file_of(row, i), settings_));
    }
  }
}

std::string retrieval_runs::name_of(std::size_t row) const {
  return row == 0 ? "exact" : wanted_.methods[row - 1].name;
}

std::string retrieval_runs::file_of(std::size_t row, std::size_t size) const {
  return "lines" + std::to_string(lines_[size]) + "." + name_of(row);
}

int retrieval_runs::total() const { return static_cast<int>(results_.size() * lines_.size()); }

int retrieval_runs::missing() const {
  int count = 0;
  for (const auto& row : results_)
    count += static_cast<int>(std::ranges::count_if(row, [](const auto& r) { return !r; }));
  return count;
}

json retrieval_runs::finish(const kvarn_engine::tokenizer& vocabulary,
                            kvarn_engine::transformer& model,
                            const kvarn_examples::thread_pool& pool) {
  progress_bar bar(missing());
  json all = json::array();
  for (std::size_t row = 0; row < results_.size(); ++row) {
    const method* const m = row == 0 ? nullptr : &wanted_.methods[row - 1];
    json results = json::array();
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      auto& result = results_[row][i];
      if (!result) {
        bar.start(std::to_string(lines_[i]) + " lines " + name_of(row));
        result = run_retrieval(model, vocabulary, wanted_.stored, m, lines_[i], pool,
                               [&](double done) { bar.update(done); });
        bar.finish(std::to_string(result->right) + " of " + std::to_string(result->questions) +
                   " right");
        folder_.save_retrieval(file_of(row, i), settings_, *result);
      }
      results.push_back(to_json(*result));
    }
    all.push_back({{"name", name_of(row)}, {"results", results}});
  }
  return all;
}

}  // namespace kvarn_eval
