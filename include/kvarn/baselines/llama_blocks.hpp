// The blocks of 32 numbers that llama.cpp stores: how each type rounds one, in place.
//
// Codes are made with the scale as it is before it is rounded to FP16, and decoded with the FP16,
// as llama.cpp does. Scales of 0 (also those that FP16 rounds to 0) give zeros.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>

#include "../config.hpp"
#include "baseline.hpp"

namespace kvarn {

inline constexpr int llama_block_size = 32;
using llama_block = std::span<float, llama_block_size>;

inline namespace KVARN_ISA_NAMESPACE {

// The number of largest magnitude, with its sign; the first of several.
inline float extreme_of(llama_block x) {
  return *std::max_element(x.begin(), x.end(),
                           [](float a, float b) { return std::abs(a) < std::abs(b); });
}

// 0 where FP16 has none of the scale left: a quotient could be infinite.
inline float inverse_or_zero(float scale) {
  return stored_float16(scale) != 0.0f ? 1.0f / scale : 0.0f;
}

// scale = max |x| / 127, code = round(x / scale), halves away from zero.
struct llama_q8_0 {
  static constexpr int bits = 8;
  static constexpr int metadata = 16;

  static void round(llama_block x) {
    const float scale = std::abs(extreme_of(x)) / 127.0f;
    const float inverse = inverse_or_zero(scale);
    const float stored = stored_float16(scale);
    for (float& a : x) a = std::round(a * inverse) * stored;
  }
};

// scale = extreme / -8, so that the extreme has code 0 and is exact; code = x / scale + 8 rounded,
// 0 to 15.
struct llama_q4_0 {
  static constexpr int bits = 4;
  static constexpr int metadata = 16;

  static void round(llama_block x) {
    const float scale = extreme_of(x) / -8.0f;
    const float inverse = inverse_or_zero(scale);
    const float stored = stored_float16(scale);
    for (float& a : x) {
      const float code = (std::min)(15.0f, std::floor(std::fma(a, inverse, 8.5f)));
      a = (code - 8.0f) * stored;
    }
  }
};

// scale = (max - min) / 15, code = (x - min) / scale rounded.
struct llama_q4_1 {
  static constexpr int bits = 4;
  static constexpr int metadata = 16 + 16;

  static void round(llama_block x) {
    const auto [min, max] = std::minmax_element(x.begin(), x.end());
    const float least = *min;
    const float scale = (*max - least) / 15.0f;
    const float inverse = inverse_or_zero(scale);
    const float stored = stored_float16(scale);
    const float stored_least = stored_float16(least);
    for (float& a : x) {
      const float code = (std::min)(15.0f, std::floor(std::fma(a - least, inverse, 0.5f)));
      a = std::fma(code, stored, stored_least);
    }
  }
};

// The levels of iq4_nl.
inline constexpr std::array<float, 16> iq4_nl_levels{-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};

// Codes: the nearest of 16 uneven levels, with the scale extreme / -127. The scale is then
// refitted: sum(x^2 level x) / sum(x^2 level^2).
struct llama_iq4_nl {
  static constexpr int bits = 4;
  static constexpr int metadata = 16;

  static void round(llama_block x) {
    const float inverse = inverse_or_zero(extreme_of(x) / iq4_nl_levels[0]);
    std::array<float, llama_block_size> level{};
    double product = 0;
    double square = 0;
    for (std::size_t i = 0; i < level.size(); ++i) {
      const float wanted = x[i] * inverse;
      level[i] = *std::min_element(
          iq4_nl_levels.begin(), iq4_nl_levels.end(),
          [&](float a, float b) { return std::abs(a - wanted) < std::abs(b - wanted); });
      const auto number = static_cast<double>(x[i]);
      const double weighted = number * number * static_cast<double>(level[i]);
      product = std::fma(weighted, number, product);
      square = std::fma(weighted, static_cast<double>(level[i]), square);
    }
    const float stored = square > 0 ? stored_float16(static_cast<float>(product / square)) : 0.0f;
    for (std::size_t i = 0; i < level.size(); ++i) x[i] = level[i] * stored;
  }
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
