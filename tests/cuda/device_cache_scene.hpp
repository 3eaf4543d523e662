// Caches that the tests of the cache on a device make.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/attention_formats.hpp"
#include "kvarn/cache/kv_cache.hpp"

namespace kvarn_test {

inline constexpr int scene_kv_heads = 2;
inline constexpr int scene_heads = 3;  // per KV head

struct device_cache_scene {
  kvarn::cache_config config;
  std::vector<kvarn::layer_bits> bits;
};

// `kind` 0: head dimension 128, groups of 128, three kinds of layers; 1: keys and values of
// different widths, groups of 64.
inline device_cache_scene device_cache_scene_of(int kind) {
  device_cache_scene s;
  s.config.format = attention_formats[kind == 0 ? 0 : 3];
  s.bits = kind == 0 ? std::vector<kvarn::layer_bits>{{2, 2}, kvarn::exact_layer, {4, 4}}
                     : std::vector<kvarn::layer_bits>{{3, 3}, {3, 3}};
  s.config.layers = static_cast<int>(s.bits.size());
  s.config.kv_heads = scene_kv_heads;
  s.config.query_heads = scene_kv_heads * scene_heads;
  s.config.sink = kind == 0 ? 30 : 5;
  s.config.tail = kind == 0 ? 0 : 20;
  s.config.max_sequences = 6;
  s.config.page_count = 14;
  s.config.exact_memory = std::size_t{256} << 20;
  return s;
}

}  // namespace kvarn_test
