// QuaRot's own quantiser of keys and values (Ashkboos et al., arXiv 2404.00456): every token is
// rotated, clipped to 0.95 of its range, and rounded on a grid that contains 0.
//
// Of a group (a token, or channel_group channels of it), with 0 counted to its numbers:
//   step = float16(0.95 (max - min) / (2^bits - 1))
//   zero = round(-0.95 min / step), an integer of `bits` bits
//   code = clamp(round(x / step) + zero, 0, 2^bits - 1)
//   x^   = (code - zero) * step
// A step of 0 makes every x^ 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "../config.hpp"
#include "baseline.hpp"
#include "rotation.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr float quarot_clip = 0.95f;

inline void round_integer_zero_group(std::span<float> group, int bits) {
  const auto [least, most] = std::minmax_element(group.begin(), group.end());
  const float min = quarot_clip * (std::min)(*least, 0.0f);
  const float max = quarot_clip * (std::max)(*most, 0.0f);
  const auto levels = static_cast<float>((1 << bits) - 1);
  const float step = stored_float16((max - min) / levels);
  const float zero = step > 0.0f ? (std::min)(std::nearbyint(-min / step), levels) : 0.0f;
  for (float& x : group) {
    const float code =
        step > 0.0f ? std::clamp(std::nearbyint(x / step) + zero, 0.0f, levels) : zero;
    x = (code - zero) * step;
  }
}

inline void quarot_token_round_trip(const baseline_settings& settings, std::span<float> kv) {
  rotate_blocks(kv, settings.head_dim);
  const auto group = static_cast<std::size_t>(settings.channels_per_group());
  for (std::size_t first = 0; first < kv.size(); first += group)
    round_integer_zero_group(kv.subspan(first, group), settings.bits);
  rotate_blocks(kv, settings.head_dim);
}

inline double quarot_token_bits_per_element(const baseline_settings& settings) {
  return settings.bits + (16.0 + settings.bits) / settings.channels_per_group();
}

inline constexpr baseline quarot_token{
    .name = "quarot_token",
    .summary = "QuaRot: rotation, one clipped range with an integer zero per token",
    .widths = two_to_four_bits,
    .native = {},
    .tokens_together = one_token,
    .round_trip = quarot_token_round_trip,
    .bits_per_element = quarot_token_bits_per_element,
    .check = require_rotation,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
