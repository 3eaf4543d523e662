// Asymmetric rounding of groups of numbers between their minimum and maximum, per token (along
// channels) or per channel (along tokens): what most methods are made of. Each group stores an FP16
// minimum and an FP16 step next to its codes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "../config.hpp"
#include "../format/float16.hpp"
#include "baseline.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// The rounding of one group, `count` values `stride` apart, in place:
//
//   zero = float16(min)
//   step = float16((max - zero) / (2^bits - 1)), 0 where max = min or max < zero
//   code = clamp((x - zero) / step, 0, 2^bits - 1), then rounded half to even
//   x^   = code * step + zero        (the product is exact in binary32)
//
// Each rounding happens before what depends on it, so that its error is absorbed: the step covers
// the range above the stored zero, the codes are made with the stored step. A step of 0 (a constant
// group) makes every x^ the zero itself. Precondition: finite values, count > 0.
inline void round_min_max_group(float* values, int count, std::ptrdiff_t stride, int bits) {
  float min = values[0];
  float max = values[0];
  for (int i = 1; i < count; ++i) {
    min = (std::min)(min, values[i * stride]);
    max = (std::max)(max, values[i * stride]);
  }
  const auto levels = static_cast<float>((1 << bits) - 1);
  const float zero = stored_float16(min);
  const float range = max > min && max > zero ? max - zero : 0.0f;
  const float step = stored_float16(range / levels);
  for (int i = 0; i < count; ++i) {
    float& x = values[i * stride];
    const float code =
        step > 0.0f ? std::nearbyint(std::clamp((x - zero) / step, 0.0f, levels)) : 0.0f;
    x = code * step + zero;
  }
}

// Groups of channels_per_group() neighbouring channels of one token.
inline void round_trip_per_token(const baseline_settings& settings, std::span<float> kv) {
  const int group = settings.channels_per_group();
  const auto step = static_cast<std::size_t>(group);
  for (std::size_t first = 0; first < kv.size(); first += step)
    round_min_max_group(&kv[first], group, 1, settings.bits);
}

// Groups of token_group consecutive tokens of one channel.
inline void round_trip_per_channel(const baseline_settings& settings, std::span<float> kv) {
  const auto row = static_cast<std::size_t>(settings.head_dim);
  const auto step = row * static_cast<std::size_t>(settings.token_group);
  for (std::size_t first = 0; first < kv.size(); first += step)
    for (std::size_t channel = 0; channel < row; ++channel)
      round_min_max_group(&kv[first + channel], settings.token_group, settings.head_dim,
                          settings.bits);
}

// Of the FP16 minimum and the FP16 step.
inline constexpr int min_max_group_bits = 16 + 16;

inline double bits_per_token_group(const baseline_settings& settings) {
  return settings.bits + double{min_max_group_bits} / settings.channels_per_group();
}
inline double bits_per_channel_group(const baseline_settings& settings) {
  return settings.bits + double{min_max_group_bits} / settings.token_group;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
