// Results of single windows and methods as files, so that an evaluation can stop and go on; and the
// report over all of them.
//
// FOLDER/windows/WINDOW.METHOD.json holds every score of one method on one window, with the
// settings that it was made with: the model and the text, by hashes too, not the program. Who has
// changed an encoder computes again. A score that is not finite is null there, and comes back as
// NaN. FOLDER/report.json and FOLDER/report.csv sum up.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "folder_lock.hpp"
#include "method.hpp"
#include "retrieval.hpp"

namespace kvarn_eval {

// The exact run of a window.
struct exact_result {
  std::vector<float> nll;          // of the scored positions
  std::vector<float> skipped_nll;  // of those before them
};

// Over scored and skipped positions.
double perplexity_of_all(const exact_result& exact);

struct method_result {
  double bits = 0;  // per quantised element
  double seconds = 0;
  token_scores pseudo_decode;
  std::vector<float> static_kl;    // empty: there was no static run
  std::vector<head_errors> heads;  // empty: there was no static run
};

// One window of the text, by name, what its results depend on, and how many they are.
struct window_key {
  std::string name;
  nlohmann::ordered_json settings;
  std::size_t scored = 0;   // positions
  std::size_t skipped = 0;  // positions before them
};

// One at a time has a folder.
class result_folder {
 public:
  // Creates the folder. Throws std::runtime_error where that fails, or another one has it.
  explicit result_folder(const std::filesystem::path& folder);

  // What is there; nothing where there is no file, or a damaged one. Throws std::runtime_error that
  // names the file and the first setting that differs where it was made with other settings: hours
  // of results are not to be overwritten by mistake.
  std::optional<exact_result> load_exact(const window_key& window) const;
  std::optional<method_result> load(const window_key& window, const std::string& method) const;
  void save_exact(const window_key& window, const exact_result& result) const;
  void save(const window_key& window, const std::string& method, const method_result& result) const;

  // The same for line retrieval, of which a result has a name of its own.
  std::optional<retrieval_result> load_retrieval(const std::string& name,
                                                 const nlohmann::ordered_json& settings) const;
  void save_retrieval(const std::string& name, const nlohmann::ordered_json& settings,
                      const retrieval_result& result) const;

  // Deletes a result, if it is there. `method`: "exact" too.
  void forget(const std::string& window, const std::string& method) const;
  void forget_retrieval(const std::string& name) const;

  const std::filesystem::path& path() const { return folder_; }

 private:
  std::filesystem::path file_of(const std::string& window, const std::string& method) const;

  std::filesystem::path folder_;
  folder_lock lock_;
};

// All that was measured: results[method][window].
struct evaluation {
  nlohmann::ordered_json settings;
  int first_scored = 0;
  int group = 128;
  std::vector<window_key> windows;
  std::vector<exact_result> exact;
  std::vector<std::string> methods;
  std::vector<std::vector<method_result>> results;
  nlohmann::ordered_json retrieval = nullptr;
};

nlohmann::ordered_json to_json(const evaluation& all);
std::string to_csv(const evaluation& all);
void print_table(std::ostream& out, const evaluation& all);

// Throws std::runtime_error, with the path, where that fails.
void write_file(const std::filesystem::path& path, const std::string& text);

}  // namespace kvarn_eval
