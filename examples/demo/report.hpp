// The demo's results as JSON for programs and as a table for people.
//
// report.json: {"heads": {HEAD: {METHOD: {bits_per_element, k_rel_sq_error, ...}}}, ...}; errors
// are ratios, attention_kl is in nats, sizes are in bytes, encode_us_per_tile is null for methods
// that do not pack.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "evaluate.hpp"
#include "heads.hpp"
#include "methods.hpp"

namespace kvarn_demo {

// One head and what each method costs on it, in the order of the methods.
struct head_result {
  std::string name;
  std::size_t tokens = 0;
  std::size_t groups = 0;
  std::size_t query_heads = 0;
  std::size_t key_dim = 0;
  std::size_t value_dim = 0;
  std::vector<evaluation> evaluations;
};

head_result evaluate_all(const head& h, std::span<const method> methods, int repeats = 1);

nlohmann::ordered_json to_json(std::span<const head_result> heads, std::span<const method> methods);

// Creates the folder of `path`. Throws std::runtime_error, with the path, where that or the writing
// fails.
void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& json);

// What the columns mean; the table of one head; the mean over several and a line on what to see.
// Lines have at most 100 characters (longer names of heads excepted).
void print_legend(std::ostream& out);
void print_head(std::ostream& out, const head_result& head, std::span<const method> methods);
void print_summary(std::ostream& out, std::span<const head_result> heads,
                   std::span<const method> methods);

// implementation

inline head_result evaluate_all(const head& h, std::span<const method> methods, int repeats) {
  head_result result{h.name, h.tokens, h.groups(), h.query_heads, h.key_dim, h.value_dim, {}};
  for (const method& m : methods) result.evaluations.push_back(evaluate(h, m, repeats));
  return result;
}

namespace detail {

inline evaluation mean_of_method(std::span<const head_result> heads, std::size_t method_index) {
  std::vector<evaluation> of_method;
  for (const head_result& head : heads) of_method.push_back(head.evaluations[method_index]);
  return mean_over_heads(of_method);
}

inline nlohmann::ordered_json to_json(const evaluation& e) {
  return {
      {"bits_per_element", e.size().bits_per_element()},
      {"k_bits_per_element", e.key_size.bits_per_element()},
      {"v_bits_per_element", e.value_size.bits_per_element()},
      {"bytes", e.size().bytes},
      {"fp16_bytes", e.size().fp16_bytes()},
      {"k_rel_sq_error", e.k_rel_sq_error},
      {"v_rel_sq_error", e.v_rel_sq_error},
      {"e_m_share", e.e_m_share},
      {"attention_kl", e.attention_kl},
      {"output_rel_sq_error", e.output_rel_sq_error},
      {"output_rel_sq_error_v_only", e.output_rel_sq_error_v_only},
      {"encode_us_per_tile", e.encode_us_per_tile ? nlohmann::ordered_json(*e.encode_us_per_tile)
                                                  : nlohmann::ordered_json()}};
}

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char line[256];
  std::snprintf(line, sizeof line, pattern, args...);
  return line;
}

// Three significant digits.
inline std::string digits(double value) {
  std::string text = format("%#.3g", value);
  if (text.back() == '.') text.pop_back();
  return text;
}

inline void print_rows(std::ostream& out, std::span<const method> methods,
                       std::span<const evaluation> evaluations) {
  constexpr const char* header = "    %-21s %7s %9s %9s %6s %9s %9s %6s %8s\n";
  out << format(header, "method", "bits", "K error", "V error", "E_M", "attn KL", "out error",
                "saved", "encode")
      << format(header, "", "/elem", "rel.sq.", "rel.sq.", "%", "nats", "rel.sq.", "%", "us/tile");
  const method* previous = nullptr;
  for (std::size_t i = 0; i < methods.size(); ++i) {
    const method& m = methods[i];
    const evaluation& e = evaluations[i];
    if (previous != nullptr &&
        (previous->key_bits != m.key_bits || previous->value_bits != m.value_bits))
      out << '\n';
    previous = &m;
    out << format("  %c %-21s %7.4f %9s %9s %6.2f %9s %9s %6.1f %8s\n", m.is_ours ? '*' : ' ',
                  m.name.c_str(), e.size().bits_per_element(), digits(e.k_rel_sq_error).c_str(),
                  digits(e.v_rel_sq_error).c_str(), 100 * e.e_m_share,
                  digits(e.attention_kl).c_str(), digits(e.output_rel_sq_error).c_str(),
                  100 * (1 - e.size().bytes / e.size().fp16_bytes()),
                  e.encode_us_per_tile ? format("%.1f", *e.encode_us_per_tile).c_str() : "-");
  }
}

}  // namespace detail

inline nlohmann::ordered_json to_json(std::span<const head_result> heads,
                                      std::span<const method> methods) {
  nlohmann::ordered_json json;
  for (const head_result& head : heads)
    for (std::size_t i = 0; i < methods.size(); ++i)
      json["heads"][head.name][methods[i].name] = detail::to_json(head.evaluations[i]);
  for (std::size_t i = 0; i < methods.size(); ++i)
    json["mean"][methods[i].name] = detail::to_json(detail::mean_of_method(heads, i));
  for (const head_result& head : heads)
    json["data"][head.name] = {{"tokens", head.tokens},
                               {"groups", head.groups},
                               {"query_heads", head.query_heads},
                               {"key_dim", head.key_dim},
                               {"value_dim", head.value_dim}};
  for (const method& m : methods)
    json["methods"][m.name] = {{"key_bits", m.key_bits},
                               {"value_bits", m.value_bits},
                               {"packed", m.baseline == nullptr},
                               {"ours", m.is_ours}};
  json["protocol"] = {{"sink", sink}, {"group", group}, {"tail", tail}, {"queries", tail}};
  return json;
}

inline void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& json) {
  const std::filesystem::path folder = path.parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (error) detail::fail(folder, "cannot be created: " + error.message());
  std::ofstream file(path);
  // Names of heads are names of files, which need not be UTF-8.
  file << json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
  file.close();
  if (!file) detail::fail(path, "cannot be written");
}

inline void print_legend(std::ostream& out) {
  out << "Keys and values of attention heads, quantised by every method and compared with the "
         "exact.\n"
         "The first "
      << sink << " tokens (sink) and the last " << tail << " or more (tail) stay exact; groups of "
      << group
      << " between\nthem are quantised.\n"
         "\n"
         "  K, V error  sum of squared errors / sum of squares\n"
         "  E_M         share of magnitude in the error of keys (the rest is direction)\n"
         "  attn KL     KL(exact softmax, softmax with quantised keys), mean over the last "
      << tail
      << " queries\n"
         "  out error   squared error / squares of their attention output\n"
         "  saved       bytes against FP16, of the quantised tokens\n"
         "  encode      time per tile, one core; - is not packed; query_aware: with its factor of "
         "C\n"
         "  *           an encoder of this library\n";
}

inline void print_head(std::ostream& out, const head_result& head,
                       std::span<const method> methods) {
  const std::string dim =
      head.key_dim == head.value_dim
          ? std::to_string(head.key_dim)
          : std::to_string(head.key_dim) + " (K), " + std::to_string(head.value_dim) + " (V)";
  out << '\n'
      << head.name << ": head_dim " << dim << ", " << head.query_heads << " query heads, "
      << head.tokens << " tokens, " << head.groups << " groups\n\n";
  detail::print_rows(out, methods, head.evaluations);
}

inline void print_summary(std::ostream& out, std::span<const head_result> heads,
                          std::span<const method> methods) {
  std::vector<evaluation> means;
  for (std::size_t i = 0; i < methods.size(); ++i)
    means.push_back(detail::mean_of_method(heads, i));
  if (heads.size() > 1) {
    out << "\nmean over " << heads.size()
        << " heads: geometric for errors and E_M, arithmetic for time\n\n";
    detail::print_rows(out, methods, means);
  }

  const auto find = [&](std::string_view name) -> const evaluation* {
    for (std::size_t i = 0; i < methods.size(); ++i)
      if (methods[i].name == name) return &means[i];
    return nullptr;
  };
  const evaluation* ours = find("query_aware_k2v2");
  const evaluation* paper = find("paper_k2v2");
  const evaluation* more_bits = find("paper_k3v3");
  if (ours != nullptr && paper != nullptr && more_bits != nullptr && paper->attention_kl > 0 &&
      more_bits->attention_kl > 0)
    out << detail::format(
        "\nSee attn KL: query_aware_k2v2 has %.2f x that of paper_k2v2 (same bytes), "
        "%.2f x paper_k3v3's.\n",
        ours->attention_kl / paper->attention_kl, ours->attention_kl / more_bits->attention_kl);
}

}  // namespace kvarn_demo
