// The 16-bit floating-point types that records and caches store: IEEE binary16 and bfloat16.
#pragma once

#include <cstdint>

#include "../config.hpp"

namespace kvarn {

// The bits of a binary32 and back. (std::bit_cast is not a device function to nvcc.)
KVARN_INLINE constexpr std::uint32_t bits_of(float value) {
  return __builtin_bit_cast(std::uint32_t, value);
}
KVARN_INLINE constexpr float float_of_bits(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

// IEEE 754 binary16: 1 sign, 5 exponent and 10 mantissa bits.
struct float16 {
  std::uint16_t bits = 0;

  // 65504, the largest finite value.
  static constexpr std::uint16_t max_bits = 0x7bff;

  float16() = default;

  // Rounds to nearest, ties to even. Beyond the largest finite value by half a step or more:
  // infinity. NaN stays NaN and becomes quiet.
  KVARN_INLINE constexpr explicit float16(float value) : bits(round(value)) {}

  // Exact.
  KVARN_INLINE constexpr explicit operator float() const;

  KVARN_INLINE static constexpr float16 from_bits(std::uint16_t pattern) {
    float16 result;
    result.bits = pattern;
    return result;
  }

  // Rounds as the constructor does, but to the largest finite value instead of an infinity.
  // Precondition: value is not NaN.
  KVARN_INLINE static constexpr float16 saturated(float value) {
    const std::uint16_t pattern = round(value);
    return from_bits((pattern & 0x7fff) > max_bits
                         ? static_cast<std::uint16_t>((pattern & 0x8000) | max_bits)
                         : pattern);
  }

  // True for neither NaN nor an infinity. Works on the bits: no compiler flag can fold it away.
  KVARN_INLINE constexpr bool is_finite() const { return (bits & 0x7c00) != 0x7c00; }

 private:
  KVARN_INLINE static constexpr std::uint16_t round(float value);
};

// bfloat16: the upper half of a binary32.
struct bfloat16 {
  std::uint16_t bits = 0;

  static constexpr std::uint16_t max_bits = 0x7f7f;

  bfloat16() = default;

  // Rounds to nearest, ties to even. NaN stays NaN and becomes quiet.
  KVARN_INLINE constexpr explicit bfloat16(float value) : bits(round(value)) {}

  // Exact.
  KVARN_INLINE constexpr explicit operator float() const {
    return float_of_bits(static_cast<std::uint32_t>(bits) << 16);
  }

  KVARN_INLINE static constexpr bfloat16 from_bits(std::uint16_t pattern) {
    bfloat16 result;
    result.bits = pattern;
    return result;
  }

  // As float16::saturated.
  KVARN_INLINE static constexpr bfloat16 saturated(float value) {
    const std::uint16_t pattern = round(value);
    return from_bits((pattern & 0x7fff) > max_bits
                         ? static_cast<std::uint16_t>((pattern & 0x8000) | max_bits)
                         : pattern);
  }

  KVARN_INLINE constexpr bool is_finite() const { return (bits & 0x7f80) != 0x7f80; }

 private:
  KVARN_INLINE static constexpr std::uint16_t round(float value) {
    const auto pattern = bits_of(value);
    if ((pattern & 0x7fffffffu) > 0x7f800000u)
      return static_cast<std::uint16_t>((pattern >> 16) | 0x0040u);
    const std::uint32_t ties_to_even = 0x7fffu + ((pattern >> 16) & 1u);
    return static_cast<std::uint16_t>((pattern + ties_to_even) >> 16);
  }
};

// implementation

constexpr float16::operator float() const {
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) {
    float value = 0.0f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
#endif
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u)  // infinity and NaN keep their payload
    return float_of_bits(sign | 0x7f800000u | (magnitude << 13));
  if (magnitude >= 0x0400u) return float_of_bits(sign | ((magnitude << 13) + 0x38000000u));
  // No binary32 subnormal on the way: right also where the CPU flushes those to zero.
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return float_of_bits(sign | bits_of(subnormal));
}

constexpr std::uint16_t float16::round(float value) {
#if defined(__CUDA_ARCH__)
  // The same for all but NaN, which is 0x7fff.
  if (!__builtin_is_constant_evaluated()) {
    std::uint16_t half = 0;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
  }
#endif
  const auto pattern = bits_of(value);
  const auto sign = static_cast<std::uint16_t>((pattern >> 16) & 0x8000u);
  const std::uint32_t magnitude = pattern & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu));
  if (magnitude >= 0x477ff000u)  // 65520: halfway to the next power of two
    return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds at the last subnormal bit
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (bits_of(shifted) - 0x3f000000u));
  }
  const std::uint32_t ties_to_even = 0x0fffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + ties_to_even) >> 13));
}

}  // namespace kvarn
