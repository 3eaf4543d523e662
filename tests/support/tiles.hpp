// Tiles to encode: seeded ones with the habits of real keys and values, and those of real models.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "../examples/common/npy.hpp"
#include "kvarn/codec/tile_codec.hpp"
#include "kvarn/metrics.hpp"
#include "support/layouts.hpp"
#include "support/profiles.hpp"

namespace kvarn_test {

// [tokens][head_dim] numbers: channels of unlike size and mean, tokens of unlike size, two outlier
// channels.
inline std::vector<float> random_tokens(int tokens, int head_dim, std::uint64_t seed) {
  gaussian_source random(seed);
  std::vector<double> size, mean;
  for (int d = 0; d < head_dim; ++d) {
    size.push_back(std::exp(0.4 * random.normal()));
    mean.push_back(0.5 * random.normal());
  }
  for (const int outlier : {head_dim / 3, head_dim - 2})
    size[static_cast<std::size_t>(outlier)] *= 8;
  std::vector<float> values;
  for (int t = 0; t < tokens; ++t) {
    const double token_size = std::exp(0.3 * random.normal());
    for (int d = 0; d < head_dim; ++d) {
      const auto i = static_cast<std::size_t>(d);
      values.push_back(static_cast<float>(token_size * size[i] * (mean[i] + random.normal())));
    }
  }
  return values;
}

// Those of kvarn::encoder_infos.
inline constexpr auto encoders = [] {
  std::array<kvarn::encoder, std::size(kvarn::encoder_infos)> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = kvarn::encoder_infos[i].id;
  return all;
}();

inline std::string name_of(kvarn::encoder method) {
  return kvarn::encoder_infos[static_cast<std::size_t>(method)].name;
}

// Independent standard normal numbers.
inline std::vector<float> normal_tokens(int tokens, int head_dim, std::uint64_t seed) {
  gaussian_source random(seed);
  std::vector<float> values(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(head_dim));
  for (float& x : values) x = static_cast<float>(random.normal());
  return values;
}

// The heads of tests/data.
inline constexpr const char* real_heads[] = {
    "smollm2-135m.layer3.head1", "smollm2-135m.layer20.head1", "qwen2.5-coder-1.5b.layer0.head0",
    "qwen2.5-coder-1.5b.layer14.head0"};
inline constexpr int real_sink = 128;  // tokens in front of the tiles of reference.json
inline constexpr int real_tiles = 4;   // of 128 tokens

inline kvarn::tokens_view<const float> view(const std::vector<float>& tokens, int head_dim) {
  return {tokens.data(), head_dim};
}
inline kvarn::tokens_view<float> view(std::vector<float>& tokens, int head_dim) {
  return {tokens.data(), head_dim};
}

// Keys, values and queries of one KV head.
class real_head {
 public:
  explicit real_head(const std::string& name)
      : keys(read(name, "k")), values(read(name, "v")), queries(read(name, "q")) {
    head_dim = static_cast<int>(keys.shape.at(1));
    query_heads = static_cast<int>(queries.shape.at(1));
  }

  // The 128 tokens of a tile behind the sink.
  std::vector<float> tile(kvarn::tile_kind kind, int index) const {
    const auto& all = kind == kvarn::tile_kind::key ? keys.values : values.values;
    const auto first = all.begin() + (real_sink + 128 * index) * head_dim;
    return {first, first + 128 * head_dim};
  }

  // Of the queries up to the tile's last token.
  kvarn::query_moment moment(int index) const {
    kvarn::query_moment result(head_dim);
    result.add(view(queries.values, head_dim), (real_sink + 128 * (index + 1)) * query_heads);
    return result;
  }

  int head_dim;
  int query_heads;
  kvarn_examples::npy_array keys, values, queries;

 private:
  static kvarn_examples::npy_array read(const std::string& name, const std::string& tensor) {
    return kvarn_examples::read_npy(std::string(KVARN_TEST_DATA_DIR) + "/" + name + "." + tensor +
                                    ".npy");
  }
};

// `text` with what a test's name may not have replaced.
inline std::string test_name(std::string text) {
  for (char& c : text)
    if (c == '.' || c == '-' || c == ' ') c = '_';
  return text;
}

struct encoded_tile {
  std::vector<std::byte> record;
  kvarn::encode_report report;
};

inline encoded_tile encode(const kvarn::tile_layout& layout, const std::vector<float>& tokens,
                           const kvarn::encode_options& options = {}) {
  encoded_tile out{std::vector<std::byte>(layout.record_bytes()), {}};
  std::vector<float> workspace(kvarn::encode_workspace(layout));
  out.report = kvarn::encode_tile(view(tokens, layout.head_dim), {out.record.data(), layout},
                                  options, workspace.data());
  return out;
}

inline std::vector<float> decode(const kvarn::tile_layout& layout,
                                 const std::vector<std::byte>& record, bool rotate_back = true) {
  std::vector<float> tokens(static_cast<std::size_t>(layout.group) *
                            static_cast<std::size_t>(layout.head_dim));
  kvarn::decode_tile(kvarn::const_tile_view{record.data(), layout}, view(tokens, layout.head_dim),
                     rotate_back);
  return tokens;
}

// Encoded and decoded.
inline std::vector<float> round_trip(const kvarn::tile_layout& layout,
                                     const std::vector<float>& tokens,
                                     const kvarn::encode_options& options = {}) {
  return decode(layout, encode(layout, tokens, options).record);
}

// Seeded queries of one KV head with a covariance far from the identity.
inline kvarn::query_moment random_moment(int head_dim, int count, std::uint64_t seed) {
  kvarn::query_moment moment(head_dim);
  const auto queries = random_tokens(count, head_dim, seed);
  moment.add(view(queries, head_dim), count);
  return moment;
}

// The factor of a fixed random moment, made once per head_dim.
inline const kvarn::query_factor& fixed_factor(int head_dim) {
  static std::map<int, kvarn::query_factor> factors;
  auto found = factors.find(head_dim);
  if (found == factors.end())
    found = factors.emplace(head_dim, kvarn::query_factor(random_moment(head_dim, 64, 3))).first;
  return found->second;
}

inline kvarn::encode_options options_of(kvarn::encoder method, int head_dim, bool rotate = true) {
  return {.method = method, .rotate = rotate, .factor = &fixed_factor(head_dim)};
}

// The same with one of the encoders, rotated both ways or not at all.
inline std::vector<float> round_trip(const kvarn::tile_layout& layout,
                                     const std::vector<float>& tokens, kvarn::encoder method,
                                     bool rotate = true) {
  return decode(layout, encode(layout, tokens, options_of(method, layout.head_dim, rotate)).record,
                rotate);
}

// Calls body(layout, method) for both kinds and every encoder at one shape of 2 bits.
template <class Body>
void for_kinds_and_encoders(int head_dim, kvarn::scale_type scale, Body body) {
  for (const kvarn::tile_kind kind : {kvarn::tile_kind::key, kvarn::tile_kind::value})
    for (const kvarn::encoder method : encoders) {
      const kvarn::tile_layout layout{.kind = kind, .head_dim = head_dim, .scale = scale};
      SCOPED_TRACE(name_of(layout) + " " + name_of(method));
      body(layout, method);
    }
}

// Squared error relative to the squares of `exact`, over all tokens but one.
inline double error_without(const std::vector<float>& exact, const std::vector<float>& decoded,
                            int head_dim, int token) {
  auto a = exact;
  auto b = decoded;
  for (auto* values : {&a, &b})
    std::fill_n(values->begin() + static_cast<std::ptrdiff_t>(token) * head_dim, head_dim, 0.0f);
  return kvarn::relative_squared_error(a, b);
}

inline bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

inline std::vector<float> scaled(std::vector<float> values, float factor) {
  for (float& x : values) x *= factor;
  return values;
}

}  // namespace kvarn_test
