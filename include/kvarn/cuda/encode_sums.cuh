// A tile in a block of 16 x 16 threads, and sums over its rows and columns. Thread (g, l) owns the
// elements of rows g, g + 16, ... and columns l, l + 16, ..., which are the lanes of the sums in
// docs/arithmetic.md. So a thread adds its own elements in order, and only the 16 lanes are joined
// across threads: the 16 of a row lie in one warp, those of a column go through shared memory.
#pragma once

#include "device.cuh"
#include "encode_tile.cuh"
#include "rotation.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// Columns whose sums are joined at a time, by one thread each.
inline constexpr int cols_at_once = 128;

// Floats of shared memory for Q partial sums of columns.
KVARN_INLINE constexpr int partial_floats(int q) { return q * 16 * cols_at_once; }

template <class Shape>
class block_tile {
 public:
  // `elements`: where the elements are, if not in registers. `partials`: partial_floats of the
  // largest Q.
  __device__ block_tile(const Shape& shape, float* elements, float* partials)
      : g((static_cast<int>(threadIdx.x) >> 5) + 8 * ((static_cast<int>(threadIdx.x) >> 4) & 1)),
        l(static_cast<int>(threadIdx.x) & 15),
        x(shape, elements),
        shape_(shape),
        partials_(partials) {}

  const int g;
  const int l;
  owned_elements<Shape> x;

  __device__ int rows() const { return shape_.rows(); }
  __device__ int cols() const { return shape_.cols(); }
  __device__ int row_steps() const { return shape_.rows() / 16; }
  __device__ int col_steps() const { return shape_.cols() / 16; }
  __device__ int row_place(int i) const { return 4 * g + place_of(16 * i); }
  __device__ int col_place(int j) const { return 4 * l + place_of(16 * j); }

  using row_values = lane_vector<Shape, Shape::max_row_steps>;
  using col_values = lane_vector<Shape, Shape::max_col_steps>;
  __device__ row_values own_rows(const float* vector) const { return {vector, g}; }
  __device__ col_values own_cols(const float* vector) const { return {vector, l}; }

  template <class F>
  __device__ void for_rows(const F& f) const {
#pragma unroll(Shape::is_fixed ? Shape::max_row_steps : 1)
    for (int i = 0; i < Shape::max_row_steps; ++i) {
      if (i >= row_steps()) break;
      f(i);
    }
  }
  template <class F>
  __device__ void for_cols(const F& f) const {
#pragma unroll(Shape::is_fixed ? Shape::max_col_steps : 1)
    for (int j = 0; j < Shape::max_col_steps; ++j) {
      if (j >= col_steps()) break;
      f(j);
    }
  }
  // Whether each_row() gives this warp any.
  __device__ bool has_row() const {
    return static_cast<int>(threadIdx.x) / 32 * 32 < vector_floats(rows());
  }
  // f(row, place): one thread per row; f(column, place): one thread per column.
  template <class F>
  __device__ void each_row(const F& f) const {
    each(rows(), f);
  }
  template <class F>
  __device__ void each_col(const F& f) const {
    each(cols(), f);
  }

  // Sums over the columns of each row: `add(i, j, sums)` adds element (i, j) to Q sums, `done(row,
  // place, sums)` gets those of a row, by one thread of the warp that owns it.
  template <int Q, class Add, class Done>
  __device__ void row_sums(const Add& add, const Done& done) const {
    constexpr int at_once = Shape::rows_at_once;
    for (int first = 0; first < row_steps(); first += at_once) {
      float sums[Q][at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        float s[Q] = {};
        if (first + i < row_steps()) for_cols([&](int j) { add(first + i, j, s); });
#pragma unroll
        for (int q = 0; q < Q; ++q) sums[q][i] = s[q];
      }
      // Every step halves the rows of which a lane has sums, down to one.
#pragma unroll
      for (int mask = 8; mask > 0; mask /= 2)
#pragma unroll
        for (int q = 0; q < Q; ++q) {
          const int half = at_once * mask / 16;
          if (half == 0) sums[q][0] = sums[q][0] + __shfl_xor_sync(all_lanes, sums[q][0], mask);
#pragma unroll
          for (int i = 0; i < half; ++i) {
            const bool is_upper = (l & mask) != 0;
            const float sent = is_upper ? sums[q][i] : sums[q][i + half];
            const float kept = is_upper ? sums[q][i + half] : sums[q][i];
            sums[q][i] = kept + __shfl_xor_sync(all_lanes, sent, mask);
          }
        }
      const int i = first + l * at_once / 16;
      if (l % (16 / at_once) != 0 || i >= row_steps()) continue;
      float s[Q];
#pragma unroll
      for (int q = 0; q < Q; ++q) s[q] = sums[q][0];
      done(g + 16 * i, row_place(i), s);
    }
  }

  // The same over the rows of each column; `join(q, a, b)` joins two lanes. Synchronises the block.
  // What done() writes can be read behind it.
  template <int Q, class Start, class Add, class Join, class Done>
  __device__ void column_fold(const Start& start, const Add& add, const Join& join,
                              const Done& done) const {
    const auto partial = [&](int q, int lane) {
      return partials_ + (16 * q + lane) * cols_at_once;
    };
    constexpr int steps = Shape::is_fixed ? Shape::max_col_steps : cols_at_once / 16;
    for (int first = 0; first < col_steps(); first += cols_at_once / 16) {
#pragma unroll
      for (int quad = 0; quad < steps; quad += 4) {
        float sums[4][Q];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          start(sums[k]);
          const int j = first + quad + k;
          if (j < col_steps()) for_rows([&](int i) { add(i, j, sums[k]); });
        }
#pragma unroll
        for (int q = 0; q < Q; ++q)
          *reinterpret_cast<float4*>(partial(q, g) + col_place(quad)) =
              make_float4(sums[0][q], sums[1][q], sums[2][q], sums[3][q]);
      }
      __syncthreads();
      const int place = static_cast<int>(threadIdx.x);
      const int c = 16 * first + element_at(place);
      if (place < cols_at_once && c < cols()) {
        float sums[Q];
#pragma unroll
        for (int q = 0; q < Q; ++q) {
          float v[8];
#pragma unroll
          for (int lane = 0; lane < 8; ++lane)
            v[lane] = join(q, partial(q, lane)[place], partial(q, lane + 8)[place]);
#pragma unroll
          for (int half = 4; half > 0; half /= 2)
#pragma unroll
            for (int lane = 0; lane < half; ++lane) v[lane] = join(q, v[lane], v[lane + half]);
          sums[q] = v[0];
        }
        done(c, 16 * first + place, sums);
      }
      __syncthreads();
    }
  }
  template <int Q, class Add, class Done>
  __device__ void col_sums(const Add& add, const Done& done) const {
    column_fold<Q>(
        [](float(&sums)[Q]) {
#pragma unroll
          for (int q = 0; q < Q; ++q) sums[q] = 0.0f;
        },
        add, [](int, float a, float b) { return a + b; }, done);
  }

 private:
  template <class F>
  __device__ static void each(int n, const F& f) {
    for (int place = static_cast<int>(threadIdx.x); place < vector_floats(n);
         place += block_threads)
      if (element_at(place) < n) f(element_at(place), place);
  }

  const Shape shape_;
  float* const partials_;
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
