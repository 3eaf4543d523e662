// The list of all baselines: the one place that names them.
#pragma once

#include <array>
#include <string_view>

#include "../config.hpp"
#include "baseline.hpp"
#include "kivi.hpp"
#include "rotation_kivi.hpp"
#include "rtn.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr std::array baselines{rtn_token, rtn_channel, kivi, rotation_kivi};

// The baseline of that name, or null.
constexpr const baseline* find_baseline(std::string_view name) {
  for (const baseline& method : baselines)
    if (method.name == name) return &method;
  return nullptr;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
