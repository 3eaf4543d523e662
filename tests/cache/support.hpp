// What tests of the cache share: a small configuration, tokens from seeds, short calls.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <numeric>
#include <vector>

#include "kvarn/cache/cache_file.hpp"
#include "kvarn/cache/kv_cache.hpp"
#include "model.hpp"

namespace kvarn_test {

// Two layers, two KV heads with two query heads each, head_dim 64, groups of 64, sink of 5.
inline kvarn::cache_config small_config() {
  kvarn::cache_config config;
  config.layers = 2;
  config.kv_heads = 2;
  config.query_heads = 4;
  config.format.key_head_dim = 64;
  config.format.value_head_dim = 64;
  config.format.group = 64;
  config.sink = 5;
  config.max_sequences = 8;
  config.page_count = 16;
  return config;
}

// Counts what is taken from it: now, and at most.
class counting_resource final : public std::pmr::memory_resource {
 public:
  std::size_t bytes = 0;
  std::size_t peak = 0;

 private:
  void* do_allocate(std::size_t size, std::size_t alignment) override {
    bytes += size;
    peak = (std::max)(peak, bytes);
    return std::pmr::new_delete_resource()->allocate(size, alignment);
  }
  void do_deallocate(void* memory, std::size_t size, std::size_t alignment) override {
    bytes -= size;
    std::pmr::new_delete_resource()->deallocate(memory, size, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

// Tokens first, first + 1, ... as seeds.
inline std::vector<std::uint64_t> seeds(std::uint64_t first, int count) {
  std::vector<std::uint64_t> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

// A cache and its configuration, with the calls that tests make over and over.
template <class T = kvarn::float16>
class test_cache {
 public:
  explicit test_cache(const kvarn::cache_config& c, const kvarn::query_factors* factors = nullptr)
      : config(c), cache(kvarn::kv_cache<T>::make(c, factors).value()) {}

  kvarn::cache_config config;
  kvarn::kv_cache<T> cache;
  kvarn::cache_workspace workspace;

  kvarn::sequence_id create() { return cache.create().value(); }

  void append_layer(kvarn::sequence_id id, int layer, const std::vector<std::uint64_t>& tokens) {
    const auto& format = config.format;
    const auto keys = token_tensor(tokens, layer, config.kv_heads, 0, format.key_head_dim);
    const auto values = token_tensor(tokens, layer, config.kv_heads, 1, format.value_head_dim);
    const auto status = cache.append(
        id, layer, kvarn::token_major(keys.data(), config.kv_heads, format.key_head_dim),
        kvarn::token_major(values.data(), config.kv_heads, format.value_head_dim),
        static_cast<int>(tokens.size()));
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void draft(kvarn::sequence_id id, const std::vector<std::uint64_t>& tokens) {
    for (int layer = 0; layer < config.layers; ++layer) append_layer(id, layer, tokens);
  }
  void append(kvarn::sequence_id id, const std::vector<std::uint64_t>& tokens) {
    draft(id, tokens);
    ASSERT_TRUE(cache.commit(id).ok());
  }
  int seal(kvarn::sequence_id id, int most = 1 << 20) {
    return cache.seal(id, most, workspace).value();
  }

  // Output of `tokens` query tokens in one layer, and their log-sum-exp behind it.
  std::vector<float> attend(kvarn::sequence_id id, int layer = 0, int tokens = 1,
                            kvarn::attention_options options = {.softmax_scale = 0.125f}) {
    const auto heads = config.query_heads;
    const auto queries =
        token_tensor(seeds(900, tokens), layer, heads, 3, config.format.key_head_dim);
    const auto outputs = tokens * heads * config.format.value_head_dim;
    std::vector<float> out(static_cast<std::size_t>(outputs + tokens * heads));
    const kvarn::cache_queries<float, float> call{
        kvarn::token_major(queries.data(), heads, config.format.key_head_dim),
        kvarn::token_major(out.data(), heads, config.format.value_head_dim), tokens,
        out.data() + outputs};
    const auto status = cache.attend(id, layer, call, options, workspace);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  // Output of one query token, position length - 1, in double precision from the decoded tokens.
  std::vector<double> reference(kvarn::sequence_id id, int layer) const {
    const auto extent = cache.table().extent(id, layer);
    const auto& storage = cache.storage();
    const auto& format = storage.format(layer);
    const auto& rows = storage.rows(id, layer);
    const int shared = config.query_heads / config.kv_heads;
    const auto queries =
        token_tensor(seeds(900, 1), layer, config.query_heads, 3, format.key_head_dim);
    std::vector<double> out;
    for (int head = 0; head < config.query_heads; ++head) {
      std::vector<float> q(queries.begin() + head * format.key_head_dim,
                           queries.begin() + (head + 1) * format.key_head_dim);
      kvarn::hadamard(q.data(), format.key_head_dim);
      double sum = 0;
      std::vector<double> mean(static_cast<std::size_t>(format.value_head_dim));
      const auto visit = [&](const auto& key, const auto& value, int count) {
        for (int t = 0; t < count; ++t) {
          double logit = 0;
          for (int d = 0; d < format.key_head_dim; ++d)
            logit += 0.125 * static_cast<double>(q[static_cast<std::size_t>(d)]) *
                     static_cast<double>(key.load(t, d));
          sum += std::exp(logit);
          for (int d = 0; d < format.value_head_dim; ++d)
            mean[static_cast<std::size_t>(d)] +=
                std::exp(logit) * static_cast<double>(value.load(t, d));
        }
      };
      const int kv = head / shared;
      const auto& shape = storage.shape();
      visit(rows.sink.keys(shape, kv, 0), rows.sink.values(shape, kv, 0), extent.sink_count);
      for (const auto& page :
           cache.table().pages(id).first(static_cast<std::size_t>(extent.page_count))) {
        const std::byte* const bytes = storage.page(layer, page.page);
        const auto size = static_cast<std::size_t>(format.group);
        std::vector<float> k(size * static_cast<std::size_t>(format.key_head_dim));
        std::vector<float> v(size * static_cast<std::size_t>(format.value_head_dim));
        const kvarn::tokens_view<float> keys{k.data(), format.key_head_dim};
        const kvarn::tokens_view<float> values{v.data(), format.value_head_dim};
        kvarn::decode_tile(
            kvarn::const_tile_view{bytes + format.key_offset(kv), format.key_layout()}, keys,
            false);
        kvarn::decode_tile(
            kvarn::const_tile_view{bytes + format.value_offset(kv), format.value_layout()}, values,
            false);
        visit(keys, values, page.count);
      }
      visit(rows.tail.keys(shape, kv, 0), rows.tail.values(shape, kv, 0), extent.tail_count);
      std::vector<float> rotated;
      for (const double x : mean) rotated.push_back(static_cast<float>(x / sum));
      if (!config.values_rotated) kvarn::hadamard(rotated.data(), format.value_head_dim);
      out.insert(out.end(), rotated.begin(), rotated.end());
    }
    return out;
  }

  // Relative distance of attend from reference, and of two outputs.
  double error(kvarn::sequence_id id, int layer) {
    const auto expected = reference(id, layer);
    auto out = attend(id, layer);
    out.resize(expected.size());
    return distance(std::vector<double>(out.begin(), out.end()), expected);
  }
  static double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double difference = 0, square = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      difference += (a[i] - b[i]) * (a[i] - b[i]);
      square += b[i] * b[i];
    }
    return std::sqrt(difference / square);
  }

  // Every byte that is stored for a sequence: lengths, sealed records, exact rows.
  std::vector<std::byte> bytes(kvarn::sequence_id id) const {
    std::vector<std::byte> all;
    const auto add = [&all](const void* data, std::size_t size) {
      const auto* from = static_cast<const std::byte*>(data);
      all.insert(all.end(), from, from + size);
    };
    const auto& storage = cache.storage();
    for (int layer = 0; layer < config.layers; ++layer) {
      const auto extent = cache.table().extent(id, layer);
      add(&extent.length, sizeof extent.length);
      for (const auto& page : cache.table().pages(id)) {
        add(&page.position, sizeof page.position);
        add(&page.count, sizeof page.count);
        add(storage.page(layer, page.page), storage.page_bytes(layer));
      }
      const auto& rows = storage.rows(id, layer);
      for (const auto* run : {&rows.sink, &rows.tail})
        for (int head = 0; head < config.kv_heads; ++head) {
          const auto size = static_cast<std::size_t>(run->count()) * sizeof(T);
          add(run->keys(storage.shape(), head, 0).data,
              size * static_cast<std::size_t>(config.format.key_head_dim));
          add(run->values(storage.shape(), head, 0).data,
              size * static_cast<std::size_t>(config.format.value_head_dim));
        }
    }
    return all;
  }
};

}  // namespace kvarn_test
