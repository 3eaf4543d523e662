// Round to nearest, the plainest methods: one range per token, or one per channel and group of
// tokens, for keys and values alike.
#pragma once

#include "../config.hpp"
#include "baseline.hpp"
#include "min_max_groups.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr baseline rtn_token{
    .name = "rtn_token",
    .summary = "round to nearest, one range per token",
    .widths = two_to_four_bits,
    .native = {},
    .tokens_together = one_token,
    .round_trip = round_trip_per_token,
    .bits_per_element = bits_per_token_group,
    .check = accept_all_settings,
};

inline constexpr baseline rtn_channel{
    .name = "rtn_channel",
    .summary = "round to nearest, one range per channel and group of tokens",
    .widths = two_to_four_bits,
    .native = {},
    .tokens_together = token_group_together,
    .round_trip = round_trip_per_channel,
    .bits_per_element = bits_per_channel_group,
    .check = accept_all_settings,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
