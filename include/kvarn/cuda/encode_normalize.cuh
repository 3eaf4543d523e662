// Row scales of the encoder `paper` on a device: variance_normalize of the scalar code with
// scale_equivariant = false, by one block.
#pragma once

#include <cmath>

#include "../codec/arithmetic.hpp"
#include "../codec/variance_normalize.hpp"
#include "device.cuh"
#include "encode_sums.cuh"
#include "encode_tile.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// What is remembered of every iterate, the start among them, until the best is known.
template <class Shape>
class normalize_history {
 public:
  __device__ normalize_history(float* memory, const Shape& shape)
      : memory_(memory), shape_(shape) {}

  __device__ float* row_std(int t) const { return memory_ + t * floats(); }
  __device__ float* row_scale(int t) const { return row_std(t) + vector_floats(shape_.rows()); }
  __device__ float* col_std(int t) const { return row_scale(t) + vector_floats(shape_.rows()); }
  // Of the iterates up to the last one.
  __device__ float* imbalance(int last) const { return row_std(last + 1); }

 private:
  __device__ int floats() const {
    return 2 * vector_floats(shape_.rows()) + vector_floats(shape_.cols());
  }
  float* memory_;
  Shape shape_;
};

KVARN_INLINE constexpr int normalize_history_floats(int rows, int cols, int iterations) {
  return (iterations + 1) * (2 * vector_floats(rows) + vector_floats(cols)) + iterations + 1;
}

// Leaves the row scales in v.row_scale(). Synchronises the block.
template <class Shape>
__device__ void normalize_rows(const block_tile<Shape>& tile, const encode_vectors<Shape>& v,
                               const normalize_history<Shape>& history, int iterations,
                               float unit) {
  using kvarn::detail::moments_about;
  const auto divided_scale = [](float scale, float std) {
    const float clamped = clamp(std, kvarn::detail::min_std, kvarn::detail::max_std);
    return clamp(product_of(scale, clamped), kvarn::detail::min_paper_scale,
                 kvarn::detail::max_paper_scale);
  };
  if (tile.l == 0) tile.for_rows([&](int i) { v.row_first()[tile.row_place(i)] = tile.x(i, 0); });
  if (tile.g == 0) tile.for_cols([&](int j) { v.col_first()[tile.col_place(j)] = tile.x(0, j); });
  tile.each_row([&](int, int p) { v.row_scale()[p] = v.row_weight()[p] = 1.0f; });
  tile.each_col([&](int, int p) { v.col_scale()[p] = v.col_weight()[p] = 1.0f; });
  __syncthreads();
#pragma unroll 1
  for (int t = 0;; ++t) {
    {
      // Columns of iterate t; of the start as they are.
      const auto weight = tile.own_rows(v.row_weight());
      const auto first = tile.own_cols(v.col_first());
      const float first_weight = v.row_weight()[0];
      tile.template col_sums<2>(
          [&](int i, int j, float(&s)[2]) {
            const float d = std::fma(tile.x(i, j), weight(i), -__fmul_rn(first(j), first_weight));
            s[0] = s[0] + d;
            s[1] = std::fma(d, d, s[1]);
          },
          [&](int, int p, float(&s)[2]) {
            const float shift = __fmul_rn(v.col_first()[p], first_weight);
            float std = moments_about(shift, s[0], s[1], tile.rows(), unit).std;
            if (t > 0) {
              v.col_scale()[p] =
                  divided_scale(v.col_scale()[p], product_of(std, v.col_weight()[p]));
              v.col_weight()[p] = 1.0f / v.col_scale()[p];
              std = product_of(std, v.col_weight()[p]);
            }
            history.col_std(t)[p] = std;
          });
    }
    const auto weight = tile.own_cols(v.col_weight());
    const auto first = tile.own_rows(v.row_first());
    const float first_weight = v.col_weight()[0];
    tile.template row_sums<2>(
        [&](int i, int j, float(&s)[2]) {
          const float d = std::fma(tile.x(i, j), weight(j), -__fmul_rn(first(i), first_weight));
          s[0] = s[0] + d;
          s[1] = std::fma(d, d, s[1]);
        },
        [&](int, int p, float(&s)[2]) {
          const float shift = __fmul_rn(v.row_first()[p], first_weight);
          const float std = product_of(moments_about(shift, s[0], s[1], tile.cols(), unit).std,
                                       v.row_weight()[p]);
          history.row_std(t)[p] = std;
          history.row_scale(t)[p] = v.row_scale()[p];
          v.row_scale()[p] = divided_scale(v.row_scale()[p], std);
          v.row_weight()[p] = 1.0f / v.row_scale()[p];
        });
    __syncthreads();
    if (t == iterations) break;
  }
  for (int t = static_cast<int>(threadIdx.x) / 32; t <= iterations; t += block_threads / 32) {
    const float sum = __fadd_rn(spread_of(history.row_std(t), tile.rows()),
                                spread_of(history.col_std(t), tile.cols()));
    if (lane_index() == 0) history.imbalance(iterations)[t] = sum;
  }
  __syncthreads();
  int best = 0;
  for (int t = 1; t <= iterations; ++t)
    if (history.imbalance(iterations)[t] <= history.imbalance(iterations)[best]) best = t;
  tile.each_row([&](int, int p) { v.row_scale()[p] = history.row_scale(best)[p]; });
  __syncthreads();
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
