// Every record layout and every cache format that the library supports, for sweeps.
#pragma once

#include <string>
#include <vector>

#include "kvarn/format/tile_layout.hpp"

namespace kvarn_test {

inline constexpr kvarn::tile_kind tile_kinds[] = {kvarn::tile_kind::key, kvarn::tile_kind::value};
inline constexpr kvarn::scale_type scale_types[] = {kvarn::scale_type::ue5m3,
                                                    kvarn::scale_type::e4m3};

inline std::vector<kvarn::tile_layout> all_layouts() {
  std::vector<kvarn::tile_layout> layouts;
  for (const int head_dim : kvarn::supported_head_dims)
    for (const int group : kvarn::supported_groups)
      for (const int bits : kvarn::supported_bits)
        for (const auto kind : tile_kinds)
          for (const auto scale : scale_types)
            layouts.push_back({kind, head_dim, group, bits, scale});
  return layouts;
}

inline std::vector<kvarn::cache_format> all_formats() {
  std::vector<kvarn::cache_format> formats;
  for (const int key_head_dim : kvarn::supported_head_dims)
    for (const int value_head_dim : kvarn::supported_head_dims)
      for (const int group : kvarn::supported_groups)
        for (const int key_bits : kvarn::supported_bits)
          for (const int value_bits : kvarn::supported_bits)
            for (const auto scale : scale_types)
              formats.push_back({key_head_dim, value_head_dim, group, key_bits, value_bits, scale});
  return formats;
}

inline std::string name_of(const kvarn::tile_layout& layout) {
  return std::string(layout.kind == kvarn::tile_kind::key ? "key" : "value") + " D" +
         std::to_string(layout.head_dim) + " G" + std::to_string(layout.group) + " " +
         std::to_string(layout.bits) + " bits " +
         (layout.scale == kvarn::scale_type::ue5m3 ? "ue5m3" : "e4m3");
}

}  // namespace kvarn_test
