// Encoding of one tile by one block of threads: rotate, normalise, quantise, pack. A block has 16 x
// 16 threads: thread (g, l) owns the elements of rows g, g + 16, ... and columns l, l + 16, ...,
// which are the lanes of the sums in docs/arithmetic.md. So a thread adds its own elements in
// order, and only the 16 lanes are joined across threads.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../codec/column_grid.hpp"
#include "../codec/encoder.hpp"
#include "../codec/scalar_codec.hpp"
#include "../codec/variance_normalize.hpp"
#include "../format/tile_layout.hpp"
#include "encode_tile.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

template <class Shape, tile_kind Kind, encoder Method>
class tile_encoder_block {
 public:
  __device__ tile_encoder_block(const encode_parameters& p, float* shared, std::int64_t tile)
      : p_(p),
        shape_(p.layout),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        g_(warp_ + 8 * ((static_cast<int>(threadIdx.x) >> 4) & 1)),
        l_(static_cast<int>(threadIdx.x) & 15),
        group_(p.arguments.groups + tile / p.arguments.kv_heads),
        head_(static_cast<int>(tile % p.arguments.kv_heads)),
        shared_(shared),
        vectors_(shared, shape_),
        x_(shape_, tile_memory()) {}

  __device__ void run() {
    load();
    scale_rows();
    fit_columns();
    if constexpr (steps.choose_scales) choose_scales();
    if constexpr (feedback)
      make_codes_with_feedback();
    else
      make_codes();
    store();
  }

 private:
  static constexpr bool is_key = Kind == tile_kind::key;
  static constexpr encoder_recipe steps = recipe_of(Method, Kind, 2);
  static constexpr bool feedback = steps.error_feedback;
  static_assert(steps.scaling != row_scaling::dual_axis_equivariant && steps.refits <= 1);
  static_assert(!steps.choose_scales || (steps.scaling == row_scaling::rms && !steps.unbiased));
  static constexpr int max_token_steps = is_key ? Shape::max_row_steps : Shape::max_col_steps;
  static constexpr int max_channel_steps = is_key ? Shape::max_col_steps : Shape::max_row_steps;
  static constexpr int fixed_dim = Shape::is_fixed ? 16 * max_channel_steps : 0;

  // Between the tokens and the codes: head vectors, then partial sums of columns, then, of a tile
  // in registers, what saved() is for.
  __device__ float* buffer() const { return shared_ + p_.buffer; }
  __device__ std::uint32_t* codes() const {
    return reinterpret_cast<std::uint32_t*>(shared_ + p_.codes);
  }
  // Where a tile that is not in registers is.
  __device__ float* tile_memory() const {
    return p_.in_workspace ? static_cast<float*>(p_.arguments.workspace) +
                                 std::int64_t{blockIdx.x} * tile_floats() * (feedback ? 2 : 1)
                           : shared_ + p_.tile;
  }
  // A second tile, for error feedback.
  __device__ float* saved() const {
    return Shape::is_fixed ? buffer() : tile_memory() + tile_floats();
  }

  __device__ std::int64_t tile_floats() const {
    return std::int64_t{shape_.rows()} * shape_.cols();
  }
  __device__ int row_steps() const { return shape_.rows() / 16; }
  __device__ int col_steps() const { return shape_.cols() / 16; }
  __device__ int row(int i) const { return g_ + 16 * i; }
  __device__ int col(int j) const { return l_ + 16 * j; }
  __device__ float max_code() const { return static_cast<float>(p_.layout.max_code()); }

  using row_values = lane_vector<Shape, Shape::max_row_steps>;
  using col_values = lane_vector<Shape, Shape::max_col_steps>;
  __device__ row_values own_rows(const float* vector) const { return {vector, g_}; }
  __device__ col_values own_cols(const float* vector) const { return {vector, l_}; }

  template <class F>
  __device__ void for_rows(F f) const {
#pragma unroll(Shape::is_fixed ? Shape::max_row_steps : 1)
    for (int i = 0; i < Shape::max_row_steps; ++i) {
      if (i >= row_steps()) break;
      f(i);
    }
  }
  template <class F>
  __device__ void for_cols(F f) const {
#pragma unroll(Shape::is_fixed ? Shape::max_col_steps : 1)
    for (int j = 0; j < Shape::max_col_steps; ++j) {
      if (j >= col_steps()) break;
      f(j);
    }
  }
  // One thread per row, one thread per column.
  template <class F>
  __device__ void each_row(F f) const {
    for (int r = static_cast<int>(threadIdx.x); r < shape_.rows(); r += block_threads) f(r);
  }
  template <class F>
  __device__ void each_col(F f) const {
    for (int c = static_cast<int>(threadIdx.x); c < shape_.cols(); c += block_threads) f(c);
  }

  // Sums over the columns of each row: `add(i, j, sums)` adds element (i, j) to Q sums, `done(r,
  // sums)` gets those of a row, by one thread.
  template <int Q, class Add, class Done>
  __device__ void row_sums(Add add, Done done) const {
    if constexpr (Shape::is_fixed && Shape::max_row_steps == 8) {
      // Halves the rows that a lane has with every step.
      float sums[Q][8] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float s[Q] = {};
        for_cols([&](int j) { add(i, j, s); });
#pragma unroll
        for (int q = 0; q < Q; ++q) sums[q][i] = s[q];
      }
#pragma unroll
      for (int half = 8; half > 1; half /= 2)
#pragma unroll
        for (int q = 0; q < Q; ++q)
#pragma unroll
          for (int i = 0; i < half / 2; ++i) {
            const bool is_upper = (l_ & half) != 0;
            const float sent = is_upper ? sums[q][i] : sums[q][i + half / 2];
            const float kept = is_upper ? sums[q][i + half / 2] : sums[q][i];
            sums[q][i] = kept + __shfl_xor_sync(all_lanes, sent, half);
          }
      float s[Q];
#pragma unroll
      for (int q = 0; q < Q; ++q) s[q] = sums[q][0] + __shfl_xor_sync(all_lanes, sums[q][0], 1);
      if ((l_ & 1) == 0) done(row(l_ >> 1), s);
    } else {
      for_rows([&](int i) {
        float s[Q] = {};
        for_cols([&](int j) { add(i, j, s); });
#pragma unroll
        for (int half = 8; half > 0; half /= 2)
#pragma unroll
          for (int q = 0; q < Q; ++q) s[q] = s[q] + __shfl_xor_sync(all_lanes, s[q], half);
        if (l_ == 0) done(row(i), s);
      });
    }
  }

  // The same over the rows of each column; `join(a, b)` joins two lanes. The partial results pass
  // through the token buffer, which the caller does not need any more. Synchronises the block.
  template <int Q, class Start, class Add, class Join, class Done>
  __device__ void column_fold(Start start, Add add, Join join, Done done) const {
    const int cols = shape_.cols();
    for_cols([&](int j) {
      float sums[Q];
      start(sums);
      for_rows([&](int i) { add(i, j, sums); });
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        sums[q] = join(q, sums[q], __shfl_xor_sync(all_lanes, sums[q], 16));
        if ((threadIdx.x & 16u) == 0) buffer()[(q * 8 + warp_) * cols + col(j)] = sums[q];
      }
    });
    __syncthreads();
    each_col([&](int c) {
      float sums[Q];
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        float v[8];
#pragma unroll
        for (int w = 0; w < 8; ++w) v[w] = buffer()[(q * 8 + w) * cols + c];
#pragma unroll
        for (int half = 4; half > 0; half /= 2)
#pragma unroll
          for (int w = 0; w < half; ++w) v[w] = join(q, v[w], v[w + half]);
        sums[q] = v[0];
      }
      done(c, sums);
    });
    __syncthreads();
  }
  template <int Q, class Add, class Done>
  __device__ void col_sums(Add add, Done done) const {
    column_fold<Q>(
        [](float(&sums)[Q]) {
#pragma unroll
          for (int q = 0; q < Q; ++q) sums[q] = 0.0f;
        },
        add, [](int, float a, float b) { return a + b; }, done);
  }

  // The last stage of the rotation, from the buffer to where the elements are kept.
  template <bool Rotate, class Buffer>
  __device__ void gather(const Buffer& buffer, int first, int batch) {
    const int channel_steps = buffer.dim() / 16;
#pragma unroll
    for (int t = 0; t < (Shape::is_fixed ? max_token_steps : 1); ++t) {
      float v[max_channel_steps];
      read_strided(buffer, (is_key ? g_ : l_) + 16 * t, is_key ? l_ : g_, v);
      if constexpr (Rotate) rotate_strided(v, channel_steps);
      const int step = Shape::is_fixed ? t : first / 16;
#pragma unroll
      for (int c = 0; c < max_channel_steps; ++c) {
        if (c >= channel_steps) break;
        if constexpr (is_key)
          x_.set(step, c, v[c]);
        else
          x_.set(c, step, v[c]);
      }
    }
  }

  // 1. The rotated tile is x * unit.
  __device__ void load() {
    const encode_arguments& a = p_.arguments;
    const token_source source{group_->tokens, a.type, 1, head_ * a.strides.head, a.strides};
    const token_buffer<fixed_dim> buffer{this->buffer(), p_.batch, p_.layout.head_dim};
    const bool strided = a.rotate && hadamard_core(p_.layout.head_dim) == 1;
    const int batch = Shape::is_fixed ? 16 * max_token_steps : p_.batch;
    replaced_values replaced;
    for (int first = 0; first < p_.layout.group; first += batch) {
      load_tokens<Shape::is_fixed ? 4 : 1>(source, first, batch, a.rotate, buffer, replaced);
      if (strided)
        gather<true>(buffer, first, batch);
      else
        gather<false>(buffer, first, batch);
      __syncthreads();
      if constexpr (Shape::is_fixed) break;
    }
    report(replaced, a.replaced);
  }

  // 2. Row scales.
  __device__ void scale_rows() {
    if constexpr (steps.scaling == row_scaling::dual_axis)
      normalize();
    else
      rms();
    __syncthreads();
    round_scales();
    __syncthreads();
  }

  __device__ void rms() {
    const int rows = shape_.rows();
    const int cols = shape_.cols();
    float level = 0.0f;
    if constexpr (steps.scaling == row_scaling::rms_equalized) {
      const float inverse_rows = 1.0f / static_cast<float>(rows);
      col_sums<1>([&](int i, int j, float(&s)[1]) { s[0] = std::fma(x_(i, j), x_(i, j), s[0]); },
                  [&](int c, float(&s)[1]) {
                    const float z = std::sqrt(product_of(s[0], inverse_rows)) * p_.unit;
                    vectors_.col_std()[c] = z;
                    vectors_.col_weight()[c] = z >= least_magnitude ? 1.0f / z : 0.0f;
                  });
      level = typical_of(vectors_.col_std(), cols);
    }
    const float inverse_cols = 1.0f / static_cast<float>(cols);
    const float* const weight = vectors_.col_weight() + l_;
    row_sums<1>(
        [&](int i, int j, float(&s)[1]) {
          float value = x_(i, j);
          if constexpr (steps.scaling == row_scaling::rms_equalized)
            value = __fmul_rn(value, weight[16 * j]);
          s[0] = std::fma(value, value, s[0]);
        },
        [&](int r, float(&s)[1]) {
          vectors_.row_std()[r] = product_of(s[0], inverse_cols);
          if constexpr (steps.choose_scales) vectors_.row_first()[r] = s[0];
        });
    __syncthreads();
    each_row([&](int r) {
      const float root = std::sqrt(vectors_.row_std()[r]);
      vectors_.row_scale()[r] =
          steps.scaling == row_scaling::rms ? product_of(root, p_.unit) : root;
    });
    __syncthreads();
    const float row_level = typical_of(vectors_.row_scale(), rows);
    if (row_level == 0.0f) return;
    if constexpr (steps.scaling == row_scaling::rms) level = row_level;
    const float common = power_of_two(exponent_of(level)) / row_level;
    __syncthreads();
    each_row([&](int r) { vectors_.row_scale()[r] = product_of(vectors_.row_scale()[r], common); });
  }

  // variance_normalize of the scalar code with scale_equivariant = false.
  __device__ void normalize() {
    using kvarn::detail::moments_about;
    const int rows = shape_.rows();
    const int cols = shape_.cols();
    const encode_vectors<Shape>& v = vectors_;
    if (l_ == 0) for_rows([&](int i) { v.row_first()[row(i)] = x_(i, 0); });
    if (g_ == 0) for_cols([&](int j) { v.col_first()[col(j)] = x_(0, j); });
    each_row([&](int r) { v.row_scale()[r] = v.row_weight()[r] = 1.0f; });
    each_col([&](int c) { v.col_scale()[c] = v.col_weight()[c] = 1.0f; });
    __syncthreads();
    const auto row_pass = [&] {
      const float* const weight = v.col_weight() + l_;
      const float first_weight = v.col_weight()[0];
      row_sums<2>(
          [&](int i, int j, float(&s)[2]) {
            const float shift = __fmul_rn(v.row_first()[row(i)], first_weight);
            const float d = std::fma(x_(i, j), weight[16 * j], -shift);
            s[0] = s[0] + d;
            s[1] = std::fma(d, d, s[1]);
          },
          [&](int r, float(&s)[2]) {
            const float shift = __fmul_rn(v.row_first()[r], first_weight);
            v.row_std()[r] = moments_about(shift, s[0], s[1], cols, p_.unit).std;
          });
    };
    const auto col_pass = [&](bool update) {
      const float* const weight = v.row_weight() + g_;
      const float first_weight = v.row_weight()[0];
      col_sums<2>(
          [&](int i, int j, float(&s)[2]) {
            const float shift = __fmul_rn(v.col_first()[col(j)], first_weight);
            const float d = std::fma(x_(i, j), weight[16 * i], -shift);
            s[0] = s[0] + d;
            s[1] = std::fma(d, d, s[1]);
          },
          [&](int c, float(&s)[2]) {
            const float shift = __fmul_rn(v.col_first()[c], first_weight);
            float std = moments_about(shift, s[0], s[1], rows, p_.unit).std;
            if (update) {
              const float clamped = clamp(product_of(std, v.col_weight()[c]),
                                          kvarn::detail::min_std, kvarn::detail::max_std);
              v.col_scale()[c] =
                  clamp(product_of(v.col_scale()[c], clamped), kvarn::detail::min_paper_scale,
                        kvarn::detail::max_paper_scale);
              v.col_weight()[c] = 1.0f / v.col_scale()[c];
              std = product_of(std, v.col_weight()[c]);
            }
            v.col_std()[c] = std;
          });
    };
    row_pass();
    col_pass(false);
    float best = 0.0f;
    for (int iteration = 0;; ++iteration) {
      each_row([&](int r) { v.row_std()[r] = product_of(v.row_std()[r], v.row_weight()[r]); });
      __syncthreads();
      const float imbalance = __fadd_rn(spread_of(v.row_std(), rows), spread_of(v.col_std(), cols));
      if (iteration == 0 || imbalance <= best) {
        best = imbalance;
        each_row([&](int r) { v.inverse_scale()[r] = v.row_scale()[r]; });  // the best so far
      }
      if (iteration == p_.recipe.iterations) break;
      each_row([&](int r) {
        const float std = clamp(v.row_std()[r], kvarn::detail::min_std, kvarn::detail::max_std);
        v.row_scale()[r] = clamp(product_of(v.row_scale()[r], std), kvarn::detail::min_paper_scale,
                                 kvarn::detail::max_paper_scale);
        v.row_weight()[r] = 1.0f / v.row_scale()[r];
      });
      __syncthreads();
      col_pass(true);
      row_pass();
      __syncthreads();
    }
    each_row([&](int r) { v.row_scale()[r] = v.inverse_scale()[r]; });
  }

  __device__ void round_scales() {
    const float largest = largest_of(vectors_.row_scale(), shape_.rows());
    if constexpr (steps.choose_scales)
      __syncthreads();  // before row_scale() takes the rounded ones
    const float shift = power_of_two(-kvarn::detail::scale_shift(p_.layout.scale, largest));
    std::byte* const out = record() + p_.layout.scale_offset();
    each_row([&](int r) {
      const rounded_fp8 scale =
          round_fp8(product_of(vectors_.row_scale()[r], shift), p_.layout.scale);
      out[r] = static_cast<std::byte>(scale.bits);
      vectors_.inverse_scale()[r] = p_.unit / scale.value;
      vectors_.row_weight()[r] = product_of(scale.value, scale.value);
      if constexpr (steps.choose_scales) vectors_.row_scale()[r] = scale.value;
    });
  }

  __device__ void set_grid(int c, const column_grid& grid) {
    vectors_.zero()[c] = grid.zero;
    vectors_.step()[c] = grid.step;
    vectors_.inverse_range()[c] = inverse_range(grid.step, p_.layout.max_code());
  }
  __device__ void store_grid(int c, const column_grid& grid) {
    std::byte* const out = record();
    *reinterpret_cast<std::uint16_t*>(out + p_.layout.zero_offset() + 2 * c) =
        float16(grid.zero).bits;
    out[p_.layout.step_offset() + static_cast<std::size_t>(c)] =
        static_cast<std::byte>(round_fp8(grid.step, p_.layout.scale).bits);
  }

  // 3. Steps and zeros.
  __device__ void fit_columns() {
    const int max_code = p_.layout.max_code();
    const float n = this->max_code();
    const row_values inverse_scale = own_rows(vectors_.inverse_scale());
    column_fold<2>(
        [](float(&s)[2]) {
          s[0] = 0x1p126f;
          s[1] = -0x1p126f;
        },
        [&](int i, int j, float(&s)[2]) {
          const float y = __fmul_rn(x_(i, j), inverse_scale(i));
          s[0] = fminf(s[0], y);
          s[1] = fmaxf(s[1], y);
        },
        [](int q, float a, float b) { return q == 0 ? fminf(a, b) : fmaxf(a, b); },
        [&](int c, float(&s)[2]) {
          const column_grid grid =
              fit_range(s[0], s[1], p_.recipe.range, steps.cover, max_code, p_.layout.scale);
          set_grid(c, grid);
          if constexpr (steps.refits == 0 && !steps.unbiased) store_grid(c, grid);
        });
    const auto deviation = [&](int i, int j) {
      return std::fma(x_(i, j), inverse_scale(i), -vectors_.zero()[col(j)]);
    };
    if constexpr (steps.refits == 1) {
      const float weight_sum = lane_sum_of(vectors_.row_weight(), shape_.rows());
      const float* const weight = vectors_.row_weight() + g_;
      col_sums<4>(
          [&](int i, int j, float(&s)[4]) {
            const float w = weight[16 * i];
            const float t = deviation(i, j);
            const float code = code_of(t, vectors_.inverse_range()[col(j)], n);
            const float weighted = __fmul_rn(w, code);
            s[0] = std::fma(w, code, s[0]);
            s[1] = std::fma(weighted, code, s[1]);
            s[2] = std::fma(w, t, s[2]);
            s[3] = std::fma(weighted, t, s[3]);
          },
          [&](int c, float(&s)[4]) {
            const column_grid grid{vectors_.zero()[c], vectors_.step()[c]};
            set_grid(c, refit(grid, {weight_sum, s[0], s[1], s[2], s[3], 0.0f}, p_.layout.scale));
          });
    }
    if constexpr (steps.unbiased)
      col_sums<4>(
          [&](int i, int j, float(&s)[4]) {
            const float t = deviation(i, j);
            const float code = code_of(t, vectors_.inverse_range()[col(j)], n);
            s[0] = s[0] + code;
            s[1] = s[1] + t;
            s[2] = std::fma(code, t, s[2]);
            s[3] = std::fma(t, t, s[3]);
          },
          [&](int c, float(&s)[4]) {
            const column_grid grid{vectors_.zero()[c], vectors_.step()[c]};
            store_grid(c, unbias(grid, {0.0f, s[0], 0.0f, s[1], s[2], s[3]}, shape_.rows(),
                                 p_.layout.scale));
          });
  }

  // 4. Row scales once more. row_scale() holds the scales, row_first() the squares of the rows.
  __device__ void choose_scales() {
    const scale_type type = p_.layout.scale;
    const float n = max_code();
    float* const best_cost = vectors_.row_std();
    float* const best_scale = vectors_.row_weight();
    const auto beside = [&](int r, int by) {
      return neighbour_of(round_fp8(vectors_.row_scale()[r], type).bits, by, type).value;
    };
#pragma unroll 1
    for (int turn = 0; turn < 3; ++turn) {
      const int by = turn == 0 ? 0 : 2 * turn - 3;
      each_row([&](int r) { vectors_.inverse_scale()[r] = p_.unit / beside(r, by); });
      __syncthreads();
      const row_values inverse_scale = own_rows(vectors_.inverse_scale());
      row_sums<2>(
          [&](int i, int j, float(&s)[2]) {
            const float x = x_(i, j);
            const float t = std::fma(x, inverse_scale(i), -vectors_.zero()[col(j)]);
            const float code = code_of(t, vectors_.inverse_range()[col(j)], n);
            const float error = std::fma(-code, vectors_.step()[col(j)], t);
            s[0] = std::fma(error, error, s[0]);
            s[1] = std::fma(error, x, s[1]);
          },
          [&](int r, float(&s)[2]) {
            const float scale = beside(r, by);
            const float weight = weight_along(p_.recipe.along, vectors_.row_first()[r]);
            const float cost = row_cost(s[0], s[1], weight, product_of(scale, scale));
            if (turn != 0 && !(cost < best_cost[r])) return;
            best_cost[r] = cost;
            best_scale[r] = scale;
          });
      __syncthreads();
    }
    std::byte* const out = record() + p_.layout.scale_offset();
    each_row([&](int r) {
      out[r] = static_cast<std::byte>(round_fp8(best_scale[r], type).bits);
      vectors_.inverse_scale()[r] = p_.unit / best_scale[r];
    });
    __syncthreads();
  }

  // 5. Codes. Byte j % 4 of word (j / 4, l) of a row is the code of column l + 16 j.
  __device__ int word_groups() const { return (col_steps() + 3) / 4; }
  __device__ std::uint32_t& word(int i, int group) const {
    return codes()[(row(i) * word_groups() + group) * 16 + l_];
  }
  __device__ void make_codes() {
    const float n = max_code();
    const col_values zero = own_cols(vectors_.zero());
    const col_values range = own_cols(vectors_.inverse_range());
    for_rows([&](int i) {
      const float inverse = vectors_.inverse_scale()[row(i)];
      const auto bits = [&](int j) {
        return bits_of(shifted_code(std::fma(x_(i, j), inverse, -zero(j)), range(j), n));
      };
#pragma unroll(Shape::is_fixed ? Shape::max_col_steps / 4 : 1)
      for (int group = 0; group < word_groups(); ++group) {
        std::uint32_t packed[4] = {};
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (Shape::is_fixed || 4 * group + k < col_steps()) packed[k] = bits(4 * group + k);
        word(i, group) = __byte_perm(__byte_perm(packed[0], packed[1], 0x0040),
                                     __byte_perm(packed[2], packed[3], 0x0040), 0x5410);
      }
    });
    __syncthreads();
  }

  // 16 rows of the factor in shared memory, two times by turns.
  __device__ float* panel(int jc) const {
    return shared_ + p_.panel + (jc & 1) * 16 * shape_.cols();
  }
  __device__ void copy_panel(const float* factor, int jc) const {
    const float* const from = factor + std::int64_t{16} * jc * shape_.cols();
    for (int i = 4 * static_cast<int>(threadIdx.x); i < 16 * shape_.cols(); i += 4 * block_threads)
      copy_16_bytes(panel(jc) + i, from + i);
  }

  // Error feedback, right-looking: as soon as column c has its codes, the errors of all rows go
  // into the targets of the columns behind it, so each target takes its errors in order. x_ holds
  // the targets, saved() what they started from.
  __device__ void make_codes_with_feedback() {
    const float n = max_code();
    const int cols = shape_.cols();
    const float* const factor = group_->factors + std::int64_t{head_} * cols * cols;
    if constexpr (Shape::is_fixed) copy_panel(factor, 0);
    float* const saved = this->saved() + threadIdx.x;
    const auto saved_at = [&](int i, int j) -> float& {
      return saved[(i * col_steps() + j) * block_threads];
    };
    for_rows([&](int i) {
      const float inverse = vectors_.inverse_scale()[row(i)];
      for_cols([&](int j) {
        const float t = std::fma(x_(i, j), inverse, -vectors_.zero()[col(j)]);
        x_.set(i, j, t);
        saved_at(i, j) = t;
      });
    });
#pragma unroll(Shape::is_fixed ? Shape::max_col_steps : 1)
    for (int jc = 0; jc < Shape::max_col_steps; ++jc) {
      if (jc >= col_steps()) break;
      if constexpr (Shape::is_fixed) {
        wait_for_copies();
        __syncthreads();
        if (jc + 1 < col_steps()) copy_panel(factor, jc + 1);
      }
#pragma unroll 1
      for (int lc = 0; lc < 16; ++lc) {
        const int c = lc + 16 * jc;
        const float inverse = vectors_.inverse_range()[c];
        const float step = vectors_.step()[c];
        const float* const u = factor + std::int64_t{c} * cols + l_;
        float weight[Shape::is_fixed ? Shape::max_col_steps : 1] = {};
        if constexpr (Shape::is_fixed)
          for_cols([&](int j) {
            if (j >= jc) weight[j] = panel(jc)[lc * cols + col(j)];
          });
        for_rows([&](int i) {
          const float shifted = shifted_code(x_(i, jc), inverse, n);
          const float mine = std::fma(-__fsub_rn(shifted, integer_shift), step, saved_at(i, jc));
          if (l_ == lc)
            reinterpret_cast<std::uint8_t*>(&word(i, jc >> 2))[jc & 3] =
                static_cast<std::uint8_t>(bits_of(shifted));
          const float error = __shfl_sync(all_lanes, mine, lc, 16);
          for_cols([&](int j) {
            if (j < jc) return;
            // Columns at and before c have a factor of 0 and stay as they are.
            const float w = Shape::is_fixed ? weight[Shape::is_fixed ? j : 0] : __ldg(u + 16 * j);
            x_.set(i, j, std::fma(error, w, x_(i, j)));
          });
        });
      }
    }
    __syncthreads();
  }

  __device__ std::byte* record() const {
    const cache_format& format = p_.arguments.format;
    return group_->page + (is_key ? format.key_offset(head_) : format.value_offset(head_));
  }

  __device__ void store() const {
    std::byte* const out = record();
    const tile_layout& layout = p_.layout;
    const int groups = word_groups();
    for (int task = static_cast<int>(threadIdx.x); task < shape_.rows() * groups;
         task += block_threads) {
      const int r = task / groups;
      const int group = task % groups;
      const int runs = min(4, col_steps() - 4 * group);
      std::uint32_t words[16];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 quad = *reinterpret_cast<const uint4*>(codes() + task * 16 + 4 * k);
        words[4 * k] = quad.x;
        words[4 * k + 1] = quad.y;
        words[4 * k + 2] = quad.z;
        words[4 * k + 3] = quad.w;
      }
      for (int plane = 0; plane < layout.planes(); ++plane) {
        const int width = layout.plane_bits(plane);
        std::byte* const place = out + layout.code_offset(plane, r) + 4 * group * 2 * width;
        if (width == 1) store_runs<1>(words, layout.plane_shift(plane), place, runs);
        if (width == 2) store_runs<2>(words, layout.plane_shift(plane), place, runs);
        if (width == 4) store_runs<4>(words, layout.plane_shift(plane), place, runs);
      }
    }
    __syncthreads();
  }

  const encode_parameters& p_;
  const Shape shape_;
  const int warp_;
  const int g_;
  const int l_;
  const encode_group* const group_;
  const int head_;
  float* const shared_;
  const encode_vectors<Shape> vectors_;
  owned_elements<Shape> x_;
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
