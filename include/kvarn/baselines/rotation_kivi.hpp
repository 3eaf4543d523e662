// Rotation + KIVI rounding, what the KVarN paper (arXiv 2606.03458) compares as QuaRot: every token
// is rotated by the orthonormal Hadamard matrix, rounded as KIVI does, and rotated back.
#pragma once

#include <span>

#include "../config.hpp"
#include "baseline.hpp"
#include "kivi.hpp"
#include "rotation.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline void rotation_kivi_round_trip(const baseline_settings& settings, std::span<float> kv) {
  rotate_blocks(kv, settings.head_dim);
  saturate_to_float16(kv);  // the rotation multiplies a channel by up to sqrt(head_dim)
  kivi_round_trip(settings, kv);
  rotate_blocks(kv, settings.head_dim);
}

inline constexpr baseline rotation_kivi{
    .name = "rotation_kivi",
    .summary = "Hadamard rotation, then KIVI",
    .widths = two_to_four_bits,
    .native = equal_for_all(128, 128, 128),
    .tokens_together = key_groups_together,
    .round_trip = rotation_kivi_round_trip,
    .bits_per_element = kivi_bits_per_element,
    .check = require_rotation,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
