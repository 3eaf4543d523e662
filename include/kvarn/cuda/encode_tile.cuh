// What the encoding of a tile by one block is made of: shapes, the elements that a thread owns,
// numbers of rows and columns, the packing of codes.
#pragma once

#include <bit>
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
  int buffer;    // head vectors, then partial sums of columns
  int codes;     // of the tile; before them, what `paper` and choose_scales remember
  int feedback;  // see feedback_plan
  int tile;
  int workspace_floats;  // of a block, where the tile is there
};

// Rows and columns of a tile. Shapes that are fixed at compile time keep the tile in registers; any
// other shape keeps it in shared memory, or in the workspace where it does not fit there.
template <int Rows, int Cols>
struct fixed_shape {
  static constexpr bool is_fixed = true;
  static constexpr int max_row_steps = Rows / 16;
  static constexpr int max_col_steps = Cols / 16;
  static constexpr int rows_at_once = static_cast<int>(std::bit_ceil(Rows / 16u));  // in row_sums
  // Of a multiprocessor, at least.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr int blocks = Rows * Cols > 8192 ? 1 : 2;  // no shared memory for more
#else
  static constexpr int blocks = 2;
#endif
  static_assert(max_row_steps <= 8 && max_col_steps <= 8);
  __device__ explicit fixed_shape(const tile_layout&) {}
  __device__ static constexpr int rows() { return Rows; }
  __device__ static constexpr int cols() { return Cols; }
};
struct any_shape {
  static constexpr bool is_fixed = false;
  static constexpr int max_row_steps = max_head_dim / 16;
  static constexpr int max_col_steps = max_head_dim / 16;
  static constexpr int rows_at_once = 1;
  static constexpr int blocks = 1;
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

// Where element v of a vector of rows or columns stands in shared memory: 64 elements after one
// another, within them the 16 lanes of the sums with four elements each. So a thread reads what it
// owns four at a time, and neighbouring lanes read neighbouring quads.
KVARN_INLINE constexpr int place_of(int v) { return (v & ~63) + 4 * (v & 15) + ((v >> 4) & 3); }
KVARN_INLINE constexpr int element_at(int place) {
  return (place & ~63) + 16 * (place & 3) + ((place >> 2) & 15);
}
KVARN_INLINE constexpr int vector_floats(int n) { return (n + 63) / 64 * 64; }

// Elements lane, lane + 16, ... of such a vector, in registers where the shape is fixed.
template <class Shape, int N>
class lane_vector {
 public:
  __device__ lane_vector(const float* vector, int lane) : mine_(vector + 4 * lane) {
    if constexpr (Shape::is_fixed) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const float4 quad = *reinterpret_cast<const float4*>(mine_ + 16 * i);
        value_[i] = quad.x;
        if (i + 1 < N) value_[i + 1] = quad.y;
        if (i + 2 < N) value_[i + 2] = quad.z;
        if (i + 3 < N) value_[i + 3] = quad.w;
      }
    }
  }
  __device__ float operator()(int i) const {
    if constexpr (Shape::is_fixed)
      return value_[i];
    else
      return mine_[place_of(16 * i)];
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

  static constexpr int row_vectors = 6;
  static constexpr int col_vectors = 7;

  __device__ float* row_scale() const { return row_vector(0); }
  __device__ float* row_weight() const { return row_vector(1); }
  __device__ float* row_first() const { return row_vector(2); }  // or its squares
  __device__ float* inverse_scale(int candidate = 0) const { return row_vector(3 + candidate); }
  __device__ float* zero() const { return col_vector(0); }
  __device__ float* step() const { return col_vector(1); }
  __device__ float* inverse_range() const { return col_vector(2); }
  __device__ float* col_weight() const { return col_vector(3); }
  __device__ float* col_std() const { return col_vector(4); }
  __device__ float* col_first() const { return col_vector(5); }
  __device__ float* col_scale() const { return col_vector(6); }

 private:
  __device__ float* row_vector(int i) const { return memory_ + i * vector_floats(shape_.rows()); }
  __device__ float* col_vector(int i) const {
    return memory_ + row_vectors * vector_floats(shape_.rows()) + i * vector_floats(shape_.cols());
  }

  float* memory_;
  Shape shape_;  // a copy: a reference into the encoder would keep the tile out of registers
};

KVARN_INLINE constexpr int encode_vector_floats(int rows, int cols) {
  using vectors = encode_vectors<any_shape>;
  return vectors::row_vectors * vector_floats(rows) + vectors::col_vectors * vector_floats(cols);
}

// Calls f(value) for the n elements of a vector, by the lanes of a warp together.
template <class F>
__device__ void each_in_warp(const float* vector, int n, const F& f) {
  for (int place = lane_index(); place < vector_floats(n); place += 32)
    if (element_at(place) < n) f(vector[place]);
}

// As `typical` of the scalar code, by every warp on its own.
__device__ inline float typical_of(const float* vector, int n) {
  unsigned sum = 0;
  unsigned count = 0;
  each_in_warp(vector, n, [&](float value) {
    if (!(value >= least_magnitude)) return;
    sum += bits_of(value) >> 10;
    ++count;
  });
  sum = __reduce_add_sync(all_lanes, sum);
  count = __reduce_add_sync(all_lanes, count);
  return count == 0 ? 0.0f : float_of_bits((sum / count) << 10);
}

// Largest and smallest of n numbers that are not negative, by every warp on its own.
__device__ inline float largest_of(const float* vector, int n) {
  unsigned largest = 0;
  each_in_warp(vector, n, [&](float value) { largest = max(largest, bits_of(value)); });
  return float_of_bits(__reduce_max_sync(all_lanes, largest));
}
__device__ inline float smallest_of(const float* vector, int n) {
  unsigned smallest = bits_of(0x1p126f);
  each_in_warp(vector, n, [&](float value) { smallest = min(smallest, bits_of(value)); });
  return float_of_bits(__reduce_min_sync(all_lanes, smallest));
}

// The largest over the smallest of n numbers, by every warp on its own.
__device__ inline float spread_of(const float* vector, int n) {
  return largest_of(vector, n) / fmaxf(smallest_of(vector, n), 1e-8f);
}

// The sum of n numbers in 16 lanes, by every warp on its own.
__device__ inline float lane_sum_of(const float* vector, int n) {
  float sum = 0.0f;
  for (int i = lane_index() & 15; i < n; i += 16) sum = sum + vector[place_of(i)];
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

// Codes of a tile in shared memory: byte j % 4 of word l of a *run word group* (row, j / 4) is the
// code of column l + 16 j. Quads of words are exchanged so that no bank is read twice by lanes that
// read neighbouring groups.
KVARN_INLINE constexpr int code_groups(int cols) { return (cols + 63) / 64; }
__device__ inline int code_word(int group, int l) { return 16 * group + (l ^ (2 * (group & 6))); }

// The codes of the elements that a thread owns. They are set in the order of columns; put() brings
// them to shared memory.
template <class Shape>
class owned_codes {
 public:
  __device__ owned_codes(const Shape&, std::uint32_t*, int, int) {}
  // The code is in the low byte of `bits`.
  __device__ void set(int i, int j, std::uint32_t bits) {
    constexpr std::uint32_t selectors[4] = {0x3214, 0x3240, 0x3410, 0x4210};
    word_[i][j / 4] = j % 4 == 0 ? bits : __byte_perm(word_[i][j / 4], bits, selectors[j % 4]);
  }
  __device__ void put(std::uint32_t* memory, int g, int l) const {
    std::uint32_t* const mine = memory + code_word(g * groups, l);
#pragma unroll
    for (int i = 0; i < Shape::max_row_steps; ++i)
#pragma unroll
      for (int k = 0; k < groups; ++k) mine[16 * (16 * i * groups + k)] = word_[i][k];
  }

 private:
  static constexpr int groups = code_groups(16 * Shape::max_col_steps);
  std::uint32_t word_[Shape::max_row_steps][groups];
};
template <>
class owned_codes<any_shape> {
 public:
  __device__ owned_codes(const any_shape& shape, std::uint32_t* memory, int g, int l)
      : memory_(memory), groups_(code_groups(shape.cols())), g_(g), l_(l) {}
  __device__ void set(int i, int j, std::uint32_t bits) {
    reinterpret_cast<std::uint8_t*>(memory_ +
                                    code_word((g_ + 16 * i) * groups_ + j / 4, l_))[j % 4] =
        static_cast<std::uint8_t>(bits);
  }
  __device__ void put(std::uint32_t*, int, int) const {}

 private:
  std::uint32_t* memory_;
  int groups_;
  int g_;
  int l_;
};

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
