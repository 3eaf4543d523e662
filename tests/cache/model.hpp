// A plain reference for the cache: every sequence keeps its own vectors of exact tokens, and the
// rules of docs/cache.md are written down once more, without sharing, paging or reuse.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvarn/cache/kv_cache.hpp"

namespace kvarn_test {

// Numbers of a token in one layer and head, from the token's seed alone.
inline std::vector<float> token_vector(std::uint64_t token, int layer, int head, int kind,
                                       int dim) {
  std::uint64_t state =
      token * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(layer * 64 + head * 4 + kind);
  std::vector<float> x(static_cast<std::size_t>(dim));
  for (float& value : x) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-30f;
  }
  return x;
}

// [tokens][heads][dim] as an engine passes it.
inline std::vector<float> token_tensor(const std::vector<std::uint64_t>& tokens, int layer,
                                       int heads, int kind, int dim) {
  std::vector<float> all;
  for (const std::uint64_t token : tokens)
    for (int head = 0; head < heads; ++head) {
      const auto x = token_vector(token, layer, head, kind, dim);
      all.insert(all.end(), x.begin(), x.end());
    }
  return all;
}

struct model_config {
  kvarn::cache_config cache;
  std::vector<kvarn::layer_bits> bits;  // cache.bits views them
};

// A token as it is stored: [layer][head], each a key and a value.
template <class T>
struct model_token {
  std::uint64_t seed;
  std::vector<T> rows;

  model_token(std::uint64_t token, const kvarn::cache_config& config) : seed(token) {
    for (int layer = 0; layer < config.layers; ++layer)
      for (int head = 0; head < config.kv_heads; ++head) {
        add(token_vector(token, layer, head, 0, config.format.key_head_dim), !config.keys_rotated);
        add(token_vector(token, layer, head, 1, config.format.value_head_dim),
            !config.values_rotated);
      }
  }

 private:
  void add(std::vector<float> x, bool rotate) {
    const auto dim = static_cast<int>(x.size());
    if (rotate) kvarn::hadamard(x.data(), dim);
    for (const float value : x) {
      T stored;
      kvarn::tokens_view<T>{&stored, dim}.store(0, 0, value);
      rows.push_back(stored);
    }
  }
};

template <class T>
class model_sequence {
 public:
  // The records of one group of tokens: [layer][head].
  struct sealed_records {
    std::vector<std::vector<std::byte>> keys, values;
  };
  struct sealed_tile {
    std::int64_t start;
    int count;
    std::shared_ptr<const sealed_records> records;
  };

  explicit model_sequence(const kvarn::cache_config& config)
      : config_(&config),
        first(config.sink),
        appended(static_cast<std::size_t>(config.layers), 0) {}

  const kvarn::cache_config* config_;
  std::vector<std::shared_ptr<const model_token<T>>> tokens;  // by position, with forgotten ones
  std::int64_t committed = 0;
  std::int64_t first;
  std::vector<std::int64_t> appended;  // by layer
  std::vector<sealed_tile> tiles;
  std::shared_ptr<kvarn::query_moments> moments;

  std::int64_t complete() const { return *std::min_element(appended.begin(), appended.end()); }
  std::int64_t sealed_end() const {
    return tiles.empty() ? first : tiles.back().start + tiles.back().count;
  }
  std::int64_t sink_count(int layer) const {
    return (std::min)(appended[static_cast<std::size_t>(layer)], std::int64_t{config_->sink});
  }
  std::int64_t tail_begin(int layer) const {
    return kvarn::is_exact(*config_, layer) ? first : sealed_end();
  }
  int sealable() const {
    int tiles_now = 0;
    for (std::int64_t end = sealed_end() + config_->format.group; committed - end >= config_->tail;
         end += config_->format.group)
      ++tiles_now;
    return tiles_now;
  }

  // The stored key (kind 0) or value (kind 1) of a token.
  std::span<const T> row(std::int64_t position, int layer, int head, int kind) const {
    const int key = config_->format.key_head_dim;
    const int value = config_->format.value_head_dim;
    const int first = (layer * config_->kv_heads + head) * (key + value) + kind * key;
    return std::span(tokens[static_cast<std::size_t>(position)]->rows)
        .subspan(static_cast<std::size_t>(first),
                 static_cast<std::size_t>(kind == 0 ? key : value));
  }
  // Those of [begin, end).
  std::vector<T> rows(std::int64_t begin, std::int64_t end, int layer, int head, int kind) const {
    std::vector<T> all;
    all.reserve(static_cast<std::size_t>((std::max)(end - begin, std::int64_t{0})) * 80);
    for (std::int64_t p = begin; p < end; ++p) {
      const auto x = row(p, layer, head, kind);
      all.insert(all.end(), x.begin(), x.end());
    }
    return all;
  }

  void seal_one(const kvarn::query_factors* frozen) {
    auto records = std::make_shared<sealed_records>();
    const std::int64_t start = sealed_end();
    const int heads = config_->kv_heads;
    for (int layer = 0; layer < config_->layers; ++layer)
      for (int head = 0; head < heads; ++head) {
        const auto format = kvarn::format_of(*config_, layer);
        const auto encode = [&](const kvarn::tile_layout& layout, int kind) {
          std::vector<std::byte> record;
          if (kvarn::is_exact(*config_, layer)) return record;
          record.resize(layout.record_bytes());
          const auto x = rows(start, start + layout.group, layer, head, kind);
          std::vector<float> workspace(kvarn::encode_workspace(layout));
          const kvarn::query_factor own(moments ? moments->at(layer, head)
                                                : kvarn::query_moment(format.key_head_dim));
          kvarn::encode_tile(kvarn::tokens_view<const T>{x.data(), layout.head_dim},
                             kvarn::tile_view{record.data(), layout},
                             {.method = config_->method,
                              .rotate = false,
                              .factor = frozen != nullptr ? &frozen->at(layer, head) : &own},
                             workspace.data());
          return record;
        };
        records->keys.push_back(encode(format.key_layout(), 0));
        records->values.push_back(encode(format.value_layout(), 1));
      }
    tiles.push_back({start, config_->format.group, records});
  }

  void truncate(std::int64_t position) {
    while (!tiles.empty() && tiles.back().start >= position) tiles.pop_back();
    if (!tiles.empty())
      tiles.back().count = static_cast<int>(
          (std::min)(std::int64_t{tiles.back().count}, position - tiles.back().start));
    if (position < first) first = (std::max)(position, std::int64_t{config_->sink});
    committed = (std::min)(committed, position);
    for (auto& length : appended) length = (std::min)(length, position);
    tokens.resize(static_cast<std::size_t>(position));
  }

  void drop_oldest(int count) {
    for (int i = 0; i < count; ++i) {
      first += tiles.front().count;
      tiles.erase(tiles.begin());
    }
  }

  // The memory of one head, in vectors that live in `keep`.
  struct head_memory {
    std::vector<T> sink_keys, sink_values, tail_keys, tail_values;
    std::vector<kvarn::sealed_group> groups;
    kvarn::attention_memory<T> memory;
  };
  void fill(int layer, int head, head_memory& keep) const {
    const auto length = appended[static_cast<std::size_t>(layer)];
    const std::int64_t sink = sink_count(layer);
    const std::int64_t tail = tail_begin(layer);
    keep.sink_keys = rows(0, sink, layer, head, 0);
    keep.sink_values = rows(0, sink, layer, head, 1);
    keep.tail_keys = rows(tail, length, layer, head, 0);
    keep.tail_values = rows(tail, length, layer, head, 1);
    keep.groups.clear();
    const auto index = static_cast<std::size_t>(layer * config_->kv_heads + head);
    if (!kvarn::is_exact(*config_, layer))
      for (const sealed_tile& tile : tiles)
        keep.groups.push_back({tile.records->keys[index].data(), tile.records->values[index].data(),
                               tile.start, tile.count});
    const auto format = kvarn::format_of(*config_, layer);
    const int k = format.key_head_dim;
    const int v = format.value_head_dim;
    keep.memory = {
        format,
        {{keep.sink_keys.data(), k}, {keep.sink_values.data(), v}, 0, static_cast<int>(sink)},
        keep.groups,
        {{keep.tail_keys.data(), k},
         {keep.tail_values.data(), v},
         tail,
         static_cast<int>((std::max)(length - tail, std::int64_t{0}))}};
  }
};

}  // namespace kvarn_test
