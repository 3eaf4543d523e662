// The cache types of llama.cpp, for keys and values alike, with and without its rotation.
//
// The rotation (name_rot; llama.cpp's pull request 21038): keys by a Hadamard matrix whose order is
// the largest power of two that divides head_dim, values by one of order 64. It is made where 64
// divides head_dim only, so others are refused here.
#pragma once

#include <span>
#include <string_view>

#include "../config.hpp"
#include "baseline.hpp"
#include "llama_blocks.hpp"
#include "rotation.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr int llama_least_rotation = 64;

template <class Type>
void llama_round_trip(const baseline_settings&, std::span<float> kv) {
  for (std::size_t first = 0; first < kv.size(); first += llama_block_size)
    Type::round(kv.subspan(first).first<llama_block_size>());
}

template <class Type>
void llama_rotated_round_trip(const baseline_settings& settings, std::span<float> kv) {
  const int order = settings.kind == tile_kind::key ? settings.head_dim & -settings.head_dim
                                                    : llama_least_rotation;
  rotate_blocks(kv, order);
  llama_round_trip<Type>(settings, kv);
  rotate_blocks(kv, order);
}

template <class Type>
double llama_bits_per_element(const baseline_settings&) {
  return Type::bits + static_cast<double>(Type::metadata) / llama_block_size;
}

template <int divisor>
status llama_check(const baseline_settings& settings) {
  return require_multiple_of(divisor, settings);
}

template <class Type>
inline constexpr kv_bits llama_widths[] = {{Type::bits, Type::bits}};

template <class Type>
constexpr baseline llama_baseline(std::string_view name, std::string_view summary) {
  return {.name = name,
          .summary = summary,
          .widths = llama_widths<Type>,
          .native = {},
          .tokens_together = one_token,
          .round_trip = llama_round_trip<Type>,
          .bits_per_element = llama_bits_per_element<Type>,
          .check = llama_check<llama_block_size>};
}

template <class Type>
constexpr baseline llama_rotated_baseline(std::string_view name, std::string_view summary) {
  baseline rotated = llama_baseline<Type>(name, summary);
  rotated.round_trip = llama_rotated_round_trip<Type>;
  rotated.check = llama_check<llama_least_rotation>;
  return rotated;
}

inline constexpr baseline q8_0 =
    llama_baseline<llama_q8_0>("q8_0", "llama.cpp q8_0: blocks of 32, one scale");
inline constexpr baseline q8_0_rot =
    llama_rotated_baseline<llama_q8_0>("q8_0_rot", "q8_0 of rotated tokens");
inline constexpr baseline q4_0 =
    llama_baseline<llama_q4_0>("q4_0", "llama.cpp q4_0: blocks of 32, one scale");
inline constexpr baseline q4_0_rot =
    llama_rotated_baseline<llama_q4_0>("q4_0_rot", "q4_0 of rotated tokens");
inline constexpr baseline q4_1 =
    llama_baseline<llama_q4_1>("q4_1", "llama.cpp q4_1: blocks of 32, scale and minimum");
inline constexpr baseline q4_1_rot =
    llama_rotated_baseline<llama_q4_1>("q4_1_rot", "q4_1 of rotated tokens");
inline constexpr baseline iq4_nl =
    llama_baseline<llama_iq4_nl>("iq4_nl", "llama.cpp iq4_nl: blocks of 32, uneven levels");
inline constexpr baseline iq4_nl_rot =
    llama_rotated_baseline<llama_iq4_nl>("iq4_nl_rot", "iq4_nl of rotated tokens");

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
