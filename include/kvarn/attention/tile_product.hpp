// Inner products with a packed tile, straight from its codes.
//
//   sum_c a[c] x^[r][c] = scale[r] * (sum_c (a[c] step[c]) (code[r][c] - middle)
//                                     + sum_c a[c] center[c]),   center = zero + middle step
//
// where middle is half the largest code. `a` is a rotated query for keys and the softmax weights
// for values. The folded operand a[c] step[c] is rounded to an integer of 16 (or 8) bits relative
// to its largest magnitude, so that the sum over codes is an exact sum of integers: the same on
// every machine, in any order. Counted from the middle, codes have no mean that would multiply the
// sum of all rounding errors.
#pragma once

#include <cmath>
#include <cstdint>

#include "../codec/arithmetic.hpp"
#include "../config.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"

namespace kvarn {

// How finely folded operands are rounded. int16 costs two 8-bit products per code and adds a
// relative error near 1e-4 to attention; int8 costs one and adds about 2e-2.
enum class operand_precision : std::uint8_t { int16, int8 };

// The largest magnitude of a folded operand. An int16 is split into two bytes, value = 256 * high +
// low with both in [-128, 127], which bounds it by 127 * 256.
KVARN_INLINE constexpr int max_operand(operand_precision precision) {
  return precision == operand_precision::int16 ? 127 * 256 : 127;
}

KVARN_INLINE constexpr float middle_code(const tile_layout& layout) {
  return 0.5f * static_cast<float>(layout.max_code());
}

struct folded_operand {
  std::int16_t value[max_head_dim];  // a[c] step[c] / unit, for c < layout.cols()
  float unit;
  float bias;  // sum_c a[c] center[c] - middle unit sum_c value[c]
};
static_assert(max_head_dim >= max_group);

inline namespace KVARN_ISA_NAMESPACE {

// Folds the steps and zeros of a tile into `a`, layout.cols() floats.
inline void fold_operand(const_tile_view tile, const float* a, operand_precision precision,
                         folded_operand& out) {
  const int cols = tile.layout.cols();
  float largest = 0.0f;
  for (int c = 0; c < cols; ++c) largest = max_of(largest, std::fabs(a[c] * tile.step(c)));
  const auto limit = static_cast<float>(max_operand(precision));
  const bool nonzero = largest >= least_magnitude;
  const float inverse_unit = nonzero ? limit / largest : 0.0f;
  out.unit = nonzero ? largest / limit : 0.0f;
  std::int32_t total = 0;
  for (int c = 0; c < cols; ++c) {
    out.value[c] = static_cast<std::int16_t>(
        std::fma(rounded(a[c] * tile.step(c)), inverse_unit, integer_shift) - integer_shift);
    total += out.value[c];
  }
  const float middle = middle_code(tile.layout);
  const float bias = lane_sum(cols, [&](int c, float sum) {
    return std::fma(a[c], std::fma(middle, tile.step(c), static_cast<float>(tile.zero(c))), sum);
  });
  out.bias = std::fma(-rounded(middle * out.unit), static_cast<float>(total), bias);
}

// product[r] = scale[r] * (unit * sum_c code[r][c] value[c] + bias) for rows [0, rows).
// Precondition: rows <= layout.rows().
inline void tile_product(const_tile_view tile, const folded_operand& operand, int rows,
                         float* product) {
  for (int r = 0; r < rows; ++r) {
    std::int32_t sum = 0;
    for (int c = 0; c < tile.layout.cols(); ++c) sum += tile.code(r, c) * operand.value[c];
    product[r] =
        rounded(tile.scale(r) * std::fma(static_cast<float>(sum), operand.unit, operand.bias));
  }
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
