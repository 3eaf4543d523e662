// Encoding and decoding of one tile in plain scalar code: the definition of the method.
//
// Encoding, in this order (each value is rounded before what depends on it, so that later steps
// absorb its error):
//   1. rotate every token's head vector by the Hadamard matrix;
//   2. find a scale per row and round it to FP8;
//   3. find a step (FP8) and a zero (binary16) per column of the tile divided by the row scales;
//   4. for keys of tuned, try the two FP8 numbers beside each row scale;
//   5. round to codes, and pack.
// Every operation and its order: docs/arithmetic.md. To call: tile_codec.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "../config.hpp"
#include "../format/float16.hpp"
#include "../format/float8.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
#include "arithmetic.hpp"
#include "encoder.hpp"
#include "hadamard.hpp"
#include "round_columns.hpp"
#include "tokens.hpp"
#include "variance_normalize.hpp"

namespace kvarn {

struct encode_report {
  replaced_values replaced;    // input values that could not be stored as they came
  normalize_report normalize;  // of the dual-axis recipes
};

inline namespace KVARN_ISA_NAMESPACE {

// Floats of workspace that encode_tile needs on any target. The scalar code takes the tile, 7 of
// its columns and 7 of its rows (encode_buffers); the kernels take the tile, its columns up to 16
// apart, 18 sums over each row and what alignment takes (simd/codec_kernels.inl asserts it).
constexpr std::size_t encode_workspace(const tile_layout& layout) {
  const auto rows = static_cast<std::size_t>(layout.rows());
  const auto cols = static_cast<std::size_t>(layout.cols());
  return rows * cols + 18 * rows + 16 * cols + alignment_floats;
}

namespace detail {

// The power of two that moves from the row scales into the steps, so that both stay in the normal
// range of their FP8 type: none for ordinary tiles, half of what is missing for tiny ones, all of
// what is too much for huge ones. Tiles that differ by a power of two thus have the same codes.
KVARN_HOST_DEVICE inline int scale_shift(scale_type type, float largest_scale) {
  const bool wide = type == scale_type::ue5m3;
  // `low` leaves as much room below for smaller rows.
  const int low = (wide ? ue5m3::min_normal_exponent : e4m3::min_normal_exponent) / 2;
  const int high = (wide ? ue5m3::max_exponent : e4m3::max_exponent) - 1;
  if (!(largest_scale >= least_magnitude)) return 0;  // a tile of zeros
  const int exponent = exponent_of(largest_scale);
  if (exponent > high) return exponent - high;
  if (exponent < low) return (exponent - low) / 2;
  return 0;
}

}  // namespace detail

namespace scalar {

// The memory of one encoding, cut from the caller's workspace.
struct encode_buffers {
  float* x;              // rows x cols: the rotated tile, without the factor 1/sqrt(head_dim)
  float* row_scale;      // rows
  float* inverse_scale;  // rows: unit / rounded scale
  float* row_weight;     // rows: rounded scale squared
  float* zero;           // cols: the grid by which codes are made
  float* step;           // cols
  float* inverse_range;  // cols
  float* error;          // cols: of one row
  float* col_scale;      // cols
  float* normalize;      // workspace of variance_normalize; at first the vector of a value token

  encode_buffers(const tile_layout& layout, float* workspace) {
    const std::ptrdiff_t rows = layout.rows();
    const std::ptrdiff_t cols = layout.cols();
    const auto take = [&](std::ptrdiff_t n) { return std::exchange(workspace, workspace + n); };
    x = take(rows * cols);
    row_scale = take(rows);
    inverse_scale = take(rows);
    row_weight = take(rows);
    zero = take(cols);
    step = take(cols);
    inverse_range = take(cols);
    error = take(cols);
    col_scale = take(cols);
    normalize = take(0);
  }
};

// Loads the tokens, rotates them and puts each into its row (keys) or column (values) of `x`.
// `vector`: head_dim floats.
template <class T>
void load_tile(tokens_view<T> tokens, const tile_layout& layout, bool rotate, float* x,
               float* vector, replaced_values& replaced) {
  const bool is_key = layout.kind == tile_kind::key;
  for (int t = 0; t < layout.group; ++t) {
    float* const token = is_key ? x + static_cast<std::ptrdiff_t>(t) * layout.head_dim : vector;
    load_token(tokens, t, layout.head_dim, token, replaced);
    if (rotate) hadamard_unnormalized(token, layout.head_dim);
    if (!is_key)
      for (int d = 0; d < layout.head_dim; ++d)
        x[static_cast<std::ptrdiff_t>(d) * layout.group + t] = token[d];
  }
}

// About the geometric mean of n numbers, zeros left out; 0 where all are. (The mean of the bit
// patterns, which is that of logarithms interpolated linearly within an octave.)
KVARN_COLD float typical(const float* values, int n) {
  std::uint32_t sum = 0;
  std::uint32_t count = 0;
  for (int i = 0; i < n; ++i) {
    if (!(values[i] >= least_magnitude)) continue;
    sum += bits_of(values[i]) >> 10;
    ++count;
  }
  return count == 0 ? 0.0f : float_of_bits((sum / count) << 10);
}

// row_scale[r] = the root mean square of row r of x * unit, times a common factor near 1 by which
// the typical row lies in the middle of what one FP8 code holds: a large offset that all rows share
// is then not torn apart by the rounding of their scales.
KVARN_COLD void rms_scales(const float* x, int rows, int cols, float unit, float* row_scale) {
  const float inverse_n = 1.0f / static_cast<float>(cols);
  for (int r = 0; r < rows; ++r) {
    const float* row = x + static_cast<std::ptrdiff_t>(r) * cols;
    const float squares =
        lane_sum(cols, [row](int c, float sum) { return std::fma(row[c], row[c], sum); });
    row_scale[r] = std::sqrt(squares * inverse_n) * unit;
  }
  const float row_level = typical(row_scale, rows);
  if (row_level == 0.0f) return;
  const float common = power_of_two(exponent_of(row_level)) / row_level;
  for (int r = 0; r < rows; ++r) row_scale[r] = row_scale[r] * common;
}

// The same of the tile whose columns are divided by their own root mean square, so that one token
// out of proportion does not decide the scales for the others; the typical column gives the
// magnitude. `col_rms`: cols floats of workspace.
KVARN_COLD void equalized_rms_scales(const float* x, int rows, int cols, float unit, float* col_rms,
                                     float* row_scale) {
  const float inverse_rows = 1.0f / static_cast<float>(rows);
  for (int c = 0; c < cols; ++c) {
    const float squares = lane_sum(rows, [&](int r, float sum) {
      const float value = x[static_cast<std::ptrdiff_t>(r) * cols + c];
      return std::fma(value, value, sum);
    });
    col_rms[c] = std::sqrt(squares * inverse_rows) * unit;
  }
  const float level = typical(col_rms, cols);
  float* const weight = col_rms;
  for (int c = 0; c < cols; ++c)
    weight[c] = col_rms[c] >= least_magnitude ? 1.0f / col_rms[c] : 0.0f;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  for (int r = 0; r < rows; ++r) {
    const float* row = x + static_cast<std::ptrdiff_t>(r) * cols;
    const float squares = lane_sum(cols, [&](int c, float sum) {
      const float value = row[c] * weight[c];
      return std::fma(value, value, sum);
    });
    row_scale[r] = std::sqrt(squares * inverse_cols);
  }
  const float row_level = typical(row_scale, rows);
  if (row_level == 0.0f) return;
  const float common = power_of_two(exponent_of(level)) / row_level;
  for (int r = 0; r < rows; ++r) row_scale[r] = row_scale[r] * common;
}

// The scale of each row becomes that of the three FP8 numbers around it under which the row costs
// least; the grids are those of buffers. Ties leave it, then go to the smaller one.
KVARN_COLD void choose_scales(const encode_buffers& buffers, tile_view out, float along,
                              float unit) {
  const int cols = out.layout.cols();
  for (int r = 0; r < out.layout.rows(); ++r) {
    const float* row = buffers.x + static_cast<std::ptrdiff_t>(r) * cols;
    const float along_weight = weight_along(
        along, lane_sum(cols, [row](int c, float sum) { return std::fma(row[c], row[c], sum); }));
    const std::uint8_t middle = out.scale_bits(r);
    float best = 0.0f;
    for (const int by : {0, -1, 1}) {
      const rounded_fp8 scale = neighbour_of(middle, by, out.layout.scale);
      const float inverse = unit / scale.value;
      const float squared = scale.value * scale.value;
      const float cost = cost_of_row(row, cols, inverse, squared, buffers.zero, buffers.step,
                                     buffers.inverse_range, out.layout.max_code(), along_weight);
      if (by != 0 && !(cost < best)) continue;
      best = cost;
      out.set_scale_bits(r, scale.bits);
      buffers.inverse_scale[r] = inverse;
    }
  }
}

// Encodes the tile buffers.x * unit, upper_factor as below.
KVARN_COLD normalize_report encode_loaded(const encode_buffers& buffers, tile_view out,
                                          const encoder_recipe& recipe, float unit,
                                          const float* upper_factor) {
  const tile_layout& layout = out.layout;
  const scale_type type = layout.scale;
  const int rows = layout.rows();
  const int cols = layout.cols();
  const int max_code = layout.max_code();
  normalize_report report;

  // 2. Row scales.
  switch (recipe.scaling) {
    case row_scaling::rms:
      rms_scales(buffers.x, rows, cols, unit, buffers.row_scale);
      break;
    case row_scaling::rms_equalized:
      equalized_rms_scales(buffers.x, rows, cols, unit, buffers.col_scale, buffers.row_scale);
      break;
    case row_scaling::dual_axis:
    case row_scaling::dual_axis_equivariant:
      report = variance_normalize(
          buffers.x, rows, cols, unit,
          {.iterations = recipe.iterations,
           .scale_equivariant = recipe.scaling == row_scaling::dual_axis_equivariant},
          buffers.row_scale, buffers.col_scale, buffers.normalize);
      break;
  }
  const float largest = *std::max_element(buffers.row_scale, buffers.row_scale + rows);
  const float shift = power_of_two(-detail::scale_shift(type, largest));
  for (int r = 0; r < rows; ++r) {
    const rounded_fp8 scale = round_fp8(buffers.row_scale[r] * shift, type);
    out.set_scale_bits(r, scale.bits);
    buffers.inverse_scale[r] = unit / scale.value;
    buffers.row_weight[r] = scale.value * scale.value;
  }

  // 3. Steps and zeros.
  const scaled_tile tile{buffers.x, buffers.inverse_scale, rows, cols};
  for (int c = 0; c < cols; ++c) {
    column_grid grid = fit_range(tile, c, recipe.range, recipe.cover, max_code, type);
    for (int i = 0; i < recipe.refits; ++i)
      grid = refit(tile, c, grid, max_code, buffers.row_weight, type);
    buffers.zero[c] = grid.zero;
    buffers.step[c] = grid.step;
    buffers.inverse_range[c] = inverse_range(grid.step, max_code);
    if (recipe.unbiased) grid = unbias(tile, c, grid, max_code, type);
    out.set_zero(c, float16(grid.zero));
    out.set_step_bits(c, round_fp8(grid.step, type).bits);
  }

  // 4. Row scales once more.
  KVARN_ASSERT(!(recipe.choose_scales && recipe.unbiased));
  if (recipe.choose_scales) choose_scales(buffers, out, recipe.along, unit);

  // 5. Codes.
  const float* const upper = recipe.error_feedback ? upper_factor : nullptr;
  std::uint8_t codes[std::max(max_head_dim, max_group)];
  for (int r = 0; r < rows; ++r) {
    const float* row = buffers.x + static_cast<std::ptrdiff_t>(r) * cols;
    for (int c = 0; c < cols; ++c) {
      const float t = std::fma(row[c], buffers.inverse_scale[r], -buffers.zero[c]);
      float target = t;
      if (upper != nullptr)
        for (int i = 0; i < c; ++i)
          target =
              std::fma(buffers.error[i], upper[static_cast<std::ptrdiff_t>(i) * cols + c], target);
      const float code = round_code(target, buffers.inverse_range[c], max_code);
      buffers.error[c] = std::fma(-code, buffers.step[c], t);
      codes[c] = static_cast<std::uint8_t>(code);
    }
    out.pack_row(r, codes);
  }
  return report;
}

// Encodes layout.group tokens. `upper_factor`: query_factor::upper() where the recipe has error
// feedback. Otherwise as kvarn::encode_tile.
template <class T>
encode_report encode_tile(tokens_view<T> tokens, tile_view out, const encoder_recipe& recipe,
                          bool rotate, const float* upper_factor, float* workspace) {
  const tile_layout& layout = out.layout;
  const encode_buffers buffers(layout, workspace);
  encode_report report;
  // 1. The rotated tile is x * unit.
  load_tile(tokens, layout, rotate, buffers.x,
            layout.kind == tile_kind::key ? nullptr : buffers.normalize, report.replaced);
  const float unit = rotate ? hadamard_norm(layout.head_dim) : 1.0f;
  report.normalize = encode_loaded(buffers, out, recipe, unit, upper_factor);
  return report;
}

// Decodes row `row` of the tile (a token of keys, a channel of values) as stored, that is rotated:
// layout.cols() floats.
inline void decode_row(const_tile_view tile, int row, float* out) {
  const float scale = tile.scale(row);
  for (int c = 0; c < tile.layout.cols(); ++c)
    out[c] = std::fma(static_cast<float>(tile.code(row, c)), tile.step(c),
                      static_cast<float>(tile.zero(c))) *
             scale;
}

// Decodes `count` tokens from `first` on into out's tokens 0 .. count - 1. `rotate_back`: false
// leaves the vectors rotated. FP16 and BF16 output saturates. Precondition: 0 <= first, first +
// count <= layout.group.
template <class T>
void decode_tokens(const_tile_view tile, int first, int count, tokens_view<T> out,
                   bool rotate_back) {
  const tile_layout& layout = tile.layout;
  KVARN_ASSERT(first >= 0 && count >= 0 && first + count <= layout.group);
  const bool is_key = layout.kind == tile_kind::key;
  float vector[max_head_dim];
  for (int t = 0; t < count; ++t) {
    for (int d = 0; d < layout.head_dim; ++d) {
      const int row = is_key ? first + t : d;
      const int col = is_key ? d : first + t;
      const float value = std::fma(static_cast<float>(tile.code(row, col)), tile.step(col),
                                   static_cast<float>(tile.zero(col))) *
                          tile.scale(row);
      vector[d] = rounded(value);
    }
    if (rotate_back) hadamard(vector, layout.head_dim);
    for (int d = 0; d < layout.head_dim; ++d) out.store(t, d, vector[d]);
  }
}

// Rotates `count` tokens of `head_dim` channels. `out` may be `in`. What FP16 cannot hold is
// replaced, before the rotation and after it.
template <class T, class O>
replaced_values rotate_tokens(tokens_view<T> in, tokens_view<O> out, int count, int head_dim) {
  replaced_values replaced;
  float vector[max_head_dim];
  for (int t = 0; t < count; ++t) {
    load_token(in, t, head_dim, vector, replaced);
    hadamard(vector, head_dim);
    for (int d = 0; d < head_dim; ++d) out.store(t, d, sanitize(vector[d], replaced));
  }
  return replaced;
}

}  // namespace scalar
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
