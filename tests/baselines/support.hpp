// What the tests of the baselines share: runs, inputs, FP16 in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvarn/baselines/baselines.hpp"
#include "kvarn/metrics.hpp"
#include "support/profiles.hpp"

namespace kvarn_test {

inline std::vector<float> run(const kvarn::baseline& method,
                              const kvarn::baseline_settings& settings,
                              const std::vector<float>& in) {
  std::vector<float> out(in.size());
  const kvarn::status s = kvarn::quantize_dequantize(method, settings, in, out);
  EXPECT_TRUE(s.ok()) << method.name << ": " << s.message();
  return out;
}

// The nearest binary16, ties to even, of a number within its range.
inline double nearest_float16(double x) {
  if (x == 0) return 0;
  const double ulp = std::ldexp(1.0, (std::max)(std::ilogb(x) - 10, -24));
  return std::nearbyint(x / ulp) * ulp;
}

// Multiples of 1/64 below 32: exact in binary32 even after a rotation of order 4^k, so that library
// and oracle must choose the same codes.
inline std::vector<float> grid_values(std::size_t count, std::uint64_t seed) {
  gaussian_source random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(random.index(4096) - 2048) / 64.0f;
  return values;
}

// Independent, of variance 1.
inline std::vector<float> normal_values(std::size_t count, std::uint64_t seed) {
  gaussian_source random(seed);
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(random.normal());
  return values;
}

// Relative squared error of 1024 tokens of independent normal numbers.
inline double normal_error(const kvarn::baseline& method,
                           const kvarn::baseline_settings& settings) {
  const auto in = normal_values(1024 * static_cast<std::size_t>(settings.head_dim), 3);
  return kvarn::relative_squared_error(in, run(method, settings, in));
}

// The mean of f over samples evenly spaced on [first, last], weighted by their density.
template <class Density, class F>
double mean_over(double first, double last, const Density& density, const F& f) {
  constexpr int samples = 200000;
  double mass = 0;
  double sum = 0;
  for (int i = 0; i < samples; ++i) {
    const double x = first + (last - first) * (i + 0.5) / samples;
    mass += density(x);
    sum += density(x) * f(x);
  }
  return sum / mass;
}

}  // namespace kvarn_test
