// Dual-axis variance normalisation: scales for rows and columns under which both have unit
// variance.
//
// KVarN (arXiv 2606.03458), Algorithm 1, in the form of its released code: standard deviations are
// taken in turn over the columns of each row and over the rows of each column, each divided into
// the scales of its axis, and the best of the iterates is kept. As in Sinkhorn's matrix balancing,
// a few iterations suffice. Of the result a record stores the row scales alone: rounding to nearest
// with a step per column does not depend on the column scales.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "../config.hpp"
#include "arithmetic.hpp"

namespace kvarn {

struct normalize_options {
  int iterations = 8;
  // false: as the paper's code, whose clamps leave a tile of small numbers as it is. true: measured
  // against the standard deviation of the whole tile, so that scaling the tile only scales the
  // rows, and rows or columns without any variance do not take part in the imbalance.
  bool scale_equivariant = false;
};

struct normalize_report {
  int iterations = 0;  // that were made
  int best = 0;        // the iterate that was kept; 0 is the start
  float imbalance =
      0.0f;  // of that iterate: max std / min std of the rows plus that of the columns
};

// Floats of workspace that variance_normalize needs.
KVARN_INLINE constexpr std::size_t normalize_workspace(int rows, int cols) {
  return 4 * static_cast<std::size_t>(rows) + 2 * static_cast<std::size_t>(cols);
}

inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

// The clamps of the paper's code: std to [1e-3, 1e3], log scale to [-0.3, 10].
inline constexpr float min_std = 1e-3f;
inline constexpr float max_std = 1e3f;
inline constexpr float min_paper_scale = 0.74081822f;  // exp(-0.3)
inline constexpr float max_paper_scale = 22026.465f;   // exp(10)
inline constexpr float min_equivariant_scale = 0x1p-10f;
inline constexpr float max_equivariant_scale = 0x1p10f;

// Mean and unbiased standard deviation of n numbers from sums about a shift, which guards the
// squares against cancellation.
struct moments {
  float mean;
  float squares;  // sum of squared deviations from the mean
  float std;
};

KVARN_HOST_DEVICE inline moments moments_about(float shift, float sum, float squares, int n,
                                               float unit) {
  const float inverse_n = 1.0f / static_cast<float>(n);
  moments m{};
  m.mean = std::fma(sum, inverse_n, shift);
  m.squares = max_of(std::fma(-(sum * inverse_n), sum, squares), 0.0f);
  m.std = n < 2 ? 0.0f : std::sqrt(m.squares * (1.0f / static_cast<float>(n - 1))) * unit;
  return m;
}

// Moments of n numbers at x[0], x[stride], ..., each multiplied by its weight.
KVARN_COLD moments weighted_moments(const float* x, std::ptrdiff_t stride, const float* weights,
                                    int n, float shift, float unit) {
  float sum[lanes] = {};
  float squares[lanes] = {};
  for (int i = 0; i < n; ++i) {
    const float deviation = std::fma(x[i * stride], weights[i], -shift);
    sum[i % lanes] = sum[i % lanes] + deviation;
    squares[i % lanes] = std::fma(deviation, deviation, squares[i % lanes]);
  }
  const float total = fold(sum);
  return moments_about(shift, total, fold(squares), n, unit);
}

// The largest over the smallest standard deviation that was seen on one axis.
class spread {
 public:
  explicit spread(bool skip_zero) : skip_zero_(skip_zero) {}

  void add(float std) {
    if (skip_zero_ && !(std > 0.0f)) return;
    largest_ = max_of(largest_, std);
    smallest_ = min_of(smallest_, std);
  }
  float ratio() const {
    if (largest_ < smallest_) return 1.0f;  // nothing was added
    return largest_ / max_of(smallest_, 1e-8f);
  }

 private:
  bool skip_zero_;
  float largest_ = 0.0f;
  float smallest_ = 0x1p126f;
};

// Standard deviation of the whole tile from the moments of its rows.
KVARN_COLD float overall_std(const float* mean, const float* squares, int rows, int cols,
                             float unit) {
  const auto n = static_cast<float>(cols);
  const float sum = lane_sum(rows, [&](int r, float s) { return s + (mean[r] - mean[0]); });
  const float within = lane_sum(rows, [&](int r, float s) {
    const float deviation = mean[r] - mean[0];
    return s + std::fma(deviation * n, deviation, squares[r]);
  });
  const float ratio = n / static_cast<float>(rows);
  const float total = max_of(std::fma(-(sum * ratio), sum, within), 0.0f);
  const float count = static_cast<float>(rows) * n;
  return count < 2.0f ? 0.0f : std::sqrt(total * (1.0f / (count - 1.0f))) * unit;
}

}  // namespace detail

// Normalises x, rows x cols floats, row-major and contiguous, in units of `unit` (the numbers are
// x[r][c] * unit). Writes rows row scales and cols column scales such that
// x[r][c] * unit / (row_scale[r] * col_scale[c]) is the normalised tile. x is not changed.
// `workspace`: normalize_workspace(rows, cols) floats. Precondition: rows, cols >= 1, all finite.
KVARN_COLD normalize_report variance_normalize(const float* x, int rows, int cols, float unit,
                                               const normalize_options& options, float* row_scale,
                                               float* col_scale, float* workspace) {
  float* const row_weight = workspace;       // 1 / row scale
  float* const row_std = row_weight + rows;  // under the current column weights
  float* const row_mean = row_std + rows;    // of the start
  float* const best_row = row_mean + rows;
  float* const col_weight = best_row + rows;
  float* const best_col = col_weight + cols;

  const bool equivariant = options.scale_equivariant;
  const float low = equivariant ? detail::min_equivariant_scale : detail::min_paper_scale;
  const float high = equivariant ? detail::max_equivariant_scale : detail::max_paper_scale;

  std::fill(row_scale, row_scale + rows, 1.0f);
  std::fill(col_scale, col_scale + cols, 1.0f);
  std::fill(col_weight, col_weight + cols, 1.0f);

  // Row moments of the start; `row_weight` holds the squares for the overall deviation meanwhile.
  for (int r = 0; r < rows; ++r) {
    const float* row = x + static_cast<std::ptrdiff_t>(r) * cols;
    const auto m = detail::weighted_moments(row, 1, col_weight, cols, row[0], unit);
    row_std[r] = m.std;
    row_mean[r] = m.mean;
    row_weight[r] = m.squares;
  }
  float tile_std = 1.0f;
  if (equivariant) {
    tile_std = detail::overall_std(row_mean, row_weight, rows, cols, unit);
    if (!(tile_std >= least_magnitude)) tile_std = 1.0f;  // a constant tile
  }
  const float inverse_tile_std = 1.0f / tile_std;
  std::fill(row_weight, row_weight + rows, inverse_tile_std);

  // Column deviations of the start.
  detail::spread columns(equivariant);
  for (int c = 0; c < cols; ++c) {
    const auto m = detail::weighted_moments(x + c, cols, row_weight, rows,
                                            rounded(x[c] * inverse_tile_std), unit);
    columns.add(m.std);
  }
  float column_ratio = columns.ratio();

  normalize_report report;
  for (int iteration = 0;; ++iteration) {
    detail::spread row_spread(equivariant);
    for (int r = 0; r < rows; ++r) {
      row_std[r] = row_std[r] * row_weight[r];
      row_spread.add(row_std[r]);
    }
    const float imbalance = row_spread.ratio() + column_ratio;
    if (iteration == 0 || imbalance <= report.imbalance) {  // ties take the newer
      report.best = iteration;
      report.imbalance = imbalance;
      std::copy(row_scale, row_scale + rows, best_row);
      std::copy(col_scale, col_scale + cols, best_col);
    }
    if (iteration == options.iterations) break;
    report.iterations = iteration + 1;

    for (int r = 0; r < rows; ++r) {
      const float std = clamp(row_std[r], detail::min_std, detail::max_std);
      row_scale[r] = clamp(row_scale[r] * std, low, high);
      row_weight[r] = (1.0f / row_scale[r]) * inverse_tile_std;
    }
    detail::spread column_spread(equivariant);
    for (int c = 0; c < cols; ++c) {
      const auto m = detail::weighted_moments(x + c, cols, row_weight, rows,
                                              rounded(x[c] * row_weight[0]), unit);
      const float std = clamp(m.std * col_weight[c], detail::min_std, detail::max_std);
      col_scale[c] = clamp(col_scale[c] * std, low, high);
      col_weight[c] = 1.0f / col_scale[c];
      column_spread.add(m.std * col_weight[c]);
    }
    column_ratio = column_spread.ratio();
    for (int r = 0; r < rows; ++r) {
      const float* row = x + static_cast<std::ptrdiff_t>(r) * cols;
      const auto m =
          detail::weighted_moments(row, 1, col_weight, cols, rounded(row[0] * col_weight[0]), unit);
      row_std[r] = m.std;
    }
  }
  for (int r = 0; r < rows; ++r) row_scale[r] = best_row[r] * tile_std;
  std::copy(best_col, best_col + cols, col_scale);
  return report;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
