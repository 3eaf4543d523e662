// The demo's input: keys, values and queries of attention heads, from a folder of .npy files.
//
// A head is three files, float16 or float32, after RoPE and not rotated:
//   STEM.k.npy  [tokens][key head_dim]
//   STEM.v.npy  [tokens][value head_dim]
//   STEM.q.npy  [tokens][query heads of this KV head][key head_dim]
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "../common/npy.hpp"
#include "kvarn/format/tile_layout.hpp"

namespace kvarn_demo {

// Which tokens of a head are quantised: after the exact sink as many whole groups as leave an exact
// tail of at least `tail` tokens. The last `tail` queries are those that are measured.
inline constexpr std::size_t sink = 128;
inline constexpr std::size_t group = 128;
inline constexpr std::size_t tail = 128;

struct head {
  std::string name;  // the stem of its files
  std::size_t tokens = 0;
  std::size_t query_heads = 0;
  std::size_t key_dim = 0;
  std::size_t value_dim = 0;
  std::vector<float> keys;     // [tokens][key_dim]
  std::vector<float> values;   // [tokens][value_dim]
  std::vector<float> queries;  // [tokens][query_heads][key_dim]

  std::size_t groups() const { return (tokens - sink - tail) / group; }

  // Those of the last `tail` tokens.
  std::span<const float> measured_queries() const {
    return std::span(queries).last(tail * query_heads * key_dim);
  }

  // The tokens that are quantised.
  std::span<const float> quantised_part(const std::vector<float>& kv, std::size_t dim) const {
    return std::span(kv).subspan(sink * dim, groups() * group * dim);
  }
};

// The stems of all heads in `folder`, sorted. Throws std::runtime_error where it is not a folder,
// has no head, or a head lacks one of its files.
std::vector<std::string> find_heads(const std::filesystem::path& folder);

// Throws std::runtime_error, with the file and the value at fault, where files cannot be read or
// contradict each other, a head_dim has no record, tokens are too few for one group, or a number is
// not finite.
head load_head(const std::filesystem::path& folder, const std::string& name);

// implementation

namespace detail {

inline constexpr std::array head_suffixes{".k.npy", ".v.npy", ".q.npy"};

[[noreturn]] inline void fail(const std::filesystem::path& path, const std::string& what) {
  throw std::runtime_error(path.string() + ": " + what);
}

inline std::string shape_text(const std::vector<std::size_t>& shape) {
  std::string text;
  for (const std::size_t extent : shape)
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

inline std::vector<float> load_values(const std::filesystem::path& path, std::size_t dimensions,
                                      const char* meaning, std::vector<std::size_t>& shape) {
  kvarn_examples::npy_array array = kvarn_examples::read_npy(path.string());
  if (array.shape.size() != dimensions)
    fail(path, "shape is " + shape_text(array.shape) + "; it must be " + meaning);
  for (std::size_t i = 0; i < array.values.size(); ++i)
    if (!std::isfinite(array.values[i]))
      fail(path, "number " + std::to_string(i) + " is " + std::to_string(array.values[i]) +
                     "; all must be finite");
  shape = std::move(array.shape);
  return std::move(array.values);
}

inline void check_head_dim(const std::filesystem::path& path, kvarn::tile_kind kind,
                           std::size_t head_dim) {
  const auto clipped = static_cast<int>((std::min)(head_dim, std::size_t{1} << 30));
  const auto status = kvarn::validate(
      kvarn::tile_layout{.kind = kind, .head_dim = clipped, .group = static_cast<int>(group)});
  if (!status.ok()) fail(path, status.message());
}

}  // namespace detail

inline std::vector<std::string> find_heads(const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(folder, error))
    detail::fail(folder, fs::exists(folder, error) ? "is not a folder" : "there is no such folder");

  std::map<std::string, std::array<bool, 3>> found;
  fs::directory_iterator entries(folder, error);
  if (error) detail::fail(folder, "cannot be listed: " + error.message());
  for (const auto& entry : entries) {
    const std::string file = entry.path().filename().string();
    for (std::size_t i = 0; i < detail::head_suffixes.size(); ++i) {
      const std::string_view suffix = detail::head_suffixes[i];
      if (file.size() > suffix.size() && file.ends_with(suffix))
        found[file.substr(0, file.size() - suffix.size())][i] = true;
    }
  }
  if (found.empty()) detail::fail(folder, "no head here: there is no file named STEM.k.npy");

  std::vector<std::string> names;
  for (const auto& [name, present] : found) {
    for (std::size_t i = 0; i < present.size(); ++i)
      if (!present[i])
        detail::fail(folder / (name + detail::head_suffixes[i]),
                     "is missing; a head needs STEM.k.npy, STEM.v.npy and STEM.q.npy");
    names.push_back(name);
  }
  return names;
}

inline head load_head(const std::filesystem::path& folder, const std::string& name) {
  const auto path = [&](std::size_t i) { return folder / (name + detail::head_suffixes[i]); };
  std::vector<std::size_t> k, v, q;
  head h;
  h.name = name;
  h.keys = detail::load_values(path(0), 2, "[tokens, head_dim]", k);
  h.values = detail::load_values(path(1), 2, "[tokens, head_dim]", v);
  h.queries = detail::load_values(path(2), 3, "[tokens, query heads, head_dim]", q);
  h.tokens = k[0];
  h.key_dim = k[1];
  h.value_dim = v[1];
  h.query_heads = q[1];

  detail::check_head_dim(path(0), kvarn::tile_kind::key, h.key_dim);
  detail::check_head_dim(path(1), kvarn::tile_kind::value, h.value_dim);
  constexpr std::size_t fewest = sink + group + tail;
  if (h.tokens < fewest)
    detail::fail(path(0), std::to_string(h.tokens) + " tokens; at least " + std::to_string(fewest) +
                              " are needed (" + std::to_string(sink) + " exact, one group of " +
                              std::to_string(group) + ", " + std::to_string(tail) + " exact)");
  if (v[0] != h.tokens)
    detail::fail(path(1), std::to_string(v[0]) + " tokens; " + path(0).filename().string() +
                              " has " + std::to_string(h.tokens));
  if (q[0] != h.tokens || q[2] != h.key_dim)
    detail::fail(path(2), "shape is " + detail::shape_text(q) + "; with " +
                              path(0).filename().string() + " of " + detail::shape_text(k) +
                              " it must be [" + std::to_string(h.tokens) + ", query heads, " +
                              std::to_string(h.key_dim) + "]");
  return h;
}

}  // namespace kvarn_demo
