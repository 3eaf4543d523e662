// PolarQuant of Wu et al. (arXiv 2502.00527): the channels i and i + D/2 of a key, which RoPE
// rotates together, as radius and angle; each of both is rounded per pair and group of tokens.
// Values have one range per token.
//
// Radius and angle have `bits` bits each (4: "r4t4"), so that a pair of channels has two codes.
// With the FP16 minimum and the FP16 step (max - min) / 2^bits of a group:
//   code = clamp(floor((x - min) / step), 0, 2^bits - 1),  x^ = min + (code + 1/2) step
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <span>
#include <vector>

#include "../config.hpp"
#include "baseline.hpp"
#include "min_max_groups.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr kv_bits polar_widths[] = {{4, 2}, {4, 4}};

// A step of 0 makes every x^ the stored minimum.
inline void round_to_cell_centres(std::span<float> group, int bits) {
  const auto [least, most] = std::minmax_element(group.begin(), group.end());
  const auto cells = static_cast<float>(1 << bits);
  const float min = stored_float16(*least);
  const float step = *most > min ? stored_float16((*most - min) / cells) : 0.0f;
  for (float& x : group) {
    const float code =
        step > 0.0f ? std::clamp(std::floor((x - min) / step), 0.0f, cells - 1.0f) : 0.0f;
    x = (code + 0.5f) * step + min;  // the product is exact
  }
}

inline void polar_round_trip(const baseline_settings& settings, std::span<float> kv) {
  if (settings.kind == tile_kind::value) return round_trip_per_token(settings, kv);
  constexpr float turn = 2 * std::numbers::pi_v<float>;
  const auto row = static_cast<std::size_t>(settings.head_dim);
  const auto tokens = static_cast<std::size_t>(settings.token_group);
  std::vector<float> radius(tokens);
  std::vector<float> angle(tokens);
  for (std::size_t first = 0; first < kv.size(); first += tokens * row)
    for (std::size_t pair = 0; pair < row / 2; ++pair) {
      const auto x = [&](std::size_t t) -> float& { return kv[first + t * row + pair]; };
      const auto y = [&](std::size_t t) -> float& { return kv[first + t * row + pair + row / 2]; };
      for (std::size_t t = 0; t < tokens; ++t) {
        radius[t] = std::hypot(x(t), y(t));
        angle[t] = std::atan2(y(t), x(t));
        if (angle[t] < 0.0f) angle[t] = angle[t] + turn;
      }
      round_to_cell_centres(radius, settings.bits);
      round_to_cell_centres(angle, settings.bits);
      for (std::size_t t = 0; t < tokens; ++t) {
        x(t) = radius[t] * std::cos(angle[t]);
        y(t) = radius[t] * std::sin(angle[t]);
      }
    }
}

// Keys: minimum and step of radius and of angle for the two channels of a pair.
inline double polar_bits_per_element(const baseline_settings& settings) {
  return settings.kind == tile_kind::key
             ? settings.bits + 2.0 * min_max_group_bits / (2.0 * settings.token_group)
             : bits_per_token_group(settings);
}

inline status polar_check(const baseline_settings& settings) {
  return settings.kind == tile_kind::key ? require_multiple_of(2, settings) : status{};
}

inline constexpr baseline polar{
    .name = "polar",
    .summary = "PolarQuant r4t4: keys as radius and angle of channel pairs, values per token",
    .widths = polar_widths,
    .native = equal_for_all(0, 0, 128),
    .tokens_together = key_groups_together,
    .round_trip = polar_round_trip,
    .bits_per_element = polar_bits_per_element,
    .check = polar_check,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
