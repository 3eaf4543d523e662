// Numbers in files of results: JSON has none that are not finite, and they are written as null.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>

namespace kvarn_eval {

// The number, or NaN for null.
inline double number_of(const nlohmann::ordered_json& j) {
  return j.is_null() ? std::numeric_limits<double>::quiet_NaN() : j.get<double>();
}

}  // namespace kvarn_eval
