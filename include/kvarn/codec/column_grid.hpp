// The step and zero of one column, from numbers that describe the column: what every back end
// computes column by column, on the host or on a device.
#pragma once

#include <cmath>
#include <cstdint>

#include "../config.hpp"
#include "../format/float16.hpp"
#include "../format/float8.hpp"
#include "../format/tile_layout.hpp"
#include "arithmetic.hpp"

namespace kvarn {

// The step and zero of one column, both numbers that a record can hold.
struct column_grid {
  float zero;
  float step;
};

// Sums over the rows of a column with weights w, codes c and deviations t from the column's zero.
struct column_sums {
  float w, wc, wcc, wt, wct, wtt;
};

// A scale or step as stored and as a number.
struct rounded_fp8 {
  std::uint8_t bits;
  float value;
};

inline namespace KVARN_ISA_NAMESPACE {

// The FP8 nearest to `value`.
KVARN_HOST_DEVICE inline rounded_fp8 round_fp8(float value, scale_type type) {
  if (type == scale_type::ue5m3) {
    const ue5m3 code(value);
    return {code.bits, static_cast<float>(code)};
  }
  const e4m3 code(value);
  return {code.bits, static_cast<float>(code)};
}

// The FP8 that is `by` codes above one (below, where negative), within the codes of the type.
KVARN_HOST_DEVICE inline rounded_fp8 neighbour_of(std::uint8_t bits, int by, scale_type type) {
  const bool wide = type == scale_type::ue5m3;
  const int least = wide ? ue5m3::min_code : e4m3::min_code;
  const int most = wide ? ue5m3::max_code : e4m3::max_code;
  const int code = bits + by;
  const auto in_range = static_cast<std::uint8_t>(code < least ? least : code > most ? most : code);
  return {in_range, wide ? static_cast<float>(ue5m3::from_bits(in_range))
                         : static_cast<float>(e4m3::from_bits(in_range))};
}

// The binary16 nearest to `value`; never an infinity, never -0.
KVARN_HOST_DEVICE inline float16 nearest_zero(float value) {
  const float16 zero = float16::saturated(value);
  return zero.bits == 0x8000 ? float16::from_bits(0) : zero;
}

// The largest binary16 that is not above `value`; never an infinity, never -0.
KVARN_HOST_DEVICE inline float16 zero_below(float value) {
  const float16 zero = nearest_zero(value);
  if (!(static_cast<float>(zero) > value)) return zero;
  if (zero.bits == 0) return float16::from_bits(0x8001);  // the largest negative number
  if (zero.bits == 0x8000 + float16::max_bits) return zero;
  return float16::from_bits(
      static_cast<std::uint16_t>((zero.bits & 0x8000) != 0 ? zero.bits + 1 : zero.bits - 1));
}

KVARN_HOST_DEVICE inline float inverse_range(float step, int max_code) {
  return 1.0f / (static_cast<float>(max_code) * step);
}

// The grid over the middle `range` (0 to 1) of a column's minimum to maximum. With `cover` the zero
// is rounded down and the step reaches from there to the end, so that the codes cover the range
// also where a binary16 resolves the column's offset less finely than its spread; without, the zero
// is rounded to nearest and the step is that of the range, as the paper has it.
KVARN_HOST_DEVICE inline column_grid fit_range(float low, float high, float range, bool cover,
                                               int max_code, scale_type type) {
  const float width = high - low;
  const float start = std::fma(0.5f * (1.0f - range), width, low);
  const auto zero = static_cast<float>(cover ? zero_below(start) : nearest_zero(start));
  const float reach = cover ? std::fma(range, width, start) - zero : range * width;
  return {zero, round_fp8(product_of(reach, 1.0f / static_cast<float>(max_code)), type).value};
}

// Least-squares step and zero for the codes that the grid gives now, rows weighted; sums under that
// grid.
KVARN_HOST_DEVICE inline column_grid refit(const column_grid& grid, const column_sums& s,
                                           scale_type type) {
  column_grid fitted = grid;
  const float scaled = s.w * s.wcc;
  const float determinant = std::fma(-s.wc, s.wc, scaled);
  if (determinant > 1e-6f * scaled) {
    const float numerator = std::fma(-s.wc, s.wt, product_of(s.w, s.wct));
    fitted.step = round_fp8(numerator / determinant, type).value;
  }
  const float shift = std::fma(-fitted.step, s.wc, s.wt) / s.w;
  fitted.zero = static_cast<float>(nearest_zero(grid.zero + shift));
  return fitted;
}

// The step and zero that keep, with the codes of `grid`, a column's mean and make the stored values
// unbiased: the regression of the stored on the original values has slope 1. (A least-squares fit
// shrinks what it stores; random errors average out over tokens and layers, a bias does not.) Sums
// under that grid, with weights 1.
KVARN_HOST_DEVICE inline column_grid unbias(const column_grid& grid, const column_sums& s, int rows,
                                            scale_type type) {
  const float inverse_n = 1.0f / static_cast<float>(rows);
  const float variance = std::fma(-(s.wt * inverse_n), s.wt, s.wtt);
  const float covariance = std::fma(-(s.wc * inverse_n), s.wt, s.wct);
  column_grid fitted = grid;
  if (variance > 0.0f && covariance > 0.0f)
    fitted.step = round_fp8(min_of(variance / covariance, 2.0f * grid.step), type).value;
  const float shift = product_of(std::fma(-fitted.step, s.wc, s.wt), inverse_n);
  fitted.zero = static_cast<float>(nearest_zero(shift + grid.zero));
  return fitted;
}

// By how much the squared product of a row with its errors counts beside their squares: `along`
// over the square of the row, which is `row_squares`.
KVARN_HOST_DEVICE inline float weight_along(float along, float row_squares) {
  return row_squares >= least_magnitude ? along / row_squares : 0.0f;
}

// What a row costs under a scale: the squared error after decoding, and once more `along` times
// the part that points along the row. Such errors make a token's scores all larger or all smaller;
// the least squared error alone prefers them smaller.
KVARN_HOST_DEVICE inline float row_cost(float error_squares, float error_product,
                                        float along_weight, float scale_squared) {
  return std::fma(product_of(error_product, along_weight), error_product, error_squares) *
         scale_squared;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
