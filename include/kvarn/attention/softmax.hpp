// Powers and logarithms of two in plain IEEE operations, and the partial results of a softmax.
//
// Scores are kept in units of log 2: the softmax scale is multiplied by log2(e) once per query.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../codec/arithmetic.hpp"
#include "../config.hpp"
#include "../format/float16.hpp"

namespace kvarn {

inline constexpr float log2_e = 1.44269504f;
inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// 2^x on [-0.5, 0.5], from the highest power down: a minimax polynomial with its constant term
// fixed to 1.
inline constexpr float exp2_coefficients[] = {0x1.5c08e6p-10f, 0x1.3d0c52p-7f, 0x1.c6b6e4p-5f,
                                              0x1.ebf918p-3f,  0x1.62e428p-1f, 1.0f};

inline namespace KVARN_ISA_NAMESPACE {

// 2^x for x <= 128, relative error below 2.3e-7; 0 below -125 and for -infinity. exp2_of(0) is 1.
inline float exp2_of(float x) {
  if (!(x >= -125.0f)) return 0.0f;
  const float whole = (x + integer_shift) - integer_shift;
  const float f = x - whole;
  float p = exp2_coefficients[0];
  for (int i = 1; i < 6; ++i) p = std::fma(p, f, exp2_coefficients[i]);
  const std::uint32_t exponent = static_cast<std::uint32_t>(static_cast<std::int32_t>(whole)) << 23;
  return float_of_bits(bits_of(p) + exponent);
}

// log(2^exponent * x) in nats for a positive normal x, to the precision of a float. The series of
// the inverse hyperbolic tangent, in double.
inline float log_of(float x, float exponent) {
  constexpr double ln2 = 0.69314718055994531;
  int whole = exponent_of(x);
  double m = static_cast<double>(x) * static_cast<double>(power_of_two(-whole));
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++whole;
  }
  const double s = (m - 1.0) / (m + 1.0);  // |s| < 0.1716
  const double s2 = s * s;
  double series = 1.0 / 17.0;
  for (int n = 15; n >= 1; n -= 2) series = std::fma(series, s2, 1.0 / n);
  const double log2_part = (static_cast<double>(exponent) + whole) * ln2;
  return static_cast<float>(std::fma(2.0 * s, series, log2_part));
}

// The joining of two softmaxes with maxima `a` and `b`: what each side is multiplied by.
struct softmax_join {
  float maximum;
  float first;   // 2^(a - maximum)
  float second;  // 2^(b - maximum)
};

// Precondition: a and b are not both -infinity.
inline softmax_join join_maxima(float a, float b) {
  const float maximum = max_of(a, b);
  return {maximum, exp2_of(a - maximum), exp2_of(b - maximum)};
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
