// Seeded tokens with the habits of real keys and values, and tiles that the library made of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kvarn/kvarn.hpp"

namespace kvarn_bench {

// [tokens][head_dim] numbers: channels of unlike size and mean, tokens of unlike size, two outlier
// channels.
inline std::vector<float> random_tokens(int tokens, int head_dim, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> size, mean, values;
  for (int d = 0; d < head_dim; ++d) {
    size.push_back(std::exp(0.4f * normal(random)));
    mean.push_back(0.5f * normal(random));
  }
  for (const int outlier : {head_dim / 3, head_dim - 2})
    size[static_cast<std::size_t>(outlier)] *= 8.0f;
  values.reserve(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(head_dim));
  for (int t = 0; t < tokens; ++t) {
    const float token_size = std::exp(0.3f * normal(random));
    for (int d = 0; d < head_dim; ++d) {
      const auto i = static_cast<std::size_t>(d);
      values.push_back(token_size * size[i] * (mean[i] + normal(random)));
    }
  }
  return values;
}

// [rows][head_dim] query vectors whose logits against random_tokens have a standard deviation near
// 1.5 with a softmax scale of 1/sqrt(head_dim).
inline std::vector<float> random_queries(int rows, int head_dim, std::uint64_t seed) {
  std::vector<float> queries = random_tokens(rows, head_dim, seed);
  double squares = 0;
  for (const float x : queries) squares += static_cast<double>(x) * static_cast<double>(x);
  const auto unit = static_cast<float>(
      0.6 / std::sqrt(squares / (static_cast<double>(rows) * static_cast<double>(head_dim))));
  for (float& x : queries) x *= unit;
  return queries;
}

inline std::vector<kvarn::float16> to_half(const std::vector<float>& numbers) {
  std::vector<kvarn::float16> halves;
  halves.reserve(numbers.size());
  for (const float x : numbers) halves.push_back(kvarn::float16::saturated(x));
  return halves;
}

template <class T>
std::vector<std::byte> to_bytes(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// A moment of 512 seeded queries.
inline kvarn::query_moment random_moment(int head_dim) {
  constexpr int queries = 512;
  const std::vector<float> q = random_queries(queries, head_dim, 5);
  kvarn::query_moment moment(head_dim);
  moment.add(kvarn::tokens_view<const float>{q.data(), head_dim}, queries);
  return moment;
}

// `groups` key records, each followed by its value record, of the encoder `tuned`.
inline std::vector<std::byte> encoded_groups(const kvarn::cache_format& format, int groups) {
  std::vector<std::byte> page(static_cast<std::size_t>(groups) * format.head_bytes());
  std::byte* at = page.data();
  const auto encode = [&](const kvarn::tile_layout& layout, int seed) {
    const auto tokens = to_half(
        random_tokens(layout.group, layout.head_dim, static_cast<std::uint64_t>(100 + seed)));
    kvarn::tile_encoder::make(layout).value()(
        kvarn::tokens_view<const kvarn::float16>{tokens.data(), layout.head_dim}, at);
    at += layout.record_bytes();
  };
  for (int g = 0; g < groups; ++g) {
    encode(format.key_layout(), 2 * g);
    encode(format.value_layout(), 2 * g + 1);
  }
  return page;
}

}  // namespace kvarn_bench
