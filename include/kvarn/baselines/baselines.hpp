// The list of all baselines: the one place that names them.
#pragma once

#include <array>
#include <string_view>

#include "../config.hpp"
#include "baseline.hpp"
#include "kitty.hpp"
#include "kivi.hpp"
#include "kvquant.hpp"
#include "llama.hpp"
#include "polar.hpp"
#include "polar_tree.hpp"
#include "quarot_token.hpp"
#include "rotation_kivi.hpp"
#include "rtn.hpp"
#include "turbo.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr std::array baselines{
    rtn_token,      rtn_channel, kivi,     rotation_kivi, quarot_token, kvquant_channels,
    kvquant_sparse, kitty,       turbo,    turbo_nc,      turbo_vllm,   polar,
    polar_tree,     q4_0,        q4_0_rot, q4_1,          q4_1_rot,     iq4_nl,
    iq4_nl_rot,     q8_0,        q8_0_rot};

// The baseline of that name, or null.
constexpr const baseline* find_baseline(std::string_view name) {
  for (const baseline& method : baselines)
    if (method.name == name) return &method;
  return nullptr;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
