#include "results.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "json_number.hpp"
#include "statistics.hpp"

namespace kvarn_eval {

namespace {

using json = nlohmann::ordered_json;

std::vector<float> numbers_of(const json& j) {
  std::vector<float> numbers;
  for (const json& number : j) numbers.push_back(static_cast<float>(number_of(number)));
  return numbers;
}

std::string bits_of(const std::vector<char>& flags) {
  std::string text;
  for (const char flag : flags) text += flag != 0 ? '1' : '0';
  return text;
}

std::vector<char> flags_of(const std::string& bits) {
  std::vector<char> flags;
  for (const char bit : bits) flags.push_back(bit == '1');
  return flags;
}

// The members of head_errors that are means over windows.
constexpr std::pair<const char*, double head_errors::*> head_fields[] = {
    {"k_rel_sq_error", &head_errors::key},        {"v_rel_sq_error", &head_errors::value},
    {"e_m_share", &head_errors::magnitude_share}, {"token_scale_error", &head_errors::token_scale},
    {"attention_kl", &head_errors::attention_kl}, {"output_rel_sq_error", &head_errors::output}};

json json_of(const head_errors& e) {
  json j{{"layer", e.layer}, {"head", e.head}};
  for (const auto& [name, field] : head_fields) j[name] = e.*field;
  return j;
}

head_errors head_of(const json& j) {
  head_errors e{.layer = j.at("layer"), .head = j.at("head")};
  for (const auto& [name, field] : head_fields) e.*field = number_of(j.at(name));
  return e;
}

json json_of(const summary& s) {
  return {{"positions", s.positions},   {"kl_mean", s.kl_mean},
          {"kl_median", s.kl_median},   {"kl_p99", s.kl_p99},
          {"kl_max", s.kl_max},         {"top1", s.top1},
          {"perplexity", s.perplexity}, {"exact_perplexity", s.exact_perplexity}};
}

// Throws unless both have the same members, in any order.
void require_equal(const std::filesystem::path& path, const json& there, const json& here) {
  const auto text = [](const json& settings, const std::string& name) {
    return settings.contains(name) ? settings.at(name).dump() : "missing";
  };
  for (const json* settings : {&here, &there})
    for (const auto& [name, value] : settings->items())
      if (!here.contains(name) || !there.contains(name) || here.at(name) != there.at(name))
        throw std::runtime_error(path.string() + ": was made with other settings: " + name +
                                 " is " + text(there, name) + " there, " + text(here, name) +
                                 " here. Take another folder (--out), or let the results of these "
                                 "windows and methods be computed again (--fresh)");
}

// Null where there is no such file, or a damaged one. Throws where it has other settings.
json load_json(const std::filesystem::path& path, const json& settings) {
  std::ifstream file(path);
  json j = json::parse(file, nullptr, false);
  if (!j.is_object() || !j.contains("settings") || !j.at("settings").is_object()) return nullptr;
  require_equal(path, j.at("settings"), settings);
  return j;
}

// The folder, with one for windows in it.
std::filesystem::path made(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder / "windows", error);
  if (error) throw std::runtime_error(folder.string() + ": cannot be created: " + error.message());
  return folder;
}

void remove_file(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::remove(path, error);
  if (error) throw std::runtime_error(path.string() + ": cannot be deleted: " + error.message());
}

// read(), or nothing where that meets JSON that is not as it was written, or null.
template <class Read>
auto unless_damaged(const Read& read) -> decltype(read()) {
  try {
    return read();
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

// Means over the windows, head by head; heads in the same order in all.
std::vector<head_errors> mean_heads(const std::vector<method_result>& windows) {
  std::vector<head_errors> means = windows.front().heads;
  for (const auto& [name, field] : head_fields)
    for (std::size_t i = 0; i < means.size(); ++i) {
      double sum = 0;
      for (const method_result& w : windows) sum += w.heads[i].*field;
      means[i].*field = sum / static_cast<double>(windows.size());
    }
  return means;
}

// The positions of each window, in thirds: third i of all windows together. Precondition: a window
// has at least three.
summary third_of(const evaluation& all, const std::vector<method_result>& windows, std::size_t i) {
  token_scores scores;
  std::vector<float> nll;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const std::size_t count = windows[w].pseudo_decode.kl.size();
    const std::size_t first = count * i / 3;
    const std::size_t end = count * (i + 1) / 3;
    append(scores, part_of(windows[w].pseudo_decode, first, end - first));
    nll.insert(nll.end(), all.exact[w].nll.begin() + static_cast<std::ptrdiff_t>(first),
               all.exact[w].nll.begin() + static_cast<std::ptrdiff_t>(end));
  }
  return summarize(scores, nll);
}

summary summary_of(const evaluation& all, const std::vector<method_result>& windows) {
  token_scores scores;
  std::vector<float> nll;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    append(scores, windows[w].pseudo_decode);
    nll.insert(nll.end(), all.exact[w].nll.begin(), all.exact[w].nll.end());
  }
  return summarize(scores, nll);
}

// Mean KL of each group of positions, over all windows: [{position, kl, static_kl}].
json by_position(const evaluation& all, const std::vector<method_result>& windows) {
  json bins = json::array();
  const auto group = static_cast<std::size_t>(all.group);
  const auto first = static_cast<std::size_t>(all.first_scored);
  for (std::size_t start = 0;; start += group) {
    std::vector<float> kl, static_kl;
    for (const method_result& w : windows)
      for (std::size_t i = start; i < (std::min)(start + group, w.pseudo_decode.kl.size()); ++i) {
        kl.push_back(w.pseudo_decode.kl[i]);
        if (!w.static_kl.empty()) static_kl.push_back(w.static_kl[i]);
      }
    if (kl.empty()) return bins;
    json bin{{"position", first + start}, {"kl", mean(kl)}};
    if (!static_kl.empty()) bin["static_kl"] = mean(static_kl);
    bins.push_back(bin);
  }
}

bool has_heads(const std::vector<method_result>& windows) {
  return std::ranges::all_of(windows, [&](const method_result& w) {
    return !w.heads.empty() && w.heads.size() == windows.front().heads.size();
  });
}

}  // namespace

double perplexity_of_all(const exact_result& exact) {
  std::vector<float> nll = exact.skipped_nll;
  nll.insert(nll.end(), exact.nll.begin(), exact.nll.end());
  return std::exp(mean(nll));
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  // Under another name first: who is stopped while writing leaves the old file, or none.
  const std::filesystem::path part = path.string() + ".part";
  std::ofstream file(part, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(part, path, error);
  if (!file || error) throw std::runtime_error(path.string() + ": cannot be written");
}

result_folder::result_folder(const std::filesystem::path& folder)
    : folder_(made(folder)), lock_(folder_) {}

std::filesystem::path result_folder::file_of(const std::string& window,
                                             const std::string& method) const {
  return folder_ / "windows" / (window + "." + method + ".json");
}

std::optional<exact_result> result_folder::load_exact(const window_key& window) const {
  const json j = load_json(file_of(window.name, "exact"), window.settings);
  return unless_damaged([&]() -> std::optional<exact_result> {
    exact_result r{numbers_of(j.at("nll")), numbers_of(j.at("skipped_nll"))};
    if (r.nll.size() != window.scored || r.skipped_nll.size() != window.skipped)
      return std::nullopt;
    return r;
  });
}

std::optional<method_result> result_folder::load(const window_key& window,
                                                 const std::string& method) const {
  const json j = load_json(file_of(window.name, method), window.settings);
  return unless_damaged([&]() -> std::optional<method_result> {
    method_result r;
    r.bits = j.at("bits");
    r.seconds = j.at("seconds");
    r.pseudo_decode = {numbers_of(j.at("kl")), numbers_of(j.at("nll")), flags_of(j.at("agrees"))};
    r.static_kl = numbers_of(j.at("static_kl"));
    for (const json& head : j.at("heads")) r.heads.push_back(head_of(head));
    const token_scores& scores = r.pseudo_decode;
    for (const std::size_t count : {scores.kl.size(), scores.nll.size(), scores.agrees.size(),
                                    r.static_kl.empty() ? window.scored : r.static_kl.size()})
      if (count != window.scored) return std::nullopt;
    return r;
  });
}

void result_folder::save_exact(const window_key& window, const exact_result& result) const {
  const json j{
      {"settings", window.settings}, {"nll", result.nll}, {"skipped_nll", result.skipped_nll}};
  write_file(file_of(window.name, "exact"), j.dump());
}

void result_folder::save(const window_key& window, const std::string& method,
                         const method_result& result) const {
  json heads = json::array();
  for (const head_errors& e : result.heads) heads.push_back(json_of(e));
  const json j{{"settings", window.settings},     {"bits", result.bits},
               {"seconds", result.seconds},       {"kl", result.pseudo_decode.kl},
               {"nll", result.pseudo_decode.nll}, {"agrees", bits_of(result.pseudo_decode.agrees)},
               {"static_kl", result.static_kl},   {"heads", heads}};
  write_file(file_of(window.name, method), j.dump());
}

std::optional<retrieval_result> result_folder::load_retrieval(const std::string& name,
                                                              const json& settings) const {
  const json j = load_json(file_of(name, "result"), settings);
  return unless_damaged([&] { return std::optional(retrieval_of(j.at("result"))); });
}

void result_folder::save_retrieval(const std::string& name, const json& settings,
                                   const retrieval_result& result) const {
  write_file(file_of(name, "result"),
             json{{"settings", settings}, {"result", to_json(result)}}.dump());
}

void result_folder::forget(const std::string& window, const std::string& method) const {
  remove_file(file_of(window, method));
}

void result_folder::forget_retrieval(const std::string& name) const {
  remove_file(file_of(name, "result"));
}

json to_json(const evaluation& all) {
  json report{{"settings", all.settings}, {"windows", json::array()}, {"methods", json::array()}};
  for (std::size_t w = 0; w < all.windows.size(); ++w) {
    const exact_result& exact = all.exact[w];
    report["windows"].push_back({{"name", all.windows[w].name},
                                 {"tokens", exact.nll.size() + exact.skipped_nll.size() + 1},
                                 {"exact_perplexity", std::exp(mean(exact.nll))},
                                 {"exact_perplexity_of_all", perplexity_of_all(exact)}});
  }
  for (std::size_t m = 0; m < all.methods.size(); ++m) {
    const auto& windows = all.results[m];
    json j{{"name", all.methods[m]}, {"bits_per_element", windows.front().bits}};
    j["all"] = json_of(summary_of(all, windows));
    double seconds = 0;
    for (const method_result& w : windows) seconds += w.seconds;
    j["seconds"] = seconds;
    j["thirds"] = json::array();
    if (windows.front().pseudo_decode.kl.size() >= 3)
      for (std::size_t i = 0; i < 3; ++i) j["thirds"].push_back(json_of(third_of(all, windows, i)));
    j["windows"] = json::array();
    for (std::size_t w = 0; w < windows.size(); ++w)
      j["windows"].push_back(json_of(summarize(windows[w].pseudo_decode, all.exact[w].nll)));
    j["by_position"] = by_position(all, windows);
    j["heads"] = json::array();
    if (has_heads(windows))
      for (const head_errors& e : mean_heads(windows)) j["heads"].push_back(json_of(e));
    report["methods"].push_back(j);
  }
  report["retrieval"] = all.retrieval;
  return report;
}

std::string to_csv(const evaluation& all) {
  std::string csv =
      "method,bits_per_element,window,positions,kl_mean,kl_median,kl_p99,kl_max,top1,perplexity,"
      "exact_perplexity\n";
  const auto line = [&](const std::string& method, double bits, const std::string& window,
                        const summary& s) {
    char text[256];
    std::snprintf(text, sizeof(text), ",%.6g,%s,%zu,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n", bits,
                  window.c_str(), s.positions, s.kl_mean, s.kl_median, s.kl_p99, s.kl_max, s.top1,
                  s.perplexity, s.exact_perplexity);
    csv += method + text;
  };
  for (std::size_t m = 0; m < all.methods.size(); ++m) {
    const auto& windows = all.results[m];
    const double bits = windows.front().bits;
    for (std::size_t w = 0; w < windows.size(); ++w)
      line(all.methods[m], bits, all.windows[w].name,
           summarize(windows[w].pseudo_decode, all.exact[w].nll));
    line(all.methods[m], bits, "all", summary_of(all, windows));
  }
  return csv;
}

void print_table(std::ostream& out, const evaluation& all) {
  std::size_t width = 6;
  for (const std::string& name : all.methods) width = (std::max)(width, name.size());
  char text[256];
  std::snprintf(text, sizeof(text), "%-*s %5s %9s %9s %9s %7s %9s", static_cast<int>(width),
                "method", "bits", "KL mean", "median", "p99", "top-1", "ppl");
  out << text;
  for (std::size_t w = 0; w < all.windows.size(); ++w) {
    std::snprintf(text, sizeof(text), " %9s", all.windows[w].name.c_str());
    out << text;
  }
  out << '\n';
  for (std::size_t m = 0; m < all.methods.size(); ++m) {
    const summary s = summary_of(all, all.results[m]);
    std::snprintf(text, sizeof(text), "%-*s %5.2f %9.4f %9.4f %9.4f %6.2f%% %9.3f",
                  static_cast<int>(width), all.methods[m].c_str(), all.results[m].front().bits,
                  s.kl_mean, s.kl_median, s.kl_p99, 100 * s.top1, s.perplexity);
    out << text;
    for (std::size_t w = 0; w < all.windows.size(); ++w) {
      std::snprintf(text, sizeof(text), " %9.4f", mean(all.results[m][w].pseudo_decode.kl));
      out << text;
    }
    out << '\n';
  }
}

}  // namespace kvarn_eval
