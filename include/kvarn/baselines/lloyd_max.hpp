// Scalar codebooks of least squared error (Lloyd, Max): every level is the mean of the density over
// its cell, every boundary the middle of two levels.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

#include "../config.hpp"

namespace kvarn {

struct scalar_codebook {
  static constexpr int max_levels = 16;

  int levels = 0;
  std::array<float, max_levels> level{};     // ascending
  std::array<float, max_levels> boundary{};  // above level i; the last is not used

  // The level whose cell holds x.
  KVARN_INLINE float nearest(float x) const {
    std::size_t i = 0;
    while (i + 1 < static_cast<std::size_t>(levels) && x >= boundary[i]) ++i;
    return level[i];
  }
};

inline namespace KVARN_ISA_NAMESPACE {

// The standard normal distribution.
struct normal_density {
  static constexpr double first = -std::numeric_limits<double>::infinity();
  static constexpr double last = std::numeric_limits<double>::infinity();
  static constexpr double start_first = -3.5;  // levels start between these
  static constexpr double start_last = 3.5;

  // Mean over a < x < b.
  double mean(double a, double b) const {
    const auto height = [](double x) {
      return std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
    };
    const auto below = [](double x) { return std::erfc(-x / std::numbers::sqrt2) / 2; };
    return (height(a) - height(b)) / (below(b) - below(a));
  }
};

// Levels by repetition until they stand still. Precondition: 1 <= bits <= 4.
template <class Density>
scalar_codebook lloyd_max(const Density& density, int bits) {
  constexpr double tolerance = 1e-12;
  scalar_codebook book{.levels = 1 << bits};
  const auto count = static_cast<std::size_t>(book.levels);
  std::array<double, scalar_codebook::max_levels> level{};
  const double width = (density.start_last - density.start_first) / static_cast<double>(count);
  for (std::size_t i = 0; i < count; ++i)
    level[i] = std::fma(static_cast<double>(i) + 0.5, width, density.start_first);
  const auto boundary = [&](std::size_t i) { return (level[i] + level[i + 1]) / 2; };
  for (double change = 1; change > tolerance;) {
    change = 0;
    double below = density.first;
    for (std::size_t i = 0; i < count; ++i) {
      const double above = i + 1 < count ? boundary(i) : density.last;
      const double mean = density.mean(below, above);
      change = (std::max)(change, std::abs(mean - level[i]));
      level[i] = mean;
      below = above;
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    book.level[i] = static_cast<float>(level[i]);
    if (i + 1 < count) book.boundary[i] = static_cast<float>(boundary(i));
  }
  return book;
}

// Of the standard normal distribution, made once. Precondition: 1 <= bits <= 4.
inline const scalar_codebook& normal_codebook(int bits) {
  static const std::array<scalar_codebook, 4> books{
      lloyd_max(normal_density{}, 1), lloyd_max(normal_density{}, 2),
      lloyd_max(normal_density{}, 3), lloyd_max(normal_density{}, 4)};
  return books[static_cast<std::size_t>(bits - 1)];
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
