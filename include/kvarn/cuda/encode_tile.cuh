// What the encoding of a tile by one block is made of: shapes, the elements that a thread owns,
// numbers of rows and columns, the packing of codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../codec/encoder.hpp"
#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "rotation.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

struct encode_parameters {
  encode_arguments arguments;
  tile_layout layout;
  encoder_recipe recipe;
  float unit;         // of the rotation
  bool in_workspace;  // where the tile is, if not in registers
  int batch;          // tokens that the token buffer holds
  // Offsets into shared memory, in floats.
  int buffer;
  int codes;
  int panel;
  int tile;
};

// Rows and columns of a tile. Shapes that are fixed at compile time keep the tile in registers; any
// other shape keeps it in shared memory, or in the workspace where it does not fit there.
template <int Rows, int Cols>
struct fixed_shape {
  static constexpr bool is_fixed = true;
  static constexpr int max_row_steps = Rows / 16;
  static constexpr int max_col_steps = Cols / 16;
  __device__ explicit fixed_shape(const tile_layout&) {}
  __device__ static constexpr int rows() { return Rows; }
  __device__ static constexpr int cols() { return Cols; }
};
struct any_shape {
  static constexpr bool is_fixed = false;
  static constexpr int max_row_steps = max_head_dim / 16;
  static constexpr int max_col_steps = max_head_dim / 16;
  __device__ explicit any_shape(const tile_layout& layout)
      : rows_(layout.rows()), cols_(layout.cols()) {}
  __device__ int rows() const { return rows_; }
  __device__ int cols() const { return cols_; }

 private:
  int rows_;
  int cols_;
};

// The elements that a thread owns: number (i, j) is row g + 16 i, column l + 16 j.
template <class Shape>
class owned_elements {
 public:
  __device__ owned_elements(const Shape&, float*) {}
  __device__ float operator()(int i, int j) const { return value_[i][j]; }
  __device__ void set(int i, int j, float value) { value_[i][j] = value; }

 private:
  float value_[Shape::max_row_steps][Shape::max_col_steps];
};
template <>
class owned_elements<any_shape> {
 public:
  __device__ owned_elements(const any_shape& shape, float* tile)
      : mine_(tile + threadIdx.x), steps_(shape.cols() / 16) {}
  __device__ float operator()(int i, int j) const {
    return mine_[(i * steps_ + j) * block_threads];
  }
  __device__ void set(int i, int j, float value) {
    mine_[(i * steps_ + j) * block_threads] = value;
  }

 private:
  float* mine_;
  int steps_;
};

// Elements lane, lane + 16, ... of a vector in shared memory, in registers where the shape is
// fixed.
template <class Shape, int N>
class lane_vector {
 public:
  __device__ lane_vector(const float* vector, int lane) : mine_(vector + lane) {
    if constexpr (Shape::is_fixed) {
#pragma unroll
      for (int i = 0; i < N; ++i) value_[i] = mine_[16 * i];
    }
  }
  __device__ float operator()(int i) const {
    if constexpr (Shape::is_fixed)
      return value_[i];
    else
      return mine_[16 * i];
  }

 private:
  const float* mine_;
  float value_[Shape::is_fixed ? N : 1];
};

// Vectors of rows and columns in shared memory, in front of everything else. (Members that were
// pointers took registers that the tile needs.)
template <class Shape>
class encode_vectors {
 public:
  __device__ encode_vectors(float* memory, const Shape& shape) : memory_(memory), shape_(shape) {}

  static constexpr int row_vectors = 5;
  static constexpr int col_vectors = 7;

  __device__ float* row_scale() const { return row_vector(0); }
  __device__ float* inverse_scale() const { return row_vector(1); }
  __device__ float* row_weight() const { return row_vector(2); }
  __device__ float* row_std() const { return row_vector(3); }
  __device__ float* row_first() const { return row_vector(4); }
  __device__ float* zero() const { return col_vector(0); }
  __device__ float* step() const { return col_vector(1); }
  __device__ float* inverse_range() const { return col_vector(2); }
  __device__ float* col_weight() const { return col_vector(3); }
  __device__ float* col_std() const { return col_vector(4); }
  __device__ float* col_first() const { return col_vector(5); }
  __device__ float* col_scale() const { return col_vector(6); }

 private:
  __device__ float* row_vector(int i) const { return memory_ + i * shape_.rows(); }
  __device__ float* col_vector(int i) const {
    return memory_ + row_vectors * shape_.rows() + i * shape_.cols();
  }

  float* memory_;
  Shape shape_;  // a copy: a reference into the encoder would keep the tile out of registers
};

KVARN_INLINE constexpr int encode_vector_floats(int rows, int cols) { return 5 * rows + 7 * cols; }

// As `typical` of the scalar code, by every warp on its own.
__device__ inline float typical_of(const float* values, int n) {
  unsigned sum = 0;
  unsigned count = 0;
  for (int i = lane_index(); i < n; i += 32) {
    if (!(values[i] >= least_magnitude)) continue;
    sum += bits_of(values[i]) >> 10;
    ++count;
  }
  sum = __reduce_add_sync(all_lanes, sum);
  count = __reduce_add_sync(all_lanes, count);
  return count == 0 ? 0.0f : float_of_bits((sum / count) << 10);
}

// Largest and smallest of n numbers that are not negative, by every warp on its own.
__device__ inline float largest_of(const float* values, int n) {
  unsigned largest = 0;
  for (int i = lane_index(); i < n; i += 32) largest = max(largest, bits_of(values[i]));
  return float_of_bits(__reduce_max_sync(all_lanes, largest));
}
__device__ inline float smallest_of(const float* values, int n) {
  unsigned smallest = bits_of(0x1p126f);
  for (int i = lane_index(); i < n; i += 32) smallest = min(smallest, bits_of(values[i]));
  return float_of_bits(__reduce_min_sync(all_lanes, smallest));
}

// The largest over the smallest of n numbers, by every warp on its own.
__device__ inline float spread_of(const float* values, int n) {
  return largest_of(values, n) / fmaxf(smallest_of(values, n), 1e-8f);
}

// The sum of n numbers in 16 lanes, by every warp on its own.
__device__ inline float lane_sum_of(const float* values, int n) {
  float sum = 0.0f;
  for (int i = lane_index() & 15; i < n; i += 16) sum = sum + values[i];
#pragma unroll
  for (int half = 8; half > 0; half /= 2) sum = sum + __shfl_xor_sync(all_lanes, sum, half);
  return sum;
}

// round_code of the scalar code: the code is in the low byte of the first, the second is its
// number.
__device__ inline float shifted_code(float t, float inverse_range, float max_code) {
  return std::fma(__saturatef(__fmul_rn(t, inverse_range)), max_code, integer_shift);
}
__device__ inline float code_of(float t, float inverse_range, float max_code) {
  return __fsub_rn(shifted_code(t, inverse_range, max_code), integer_shift);
}

// `width` bits of 16 x 4 codes become 2 * width bytes for each of the four runs of 16 columns.
template <int Width>
__device__ inline void store_runs(const std::uint32_t (&words)[16], int shift, std::byte* out,
                                  int runs) {
  constexpr int per_byte = 8 / Width;
  constexpr int bytes = 2 * Width;
  constexpr std::uint32_t mask = ((1u << Width) - 1u) * 0x01010101u;
  std::uint32_t merged[bytes];
#pragma unroll
  for (int q = 0; q < bytes; ++q) {
    merged[q] = 0;
#pragma unroll
    for (int k = 0; k < per_byte; ++k)
      merged[q] |= ((words[q * per_byte + k] >> shift) & mask) << (k * Width);
  }
  if constexpr (Width == 1) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < runs)
        reinterpret_cast<std::uint16_t*>(out)[j] = static_cast<std::uint16_t>(
            ((merged[0] >> (8 * j)) & 0xffu) | (((merged[1] >> (8 * j)) & 0xffu) << 8));
  } else {
    auto* const out_words = reinterpret_cast<std::uint32_t*>(out);
#pragma unroll
    for (int q = 0; q < bytes; q += 4) {
      transpose_bytes(merged[q], merged[q + 1], merged[q + 2], merged[q + 3]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < runs) out_words[j * (bytes / 4) + q / 4] = merged[q + j];
    }
  }
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
