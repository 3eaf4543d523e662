// Evaluations that go on where they were stopped: what a folder has is read, what it lacks is
// computed and stored at once.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "method.hpp"
#include "progress_bar.hpp"
#include "results.hpp"
#include "retrieval.hpp"
#include "windows.hpp"

namespace kvarn_eval {

// What is to be evaluated.
struct request {
  nlohmann::ordered_json model = nullptr;  // an object: what tells it from other models
  std::string text;                        // its name
  int window = 2048;                       // tokens
  layout stored = {};
  int first_scored = 256;
  std::vector<method> methods = {};
  std::vector<std::string> static_methods = {};  // those that run on exact keys and values too
  bool fresh = false;                            // forget what is there of all this
};

// All methods on windows of a text. Everything given must outlive it.
class window_runs {
 public:
  // Reads what is there. Throws std::runtime_error where that has other settings (result_folder).
  window_runs(const request& wanted, const std::vector<window>& windows,
              const result_folder& folder);

  // Runs of the model over a window: one with exact rows for all methods, then pseudo-decode and,
  // where it is wanted, static for each.
  int total() const;
  int missing() const;

  // Computes what is missing, with a line on stderr for each run, and gives all.
  evaluation finish(kvarn_engine::transformer& model, const kvarn_examples::thread_pool& pool);

 private:
  bool lacks_static(std::size_t window, std::size_t method) const;
  int missing_of(std::size_t window) const;  // 0: not even the exact run
  void complete(std::size_t window, kvarn_engine::transformer& model,
                const kvarn_examples::thread_pool& pool, progress_bar& bar);

  const request& wanted_;
  const std::vector<window>& windows_;
  const result_folder& folder_;
  nlohmann::ordered_json settings_;
  std::vector<window_key> keys_;
  std::vector<std::optional<exact_result>> exact_;                  // [window]
  std::vector<std::vector<std::optional<method_result>>> results_;  // [window][method]
};

// Line retrieval under exact rows and all methods.
class retrieval_runs {
 public:
  // `lines`: how many, for each run, each number once: else std::runtime_error. Otherwise as
  // window_runs.
  retrieval_runs(const request& wanted, std::vector<int> lines, const result_folder& folder);

  int total() const;
  int missing() const;

  // [{name, results}], "exact" first, which says what the model can do at all.
  nlohmann::ordered_json finish(const kvarn_engine::tokenizer& vocabulary,
                                kvarn_engine::transformer& model,
                                const kvarn_examples::thread_pool& pool);

 private:
  std::string name_of(std::size_t row) const;
  std::string file_of(std::size_t row, std::size_t size) const;

  const request& wanted_;
  std::vector<int> lines_;
  const result_folder& folder_;
  nlohmann::ordered_json settings_;
  std::vector<std::vector<std::optional<retrieval_result>>> results_;  // [exact, methods][lines]
};

}  // namespace kvarn_eval
