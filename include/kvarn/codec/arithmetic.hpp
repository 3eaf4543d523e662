// The few operations whose order of rounding every back end repeats (docs/arithmetic.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../config.hpp"
#include "../format/float16.hpp"

namespace kvarn {

// Sums run over 16 lanes: lane l takes elements l, l + 16, l + 32, ... in this order; fold joins
// them.
inline constexpr int lanes = 16;

// Added to a number below 2^22 and subtracted again, it leaves the nearest integer, which also
// stands in the low bits of the sum: 1.5 * 2^23.
inline constexpr float integer_shift = 12582912.0f;

// Magnitudes below count as zero: what is divided by them would leave the range of floats.
inline constexpr float least_magnitude = 0x1p-100f;

// Floats of a workspace that are lost at most where it is aligned to vectors of 16.
inline constexpr std::size_t alignment_floats = lanes;

inline namespace KVARN_ISA_NAMESPACE {

// Joins the 16 partial sums as v[l] + v[l + 8], then + 4, + 2, + 1. Changes `v`.
KVARN_NOINLINE float fold(float* v) {
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) v[l] = v[l] + v[l + half];
  return v[0];
}

// The sum over i < n of term(i), in the order above. `term(i, partial)` returns partial + its term
// as one rounding.
template <class Accumulate>
float lane_sum(int n, Accumulate accumulate) {
  float partial[lanes] = {};
  for (int i = 0; i < n; ++i) partial[i % lanes] = accumulate(i, partial[i % lanes]);
  return fold(partial);
}

// `product` after its rounding: keeps a compiler that may contract (g++ with FMA, by default) from
// fusing the multiplication into a following addition.
inline float rounded(float product) {
#if defined(__GNUC__) && defined(__x86_64__)
  __asm__("" : "+x"(product));
#elif defined(__GNUC__) && defined(__aarch64__)
  __asm__("" : "+w"(product));
#else
  volatile float stored = product;
  product = stored;
#endif
  return product;
}

// a * b with its rounding, on the host and on a device.
KVARN_HOST_DEVICE inline float product_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return rounded(a * b);
#endif
}

KVARN_HOST_DEVICE inline float min_of(float a, float b) { return b < a ? b : a; }
KVARN_HOST_DEVICE inline float max_of(float a, float b) { return a < b ? b : a; }
KVARN_HOST_DEVICE inline float clamp(float x, float low, float high) {
  return min_of(max_of(x, low), high);
}

// floor(log2(x)) of a positive normal number.
KVARN_HOST_DEVICE inline int exponent_of(float x) {
  return static_cast<int>((bits_of(x) >> 23) & 0xffu) - 127;
}

// 2^e for -126 <= e <= 127.
KVARN_HOST_DEVICE inline float power_of_two(int e) {
  return float_of_bits(static_cast<std::uint32_t>(e + 127) << 23);
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
