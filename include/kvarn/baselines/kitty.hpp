// Kitty (arXiv 2511.18643): KIVI, but the eighth of the channels of keys with the largest mean
// magnitude has codes of 4 bits, over the same range. A mask of one bit per channel and group says
// which they are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "../config.hpp"
#include "baseline.hpp"
#include "channel_ranking.hpp"
#include "kivi.hpp"
#include "min_max_groups.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr kv_bits kitty_widths[] = {{2, 2}};
inline constexpr int kitty_precise_bits = 4;

inline int kitty_precise_channels(int head_dim) { return (std::max)(1, (head_dim + 4) / 8); }

inline void kitty_round_trip(const baseline_settings& settings, std::span<float> kv) {
  if (settings.kind == tile_kind::value) return kivi_round_trip(settings, kv);
  const auto row = static_cast<std::size_t>(settings.head_dim);
  const std::size_t size = row * static_cast<std::size_t>(settings.token_group);
  for (std::size_t first = 0; first < kv.size(); first += size) {
    const auto group = kv.subspan(first, size);
    const std::vector<bool> precise =
        largest_channels(group, settings.head_dim, kitty_precise_channels(settings.head_dim),
                         [](double x) { return std::abs(x); });
    for (std::size_t channel = 0; channel < row; ++channel)
      round_min_max_group(&group[channel], settings.token_group, settings.head_dim,
                          precise[channel] ? kitty_precise_bits : settings.bits);
  }
}

inline double kitty_bits_per_element(const baseline_settings& settings) {
  const double bits = kivi_bits_per_element(settings);
  if (settings.kind == tile_kind::value) return bits;
  const double share = double(kitty_precise_channels(settings.head_dim)) / settings.head_dim;
  return bits + share * (kitty_precise_bits - settings.bits) + 1.0 / settings.token_group;
}

inline constexpr baseline kitty{
    .name = "kitty",
    .summary = "Kitty: KIVI with an eighth of the key channels at 4 bits",
    .widths = kitty_widths,
    .native = equal_for_all(32, 0, 128),
    .tokens_together = key_groups_together,
    .round_trip = kitty_round_trip,
    .bits_per_element = kitty_bits_per_element,
    .check = accept_all_settings,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
