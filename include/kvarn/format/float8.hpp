// The 8-bit floating-point types of step sizes and scales: UE5M3 and OCP E4M3.
//
// Both are unsigned here: steps and scales are positive. Rounding starts from a binary16 (or
// binary32) value, goes to the nearest, ties to even, and never to zero, an infinity or NaN: what
// lies outside is clamped to the smallest or largest code. An all-zero tile thus keeps a step that
// can be divided by.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "float16.hpp"

namespace kvarn {

// Unsigned, 5 exponent and 3 mantissa bits: a binary16 without its sign and low 7 mantissa bits.
// Codes 0 to 0xf7 are 0 to 61440; 0xf8 to 0xff are infinity and NaN as in binary16.
struct ue5m3 {
  std::uint8_t bits = 0;

  static constexpr std::uint8_t min_code = 0x01;  // 2^-17
  static constexpr std::uint8_t max_code = 0xf7;  // 61440
  static constexpr int min_normal_exponent = -14;
  static constexpr int max_exponent = 15;

  ue5m3() = default;

  // Rounds to binary16 first, then to 3 mantissa bits: what hardware with binary16 conversions does
  // in three instructions. Precondition: value is not NaN; negative values count as 0.
  KVARN_INLINE constexpr explicit ue5m3(float value) {
    if (!(value > 0.0f)) {
      bits = min_code;
      return;
    }
    const std::uint32_t half = float16(value).bits;
    const std::uint32_t code = (half + 0x3fu + ((half >> 7) & 1u)) >> 7;
    bits = static_cast<std::uint8_t>(code < min_code   ? min_code
                                     : code > max_code ? max_code
                                                       : code);
  }

  // Exact.
  KVARN_INLINE constexpr explicit operator float() const {
    return static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(bits << 7)));
  }

  KVARN_INLINE static constexpr ue5m3 from_bits(std::uint8_t code) {
    ue5m3 result;
    result.bits = code;
    return result;
  }

  // True where the code is a finite number that is not negative.
  KVARN_INLINE constexpr bool is_valid() const { return bits <= max_code; }
};

// OCP 8-bit floating point E4M3 (no infinities, one NaN per sign), as of the OFP8 specification.
// Codes 0 to 0x7e are 0 to 448; 0x7f is NaN; codes from 0x80 are negative.
struct e4m3 {
  std::uint8_t bits = 0;

  static constexpr std::uint8_t min_code = 0x01;  // 2^-9
  static constexpr std::uint8_t max_code = 0x7e;  // 448
  static constexpr int min_normal_exponent = -6;
  static constexpr int max_exponent = 8;

  e4m3() = default;

  // Rounds once, from binary32. Precondition: value is not NaN; negative values count as 0.
  KVARN_INLINE constexpr explicit e4m3(float value) {
    if (!(value > 0.0f)) {
      bits = min_code;
      return;
    }
    const auto pattern = bits_of(value);
    std::uint32_t code = 0;
    if (pattern >= 0x43e80000u) {  // 464: halfway past the largest value
      code = max_code;
    } else if (pattern < 0x3c800000u) {  // below 2^-6: adding 2^14 rounds at the last subnormal bit
      code = bits_of(value + 0x1p14f) - 0x46800000u;
    } else {
      code = (pattern - 0x3c000000u + 0x7ffffu + ((pattern >> 20) & 1u)) >> 20;
    }
    bits = static_cast<std::uint8_t>(code < min_code   ? min_code
                                     : code > max_code ? max_code
                                                       : code);
  }

  // Exact.
  KVARN_INLINE constexpr explicit operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
    const std::uint32_t magnitude = bits & 0x7fu;
    if (magnitude == 0x7fu) return float_of_bits(sign | 0x7fc00000u);
    if (magnitude >= 0x08u) return float_of_bits(sign | ((magnitude << 20) + 0x3c000000u));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
    return float_of_bits(sign | bits_of(subnormal));
  }

  KVARN_INLINE static constexpr e4m3 from_bits(std::uint8_t code) {
    e4m3 result;
    result.bits = code;
    return result;
  }

  // True where the code is a finite number that is not negative.
  KVARN_INLINE constexpr bool is_valid() const { return bits <= max_code; }
};

}  // namespace kvarn
