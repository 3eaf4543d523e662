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
#include "column_grid.hpp"

namespace kvarn {

// rows x cols floats, row-major and contiguous, and the row scales that divide them.
struct scaled_tile {
  const float* x;
  const float* inverse_scale;  // rows
  int rows;
  int cols;
};

inline namespace KVARN_ISA_NAMESPACE {

// The code nearest to t / step, ties to even, within 0 .. max_code; 0 for a NaN, which large
// factors of error feedback can make. `inverse_range` is 1 / (max_code * step).
inline float round_code(float t, float inverse_range, int max_code) {
  const float unit = min_of(max_of(0.0f, t * inverse_range), 1.0f);
  return std::fma(unit, static_cast<float>(max_code), integer_shift) - integer_shift;
}

// fit_range of one column of a tile.
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
  return fit_range(low, high, range, cover, max_code, type);
}

// The sums of one column of a tile under a grid. `weight`: one per row, or null for ones.
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

// row_cost of a row of a tile under a scale whose inverse is `inverse_scale`; zero, step and
// inverse_range: of its columns.
KVARN_COLD float cost_of_row(const float* row, int cols, float inverse_scale, float scale_squared,
                             const float* zero, const float* step, const float* inverse_range,
                             int max_code, float along_weight) {
  float squares[lanes] = {};
  float products[lanes] = {};
  for (int c = 0; c < cols; ++c) {
    const int l = c % lanes;
    const float t = std::fma(row[c], inverse_scale, -zero[c]);
    const float error = std::fma(-round_code(t, inverse_range[c], max_code), step[c], t);
    squares[l] = std::fma(error, error, squares[l]);
    products[l] = std::fma(error, row[c], products[l]);
  }
  return row_cost(fold(squares), fold(products), along_weight, scale_squared);
}

// refit of one column of a tile.
KVARN_COLD column_grid refit(const scaled_tile& tile, int col, const column_grid& grid,
                             int max_code, const float* weight, scale_type type) {
  return refit(grid, sum_column(tile, col, grid, max_code, weight), type);
}

// unbias of one column of a tile.
KVARN_COLD column_grid unbias(const scaled_tile& tile, int col, const column_grid& grid,
                              int max_code, scale_type type) {
  return unbias(grid, sum_column(tile, col, grid, max_code, nullptr), tile.rows, type);
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
