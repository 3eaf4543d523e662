// KIVI (Liu et al., arXiv 2402.02750): keys per channel, because their outliers stay in a few
// channels; values per token. Rounding as in min_max_groups.hpp, which also gives constant groups a
// meaning (the published code divides by zero there).
//
// As published, keys wait exact until 128 of them are quantised at once, the newest 128 values are
// always exact, and there is no sink.
#pragma once

#include <span>

#include "../config.hpp"
#include "baseline.hpp"
#include "min_max_groups.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline void kivi_round_trip(const baseline_settings& settings, std::span<float> kv) {
  settings.kind == tile_kind::key ? round_trip_per_channel(settings, kv)
                                  : round_trip_per_token(settings, kv);
}

inline double kivi_bits_per_element(const baseline_settings& settings) {
  return settings.kind == tile_kind::key ? bits_per_channel_group(settings)
                                         : bits_per_token_group(settings);
}

inline constexpr baseline kivi{
    .name = "kivi",
    .summary = "KIVI: keys per channel, values per token",
    .widths = two_to_four_bits,
    .native = {.keys = {.step = 128}, .values = {.tail = 128}},
    .tokens_together = key_groups_together,
    .round_trip = kivi_round_trip,
    .bits_per_element = kivi_bits_per_element,
    .check = accept_all_settings,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
