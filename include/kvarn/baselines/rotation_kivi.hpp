// Rotation + KIVI rounding, what the KVarN paper (arXiv 2606.03458) compares as QuaRot: every token
// is rotated by the orthonormal Hadamard matrix, rounded as KIVI does, and rotated back.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "../codec/hadamard.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "baseline.hpp"
#include "kivi.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline void rotate_tokens(const baseline_settings& settings, std::span<float> kv) {
  const auto row = static_cast<std::size_t>(settings.head_dim);
  for (std::size_t first = 0; first < kv.size(); first += row)
    hadamard(&kv[first], settings.head_dim);
}

inline void rotation_kivi_round_trip(const baseline_settings& settings, std::span<float> kv) {
  rotate_tokens(settings, kv);
  saturate_to_float16(kv);  // the rotation multiplies a channel by up to sqrt(head_dim)
  kivi_round_trip(settings, kv);
  rotate_tokens(settings, kv);
}

inline status rotation_kivi_check(const baseline_settings& settings) {
  if (hadamard_core(settings.head_dim) != 0) return {};
  return {error_code::invalid_argument,
          "baseline: head_dim is " + std::to_string(settings.head_dim) +
              "; a Hadamard rotation needs m * 2^k with m of 1, 12, 20 or 28"};
}

inline constexpr baseline rotation_kivi{
    .name = "rotation_kivi",
    .summary = "Hadamard rotation, then KIVI",
    .round_trip = rotation_kivi_round_trip,
    .bits_per_element = kivi_bits_per_element,
    .check = rotation_kivi_check,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
