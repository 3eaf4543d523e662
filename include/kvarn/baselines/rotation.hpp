// The Hadamard rotation of tokens, for the methods that round rotated numbers.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "../codec/hadamard.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "baseline.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// Rotates every `block` neighbouring channels of every token by the orthonormal Hadamard matrix, or
// back: it is its own inverse. Precondition: hadamard_core(block) != 0, block divides head_dim.
inline void rotate_blocks(std::span<float> kv, int block) {
  const auto step = static_cast<std::size_t>(block);
  for (std::size_t first = 0; first < kv.size(); first += step) hadamard(&kv[first], block);
}

// For `check` of a method that rotates whole tokens.
inline status require_rotation(const baseline_settings& settings) {
  if (hadamard_core(settings.head_dim) != 0) return {};
  return failure(error_code::invalid_argument,
                 {"baseline: head_dim is ", settings.head_dim,
                  "; a Hadamard rotation needs m * 2^k with m of 1, 12, 20 or 28"});
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
