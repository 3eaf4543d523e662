// Codes with error feedback by one block: 16 columns at a time.
//
// The errors of a column move the targets of all columns behind it, in the order of columns
// (docs/arithmetic.md, section 6). Of a *run* of 16 columns, one thread has a whole row and rounds
// it column by column. Then every thread adds the 16 errors of its rows to the targets that it owns
// behind the run: it reads an error of each row and a factor of each column for up to 8 x 8
// products. Half of the warps wait while rows are rounded. Two rows a thread there, or each warp
// rounding its own rows without waiting for others, were slower by 9 and 20 %.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "encode_sums.cuh"
#include "encode_tile.cuh"
#include "rotation.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// Rows one after another in the order of place_of, with 16 floats more behind every 32: so two rows
// of a warp's elements, and 16 rows of pairs of columns, are on different banks where row_floats is
// 2 more than a multiple of 16.
struct rows_in_order {
  float* memory;
  int row_floats;

  __device__ float* row(int place) const { return memory + place * row_floats + 16 * (place / 32); }
};
KVARN_INLINE constexpr int floats_in_order(int rows, int row_floats) {
  return rows * row_floats + 16 * (rows / 32);
}

// Shared memory of error feedback, in floats, and where its parts begin. Deviations are in the
// buffer where the shape is fixed, else behind the tile.
struct feedback_plan {
  int rows;
  int cols;
  bool fixed;

  static constexpr int run = 16;
  static constexpr int target_floats = run + 2;
  KVARN_INLINE constexpr int deviation_row_floats() const { return cols + 2; }
  KVARN_INLINE constexpr int deviation_floats() const {
    return floats_in_order(rows, deviation_row_floats());
  }
  KVARN_INLINE constexpr int errors() const { return floats_in_order(rows, target_floats); }
  KVARN_INLINE constexpr int grids() const { return errors() + run * rows; }
  KVARN_INLINE constexpr int panels() const { return grids() + 2 * cols; }
  KVARN_INLINE constexpr int floats() const { return panels() + (fixed ? 2 * run * cols : 0); }
};

// 8 codes of 4 bits each become 8 numbers of Width bits, taken from bit `shift` of a code on.
template <int Width>
__device__ std::uint32_t narrow_codes(std::uint32_t codes, int shift) {
  std::uint32_t x = codes >> shift;
  if constexpr (Width == 2) {
    x &= 0x33333333u;
    x = (x | x >> 2) & 0x0f0f0f0fu;
    x = (x | x >> 4) & 0x00ff00ffu;
    x = (x | x >> 8) & 0xffffu;
  }
  if constexpr (Width == 1) {
    x &= 0x11111111u;
    x = (x | x >> 3) & 0x03030303u;
    x = (x | x >> 6) & 0x000f000fu;
    x = (x | x >> 12) & 0xffu;
  }
  return x;
}

template <class Shape>
class feedback_rounding {
 public:
  // `memory`: feedback_plan. `deviations`: see there. `factor`: U of the head.
  __device__ feedback_rounding(block_tile<Shape>& tile, const encode_vectors<Shape>& vectors,
                               float* memory, float* deviations, const float* factor,
                               const tile_layout& layout, std::byte* record)
      : tile_(tile),
        vectors_(vectors),
        memory_(memory),
        deviations_{deviations, plan().deviation_row_floats()},
        factor_(factor),
        layout_(layout),
        record_(record) {}

  // The tile's elements become targets.
  __device__ void run() {
    copy_panel(0);
    const auto inverse = tile_.own_rows(vectors_.inverse_scale());
    tile_.for_cols([&](int j) {
      const float zero = vectors_.zero()[tile_.col_place(j)];
      tile_.for_rows([&](int i) {
        const float t = std::fma(tile_.x(i, j), inverse(i), -zero);
        tile_.x.set(i, j, t);
        deviations_.row(tile_.row_place(i))[tile_.l + 16 * j] = t;
      });
    });
    tile_.each_col([&](int c, int p) {
      grids()[c] = make_float2(vectors_.inverse_range()[p], vectors_.step()[p]);
    });
    put_targets(0);
#pragma unroll 1
    for (int jc = 0; jc < tile_.col_steps(); ++jc) {
      if constexpr (Shape::is_fixed) wait_for_copies();
      __syncthreads();
      copy_panel(jc + 1);
      round_run(jc);
      __syncthreads();
      update(jc);
    }
  }

 private:
  static constexpr int run_cols = feedback_plan::run;

  __device__ feedback_plan plan() const { return {tile_.rows(), tile_.cols(), Shape::is_fixed}; }
  __device__ rows_in_order targets() const { return {memory_, feedback_plan::target_floats}; }
  __device__ float* errors() const { return memory_ + plan().errors(); }
  // Inverse range and step of each column, in the order of columns.
  __device__ float2* grids() const { return reinterpret_cast<float2*>(memory_ + plan().grids()); }
  // 16 rows of the factor.
  __device__ float* panel(int jc) const {
    return memory_ + plan().panels() + (jc & 1) * run_cols * tile_.cols();
  }
  __device__ const float* factor_rows(int jc) const {
    if constexpr (Shape::is_fixed)
      return panel(jc);
    else
      return factor_ + std::int64_t{run_cols} * jc * tile_.cols();
  }
  __device__ void copy_panel(int jc) const {
    if (!Shape::is_fixed || jc >= tile_.col_steps()) return;
    const float* const from = factor_ + run_cols * jc * tile_.cols();
    for (int i = 4 * static_cast<int>(threadIdx.x); i < run_cols * tile_.cols();
         i += 4 * block_threads)
      copy_16_bytes(panel(jc) + i, from + i);
  }

  // Codes and errors of a run: one thread per row, of other warps for every run.
  __device__ void round_run(int jc) const {
    const int place = static_cast<int>(threadIdx.x) - jc * tile_.rows() % block_threads;
    if (place < 0 || place >= tile_.rows()) return;
    const float n = static_cast<float>(layout_.max_code());
    const float* const factor = factor_rows(jc) + run_cols * jc;
    const float* const deviation = deviations_.row(place) + run_cols * jc;
    // Of columns before m: errors.
    float target[run_cols];
#pragma unroll
    for (int m = 0; m < run_cols; m += 2) {
      const float2 pair = *reinterpret_cast<const float2*>(targets().row(place) + m);
      target[m] = pair.x;
      target[m + 1] = pair.y;
    }
    std::uint32_t codes[2] = {};  // of 4 bits
#pragma unroll
    for (int m = 0; m < run_cols; ++m) {
      // Of two columns at a time.
      const auto t = *reinterpret_cast<const float2*>(deviation + m / 2 * 2);
      const auto grid = *reinterpret_cast<const float4*>(grids() + run_cols * jc + m / 2 * 2);
      const float shifted = shifted_code(target[m], m % 2 == 0 ? grid.x : grid.z, n);
      codes[m / 8] += (bits_of(shifted) - bits_of(integer_shift)) << (4 * (m % 8));
      target[m] = std::fma(-__fsub_rn(shifted, integer_shift), m % 2 == 0 ? grid.y : grid.w,
                           m % 2 == 0 ? t.x : t.y);
#pragma unroll
      for (int quad = (m + 1) / 4 * 4; quad < run_cols; quad += 4) {
        const float4 u = *reinterpret_cast<const float4*>(factor + m * tile_.cols() + quad);
        const float weight[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (quad + k > m) target[quad + k] = std::fma(target[m], weight[k], target[quad + k]);
      }
    }
#pragma unroll
    for (int m = 0; m < run_cols; ++m) errors()[m * tile_.rows() + place] = target[m];
    store_run(element_at(place), jc, codes);
  }

  __device__ void store_run(int row, int jc, const std::uint32_t (&codes)[2]) const {
    for (int plane = 0; plane < layout_.planes(); ++plane) {
      const int width = layout_.plane_bits(plane);
      const int shift = layout_.plane_shift(plane);
      std::byte* const out = record_ + layout_.code_offset(plane, row) + 2 * width * jc;
      if (width == 1)
        *reinterpret_cast<std::uint16_t*>(out) = static_cast<std::uint16_t>(
            narrow_codes<1>(codes[0], shift) | narrow_codes<1>(codes[1], shift) << 8);
      if (width == 2)
        *reinterpret_cast<std::uint32_t*>(out) =
            narrow_codes<2>(codes[0], shift) | narrow_codes<2>(codes[1], shift) << 16;
      if (width == 4) *reinterpret_cast<uint2*>(out) = make_uint2(codes[0], codes[1]);
    }
  }

  __device__ void put_targets(int j) const {
    tile_.for_rows([&](int i) { targets().row(tile_.row_place(i))[tile_.l] = tile_.x(i, j); });
  }

  // Adds the errors of a run to the targets behind it, and puts those of the next run out.
  __device__ void update(int jc) {
    const float* const factor = factor_rows(jc) + tile_.l;
    if constexpr (Shape::is_fixed) {
      update_registers<0>(jc, factor);
    } else {
      tile_.for_rows([&](int i) {
        float error[run_cols];
#pragma unroll
        for (int k = 0; k < run_cols; ++k)
          error[k] = errors()[k * tile_.rows() + tile_.row_place(i)];
        for (int j = jc + 1; j < tile_.col_steps(); ++j) {
          float target = tile_.x(i, j);
#pragma unroll
          for (int k = 0; k < run_cols; ++k)
            target = std::fma(error[k], __ldg(factor + k * tile_.cols() + 16 * j), target);
          tile_.x.set(i, j, target);
        }
      });
      if (jc + 1 < tile_.col_steps()) put_targets(jc + 1);
    }
  }
  // Elements in registers have numbers that the compiler must know: a copy of the loop for each
  // run.
  template <int Run>
  __device__ void update_registers(int jc, const float* factor) {
    if constexpr (Run + 1 < Shape::max_col_steps) {
      if (jc != Run) return update_registers<Run + 1>(jc, factor);
#pragma unroll(Shape::max_col_steps - Run > 4 ? 2 : 4)
      for (int k = 0; k < run_cols; ++k) {
        const auto error = tile_.own_rows(errors() + k * tile_.rows());
#pragma unroll
        for (int j = Run + 1; j < Shape::max_col_steps; ++j) {
          const float weight = factor[k * tile_.cols() + 16 * j];
          tile_.for_rows(
              [&](int i) { tile_.x.set(i, j, std::fma(error(i), weight, tile_.x(i, j))); });
        }
      }
      put_targets(Run + 1);
    }
  }

  block_tile<Shape>& tile_;
  const encode_vectors<Shape>& vectors_;
  float* const memory_;
  const rows_in_order deviations_;
  const float* const factor_;
  const tile_layout& layout_;
  std::byte* const record_;
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
