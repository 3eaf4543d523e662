// Asymmetric rounding to nearest with a step and a zero per column, and what refines them.
//
// Everything here looks at a tile divided by its rounded row scales, y[r][c] = x[r][c] *
// inverse_scale[r], and never stores it: the deviation from a column's zero,
//
//   t = fma(x, inverse_scale, -zero)
//
// is one rounding and keeps a column of large offset and small spread exact.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../config.hpp"
#include "../format/float16.hpp"
#include "../format/float8.hpp"
#include "../format/tile_layout.hpp"
#include "arithmetic.hpp"

namespace kvarn {

// rows x cols floats, row-major and contiguous, and the row scales that divide them.
struct scaled_tile {
  const float* x;
  const float* inverse_scale;  // rows
  int rows;
  int cols;
};

// The step and zero of one column, both numbers that a record can hold.
struct column_grid {
  float zero;
  float step;
};

// A scale or step as stored and as a number.
struct rounded_fp8 {
  std::uint8_t bits;
  float value;
};

inline namespace KVARN_ISA_NAMESPACE {

// The FP8 nearest to `value`.
KVARN_COLD rounded_fp8 round_fp8(float value, scale_type type) {
  if (type == scale_type::ue5m3) {
    const ue5m3 code(value);
    return {code.bits, static_cast<float>(code)};
  }
  const e4m3 code(value);
  return {code.bits, static_cast<float>(code)};
}

// The binary16 nearest to `value`; never an infinity, never -0.
KVARN_COLD float16 nearest_zero(float value) {
  const float16 zero = float16::saturated(value);
  return zero.bits == 0x8000 ? float16::from_bits(0) : zero;
}

// The largest binary16 that is not above `value`; never an infinity, never -0.
KVARN_COLD float16 zero_below(float value) {
  const float16 zero = nearest_zero(value);
  if (!(static_cast<float>(zero) > value)) return zero;
  if (zero.bits == 0) return float16::from_bits(0x8001);  // the largest negative number
  if (zero.bits == 0x8000 + float16::max_bits) return zero;
  return float16::from_bits(
      static_cast<std::uint16_t>((zero.bits & 0x8000) != 0 ? zero.bits + 1 : zero.bits - 1));
}

// The code nearest to t / step, ties to even, within 0 .. max_code; 0 for a NaN, which large
// factors of error feedback can make. `inverse_range` is 1 / (max_code * step).
inline float round_code(float t, float inverse_range, int max_code) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: the sum's last bit is worth 1
  const float unit = min_of(max_of(0.0f, t * inverse_range), 1.0f);
  return std::fma(unit, static_cast<float>(max_code), magic) - magic;
}

inline float inverse_range(float step, int max_code) {
  return 1.0f / (static_cast<float>(max_code) * step);
}

// The grid over the middle `range` (0 to 1) of a column's minimum to maximum. With `cover` the zero
// is rounded down and the step reaches from there to the end, so that the codes cover the range
// also where a binary16 resolves the column's offset less finely than its spread; without, the zero
// is rounded to nearest and the step is that of the range, as the paper has it.
KVARN_COLD column_grid fit_range(const scaled_tile& tile, int col, float range, bool cover,
                                 int max_code, scale_type type) {
  float low = 0x1p126f;
  float high = -0x1p126f;
  for (int r = 0; r < tile.rows; ++r) {
    const float y =
        rounded(tile.x[static_cast<std::ptrdiff_t>(r) * tile.cols + col] * tile.inverse_scale[r]);
    low = min_of(low, y);
    high = max_of(high, y);
  }
  const float width = high - low;
  const float start = std::fma(0.5f * (1.0f - range), width, low);
  const auto zero = static_cast<float>(cover ? zero_below(start) : nearest_zero(start));
  const float reach = cover ? std::fma(range, width, start) - zero : range * width;
  return {zero, round_fp8(rounded(reach * (1.0f / static_cast<float>(max_code))), type).value};
}

// Sums over the rows of a column with weights w, codes c and deviations t from the column's zero.
struct column_sums {
  float w, wc, wcc, wt, wct, wtt;
};

// `weight`: one per row, or null for ones.
KVARN_COLD column_sums sum_column(const scaled_tile& tile, int col, const column_grid& grid,
                                  int max_code, const float* weight) {
  float w[lanes] = {};
  float wc[lanes] = {};
  float wcc[lanes] = {};
  float wt[lanes] = {};
  float wct[lanes] = {};
  float wtt[lanes] = {};
  const float inverse = inverse_range(grid.step, max_code);
  for (int r = 0; r < tile.rows; ++r) {
    const int l = r % lanes;
    const float t = std::fma(tile.x[static_cast<std::ptrdiff_t>(r) * tile.cols + col],
                             tile.inverse_scale[r], -grid.zero);
    const float code = round_code(t, inverse, max_code);
    const float row_weight = weight != nullptr ? weight[r] : 1.0f;
    const float weighted_code = row_weight * code;
    const float weighted_t = row_weight * t;
    w[l] = w[l] + row_weight;
    wc[l] = std::fma(row_weight, code, wc[l]);
    wcc[l] = std::fma(weighted_code, code, wcc[l]);
    wt[l] = std::fma(row_weight, t, wt[l]);
    wct[l] = std::fma(weighted_code, t, wct[l]);
    wtt[l] = std::fma(weighted_t, t, wtt[l]);
  }
  return {fold(w), fold(wc), fold(wcc), fold(wt), fold(wct), fold(wtt)};
}

// Least-squares step and zero for the codes that the grid gives now, rows weighted.
KVARN_COLD column_grid refit(const scaled_tile& tile, int col, const column_grid& grid,
                             int max_code, const float* weight, scale_type type) {
  const column_sums s = sum_column(tile, col, grid, max_code, weight);
  column_grid fitted = grid;
  const float scaled = s.w * s.wcc;
  const float determinant = std::fma(-s.wc, s.wc, scaled);
  if (determinant > 1e-6f * scaled) {
    const float numerator = std::fma(-s.wc, s.wt, rounded(s.w * s.wct));
    fitted.step = round_fp8(numerator / determinant, type).value;
  }
  const float shift = std::fma(-fitted.step, s.wc, s.wt) / s.w;
  fitted.zero = static_cast<float>(nearest_zero(grid.zero + shift));
  return fitted;
}

// The step and zero that keep, with the codes of `grid`, a column's mean and make the stored values
// unbiased: the regression of the stored on the original values has slope 1. (A least-squares fit
// shrinks what it stores; random errors average out over tokens and layers, a bias does not.)
KVARN_COLD column_grid unbias(const scaled_tile& tile, int col, const column_grid& grid,
                              int max_code, scale_type type) {
  const column_sums s = sum_column(tile, col, grid, max_code, nullptr);
  const float inverse_n = 1.0f / static_cast<float>(tile.rows);
  const float variance = std::fma(-(s.wt * inverse_n), s.wt, s.wtt);
  const float covariance = std::fma(-(s.wc * inverse_n), s.wt, s.wct);
  column_grid fitted = grid;
  if (variance > 0.0f && covariance > 0.0f)
    fitted.step = round_fp8(min_of(variance / covariance, 2.0f * grid.step), type).value;
  const float shift = std::fma(-fitted.step, s.wc, s.wt) * inverse_n;
  fitted.zero = static_cast<float>(nearest_zero(rounded(shift) + grid.zero));
  return fitted;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
