// PolarQuant of Han et al. (arXiv 2502.02617): every token is rotated, and each 16 of its channels
// become one radius (FP16) and a tree of 15 angles, in four levels.
//
// Level 1: angles of the 8 pairs of channels, in [0, 2 pi), evenly cut into 16 cells (4 bits).
// Level l = 2, 3, 4: angles atan(right / left) of pairs of radii of level l - 1, in [0, pi/2]. Of
// normal numbers their density is proportional to sin(2 a)^(2^(l-1) - 1); 2 bits, Lloyd-Max levels.
// Together 8 * 4 + 4 * 2 + 2 * 2 + 2 + 16 = 62 bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <span>

#include "../config.hpp"
#include "baseline.hpp"
#include "lloyd_max.hpp"
#include "rotation.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline constexpr int polar_tree_levels = 4;
inline constexpr int polar_tree_block = 1 << polar_tree_levels;
inline constexpr int polar_tree_first_bits = 4;  // of an angle of level 1
inline constexpr int polar_tree_other_bits = 2;
inline constexpr kv_bits polar_tree_widths[] = {{polar_tree_first_bits, polar_tree_first_bits}};

// sin(2 a)^power on [0, pi/2], up to a factor.
struct polar_angle_density {
  static constexpr double first = 0;
  static constexpr double last = std::numbers::pi / 2;
  static constexpr double start_first = first;
  static constexpr double start_last = last;
  int power = 1;

  // Simpson's rule.
  double mean(double a, double b) const {
    constexpr int pieces = 64;
    double mass = 0;
    double moment = 0;
    for (int i = 0; i <= pieces; ++i) {
      const double x = std::fma(b - a, double(i) / pieces, a);
      const int weight = i == 0 || i == pieces ? 1 : i % 2 == 1 ? 4 : 2;
      const double height = weight * std::pow((std::max)(std::sin(2 * x), 0.0), power);
      mass += height;
      moment = std::fma(x, height, moment);
    }
    return moment / mass;
  }
};

// Of the angles of level 2, 3 or 4.
inline const scalar_codebook& polar_tree_codebook(int level) {
  static const std::array<scalar_codebook, polar_tree_levels - 1> books{
      lloyd_max(polar_angle_density{.power = 1}, polar_tree_other_bits),
      lloyd_max(polar_angle_density{.power = 3}, polar_tree_other_bits),
      lloyd_max(polar_angle_density{.power = 7}, polar_tree_other_bits)};
  return books[static_cast<std::size_t>(level - 2)];
}

inline float round_tree_angle(float angle, int level) {
  if (level > 1) return polar_tree_codebook(level).nearest(angle);
  constexpr int cells = 1 << polar_tree_first_bits;
  constexpr float width = 2 * std::numbers::pi_v<float> / cells;
  return (std::floor(angle / width) + 0.5f) * width;  // a turn more or less is the same angle
}

inline void polar_tree_round(std::span<float, polar_tree_block> x) {
  std::array<float, polar_tree_block> angle{};  // those of level l start at 16 - 2^(5 - l)
  const auto at = [&](int level, std::size_t i) -> float& {
    return angle[static_cast<std::size_t>(polar_tree_block - (2 * polar_tree_block >> level)) + i];
  };
  for (int level = 1; level <= polar_tree_levels; ++level)
    for (std::size_t i = 0; i < std::size_t{polar_tree_block} >> level; ++i) {
      const float left = x[2 * i];
      const float right = x[2 * i + 1];
      at(level, i) = round_tree_angle(std::atan2(right, left), level);
      x[i] = std::hypot(left, right);
    }
  x[0] = stored_float16(x[0]);
  for (int level = polar_tree_levels; level >= 1; --level)
    for (std::size_t i = std::size_t{polar_tree_block} >> level; i-- > 0;) {
      const float radius = x[i];
      x[2 * i] = radius * std::cos(at(level, i));
      x[2 * i + 1] = radius * std::sin(at(level, i));
    }
}

inline void polar_tree_round_trip(const baseline_settings& settings, std::span<float> kv) {
  rotate_blocks(kv, settings.head_dim);
  for (std::size_t first = 0; first < kv.size(); first += polar_tree_block)
    polar_tree_round(kv.subspan(first).first<polar_tree_block>());
  rotate_blocks(kv, settings.head_dim);
}

inline double polar_tree_bits_per_element(const baseline_settings&) {
  const int first_angles = polar_tree_block / 2;
  const int other_angles = polar_tree_block - 1 - first_angles;
  return (first_angles * polar_tree_first_bits + other_angles * polar_tree_other_bits + 16.0) /
         polar_tree_block;
}

inline status polar_tree_check(const baseline_settings& settings) {
  const status blocks = require_multiple_of(polar_tree_block, settings);
  return blocks.ok() ? require_rotation(settings) : blocks;
}

inline constexpr baseline polar_tree{
    .name = "polar_tree",
    .summary = "PolarQuant by a tree of angles: rotation, 16 channels as 15 angles and a radius",
    .widths = polar_tree_widths,
    .native = {},
    .tokens_together = one_token,
    .round_trip = polar_tree_round_trip,
    .bits_per_element = polar_tree_bits_per_element,
    .check = polar_tree_check,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
