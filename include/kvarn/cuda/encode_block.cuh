// Encoding of one tile by one block of threads: rotate, normalise, quantise, pack. Who owns which
// elements: encode_sums.cuh.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../codec/column_grid.hpp"
#include "../codec/encoder.hpp"
#include "../codec/scalar_codec.hpp"
#include "../format/tile_layout.hpp"
#include "encode_feedback.cuh"
#include "encode_normalize.cuh"
#include "encode_sums.cuh"
#include "encode_tile.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// Candidates of choose_scales: the code of a row's scale, the one below, the one above.
inline constexpr int scale_candidates = 3;
KVARN_INLINE constexpr int candidate_by(int candidate) {
  return candidate == 0 ? 0 : 2 * candidate - 3;
}

template <class Shape, tile_kind Kind, encoder Method>
class tile_encoder_block {
 public:
  __device__ tile_encoder_block(const encode_parameters& p, float* shared, std::int64_t tile)
      : p_(p),
        shape_(p.layout),
        group_(p.arguments.groups + tile / p.arguments.kv_heads),
        head_(static_cast<int>(tile % p.arguments.kv_heads)),
        shared_(shared),
        vectors_(shared, shape_),
        tile_(shape_, tile_memory(), buffer()) {}

  __device__ void run() {
    load();
    scale_rows();
    fit_columns();
    if constexpr (steps.choose_scales) choose_scales();
    if constexpr (feedback) {
      round_with_feedback();
    } else {
      if constexpr (!steps.unbiased) make_codes();
      store();
    }
    if constexpr (!Shape::is_fixed) __syncthreads();  // before the next tile
  }

 private:
  static constexpr bool is_key = Kind == tile_kind::key;
  static constexpr encoder_recipe steps = recipe_of(Method, Kind, 2);
  static constexpr bool feedback = steps.error_feedback;
  static_assert(steps.scaling != row_scaling::dual_axis_equivariant && steps.refits <= 1);
  static_assert(!steps.choose_scales ||
                (steps.scaling == row_scaling::rms && !steps.unbiased && steps.refits == 0));
  static constexpr int max_token_steps = is_key ? Shape::max_row_steps : Shape::max_col_steps;
  static constexpr int max_channel_steps = is_key ? Shape::max_col_steps : Shape::max_row_steps;
  static constexpr int fixed_dim = Shape::is_fixed ? 16 * max_channel_steps : 0;

  __device__ float* buffer() const { return shared_ + p_.buffer; }
  __device__ std::uint32_t* codes() const {
    return reinterpret_cast<std::uint32_t*>(shared_ + p_.codes);
  }
  // Where a tile that is not in registers is.
  __device__ float* tile_memory() const {
    return p_.in_workspace ? static_cast<float*>(p_.arguments.workspace) +
                                 blockIdx.x * std::int64_t{p_.workspace_floats}
                           : shared_ + p_.tile;
  }
  __device__ float max_code() const { return static_cast<float>(p_.layout.max_code()); }
  __device__ std::byte* record() const {
    const cache_format& format = p_.arguments.format;
    return group_->page + (is_key ? format.key_offset(head_) : format.value_offset(head_));
  }

  // The last stage of the rotation, from the buffer to where the elements are kept.
  template <bool Rotate, class Buffer>
  __device__ void gather(const Buffer& buffer, int first) {
    const int channel_steps = buffer.dim() / 16;
#pragma unroll
    for (int t = 0; t < (Shape::is_fixed ? max_token_steps : 1); ++t) {
      float v[max_channel_steps];
      read_strided(buffer, (is_key ? tile_.g : tile_.l) + 16 * t, is_key ? tile_.l : tile_.g, v);
      if constexpr (Rotate) rotate_strided(v, channel_steps);
      const int step = Shape::is_fixed ? t : first / 16;
#pragma unroll
      for (int c = 0; c < max_channel_steps; ++c) {
        if (c >= channel_steps) break;
        if constexpr (is_key)
          tile_.x.set(step, c, v[c]);
        else
          tile_.x.set(c, step, v[c]);
      }
    }
  }

  // 1. The rotated tile is x * unit.
  __device__ void load() {
    const encode_arguments& a = p_.arguments;
    const token_source source{group_->tokens, a.type, 1, head_ * a.strides.head, a.strides};
    const token_buffer<fixed_dim> buffer{this->buffer(), p_.batch, p_.layout.head_dim};
    const bool strided = a.rotate && hadamard_core(buffer.dim()) == 1;
    const int batch = Shape::is_fixed ? 16 * max_token_steps : p_.batch;
    replaced_values replaced;
    for (int first = 0; first < p_.layout.group; first += batch) {
      load_tokens<Shape::is_fixed ? 4 : 1>(source, first, batch, a.rotate, buffer, replaced);
      if (strided)
        gather<true>(buffer, first);
      else
        gather<false>(buffer, first);
      __syncthreads();
      if constexpr (Shape::is_fixed) break;
    }
    report(replaced, a.replaced);
  }

  // 2. Row scales.
  __device__ void scale_rows() {
    if constexpr (steps.scaling == row_scaling::dual_axis)
      normalize_rows(tile_, vectors_,
                     normalize_history<Shape>(reinterpret_cast<float*>(codes()), shape_),
                     p_.recipe.iterations, p_.unit);
    else
      rms();
    if (tile_.has_row()) round_scales();
    __syncthreads();
  }

  // By the warps that each_row() gives rows to.
  __device__ void round_scales() {
    const float common = common_factor();
    const scale_type type = p_.layout.scale;
    const float largest = product_of(largest_of(vectors_.row_scale(), tile_.rows()), common);
    const float shift = power_of_two(-kvarn::detail::scale_shift(type, largest));
    std::byte* const out = record() + p_.layout.scale_offset();
    tile_.each_row([&](int r, int p) {
      const float scale = product_of(product_of(vectors_.row_scale()[p], common), shift);
      const rounded_fp8 rounded = round_fp8(scale, type);
      if constexpr (steps.choose_scales) {
        scale_bits()[p] = rounded.bits;
#pragma unroll 1
        for (int k = 0; k < scale_candidates; ++k)
          vectors_.inverse_scale(k)[p] =
              p_.unit / neighbour_of(rounded.bits, candidate_by(k), type).value;
      } else {
        out[r] = static_cast<std::byte>(rounded.bits);
        vectors_.inverse_scale()[p] = p_.unit / rounded.value;
      }
      if constexpr (steps.refits > 0)
        vectors_.row_weight()[p] = product_of(rounded.value, rounded.value);
    });
  }

  // Leaves root mean squares in row_scale(). Synchronises the block.
  __device__ void rms() {
    if constexpr (steps.scaling == row_scaling::rms_equalized) {
      const float inverse_rows = 1.0f / static_cast<float>(tile_.rows());
      tile_.template col_sums<1>(
          [&](int i, int j, float(&s)[1]) { s[0] = std::fma(tile_.x(i, j), tile_.x(i, j), s[0]); },
          [&](int, int p, float(&s)[1]) {
            const float z = std::sqrt(product_of(s[0], inverse_rows)) * p_.unit;
            vectors_.col_std()[p] = z;
            vectors_.col_weight()[p] = z >= least_magnitude ? 1.0f / z : 0.0f;
          });
    }
    const float inverse_cols = 1.0f / static_cast<float>(tile_.cols());
    const auto done = [&](int, int p, float(&s)[1]) {
      const float root = std::sqrt(product_of(s[0], inverse_cols));
      vectors_.row_scale()[p] =
          steps.scaling == row_scaling::rms ? product_of(root, p_.unit) : root;
      if constexpr (steps.choose_scales) vectors_.row_first()[p] = s[0];
    };
    if constexpr (steps.scaling == row_scaling::rms_equalized) {
      const auto weight = tile_.own_cols(vectors_.col_weight());
      tile_.template row_sums<1>(
          [&](int i, int j, float(&s)[1]) {
            const float value = __fmul_rn(tile_.x(i, j), weight(j));
            s[0] = std::fma(value, value, s[0]);
          },
          done);
    } else {
      tile_.template row_sums<1>(
          [&](int i, int j, float(&s)[1]) { s[0] = std::fma(tile_.x(i, j), tile_.x(i, j), s[0]); },
          done);
    }
    __syncthreads();
  }

  // By what all of row_scale() is multiplied.
  __device__ float common_factor() const {
    if constexpr (steps.scaling == row_scaling::dual_axis) {
      return 1.0f;
    } else {
      const float row_level = typical_of(vectors_.row_scale(), tile_.rows());
      if (row_level == 0.0f) return 1.0f;
      const float level = steps.scaling == row_scaling::rms
                              ? row_level
                              : typical_of(vectors_.col_std(), tile_.cols());
      return power_of_two(exponent_of(level)) / row_level;
    }
  }

  // As integers, for choose_scales: of each row the code of its scale. (Others still read
  // row_scale() when it is written.)
  __device__ std::uint32_t* scale_bits() const {
    return reinterpret_cast<std::uint32_t*>(vectors_.row_weight());
  }

  __device__ void set_grid(int p, const column_grid& grid) {
    vectors_.zero()[p] = grid.zero;
    vectors_.step()[p] = grid.step;
    vectors_.inverse_range()[p] = inverse_range(grid.step, p_.layout.max_code());
  }
  __device__ void store_grid(int c, const column_grid& grid) {
    std::byte* const out = record();
    *reinterpret_cast<std::uint16_t*>(out + p_.layout.zero_offset() + 2 * c) =
        float16(grid.zero).bits;
    out[p_.layout.step_offset() + static_cast<std::size_t>(c)] =
        static_cast<std::byte>(round_fp8(grid.step, p_.layout.scale).bits);
  }

  // 3. Steps and zeros, and the codes where unbias() looks at them last.
  __device__ void fit_columns() {
    const int max_code = p_.layout.max_code();
    const float n = this->max_code();
    const auto inverse_scale = tile_.own_rows(vectors_.inverse_scale());
    tile_.template column_fold<2>(
        [](float(&s)[2]) {
          s[0] = 0x1p126f;
          s[1] = -0x1p126f;
        },
        [&](int i, int j, float(&s)[2]) {
          const float y = __fmul_rn(tile_.x(i, j), inverse_scale(i));
          s[0] = fminf(s[0], y);
          s[1] = fmaxf(s[1], y);
        },
        [](int q, float a, float b) { return q == 0 ? fminf(a, b) : fmaxf(a, b); },
        [&](int c, int p, float(&s)[2]) {
          const column_grid grid =
              fit_range(s[0], s[1], p_.recipe.range, steps.cover, max_code, p_.layout.scale);
          set_grid(p, grid);
          if constexpr (steps.refits == 0 && !steps.unbiased) store_grid(c, grid);
        });
    const auto deviation = [&](int i, int j) {
      return std::fma(tile_.x(i, j), inverse_scale(i), -vectors_.zero()[tile_.col_place(j)]);
    };
    const auto shifted = [&](float t, int j) {
      return shifted_code(t, vectors_.inverse_range()[tile_.col_place(j)], n);
    };
    if constexpr (steps.refits == 1) {
      const float weight_sum = lane_sum_of(vectors_.row_weight(), tile_.rows());
      const auto weight = tile_.own_rows(vectors_.row_weight());
      tile_.template col_sums<4>(
          [&](int i, int j, float(&s)[4]) {
            const float w = weight(i);
            const float t = deviation(i, j);
            const float code = __fsub_rn(shifted(t, j), integer_shift);
            const float weighted = __fmul_rn(w, code);
            s[0] = std::fma(w, code, s[0]);
            s[1] = std::fma(weighted, code, s[1]);
            s[2] = std::fma(w, t, s[2]);
            s[3] = std::fma(weighted, t, s[3]);
          },
          [&](int, int p, float(&s)[4]) {
            const column_grid grid{vectors_.zero()[p], vectors_.step()[p]};
            set_grid(p, refit(grid, {weight_sum, s[0], s[1], s[2], s[3], 0.0f}, p_.layout.scale));
          });
    }
    if constexpr (steps.unbiased) {
      owned_codes<Shape> made(shape_, codes(), tile_.g, tile_.l);
      tile_.template col_sums<4>(
          [&](int i, int j, float(&s)[4]) {
            const float t = deviation(i, j);
            const float with_code = shifted(t, j);
            const float code = __fsub_rn(with_code, integer_shift);
            made.set(i, j, bits_of(with_code));
            s[0] = s[0] + code;
            s[1] = s[1] + t;
            s[2] = std::fma(code, t, s[2]);
            s[3] = std::fma(t, t, s[3]);
          },
          [&](int c, int p, float(&s)[4]) {
            const column_grid grid{vectors_.zero()[p], vectors_.step()[p]};
            store_grid(c, unbias(grid, {0.0f, s[0], 0.0f, s[1], s[2], s[3]}, tile_.rows(),
                                 p_.layout.scale));
          });
      made.put(codes(), tile_.g, tile_.l);
      __syncthreads();
    }
  }

  // 4. Row scales once more. scale_bits() holds the codes of the scales, row_first() the squares of
  // the rows.
  __device__ void choose_scales() {
    const scale_type type = p_.layout.scale;
    const float n = max_code();
    // Squares of errors and products with the row, of every candidate.
    const auto trial = [&](int candidate, int q) {
      return reinterpret_cast<float*>(codes()) + (2 * candidate + q) * vector_floats(tile_.rows());
    };
    const auto zero = tile_.own_cols(vectors_.zero());
    const auto step = tile_.own_cols(vectors_.step());
    const auto range = tile_.own_cols(vectors_.inverse_range());
#pragma unroll 1
    for (int candidate = 0; candidate < scale_candidates; ++candidate) {
      const auto inverse_scale = tile_.own_rows(vectors_.inverse_scale(candidate));
      tile_.template row_sums<2>(
          [&](int i, int j, float(&s)[2]) {
            const float x = tile_.x(i, j);
            const float t = std::fma(x, inverse_scale(i), -zero(j));
            const float error = std::fma(-code_of(t, range(j), n), step(j), t);
            s[0] = std::fma(error, error, s[0]);
            s[1] = std::fma(error, x, s[1]);
          },
          [&](int, int p, float(&s)[2]) {
            trial(candidate, 0)[p] = s[0];
            trial(candidate, 1)[p] = s[1];
          });
    }
    __syncthreads();
    std::byte* const out = record() + p_.layout.scale_offset();
    tile_.each_row([&](int r, int p) {
      const float weight = weight_along(p_.recipe.along, vectors_.row_first()[p]);
      const auto bits = static_cast<std::uint8_t>(scale_bits()[p]);
      float best_cost = 0.0f;
      int best = 0;
      for (int candidate = 0; candidate < scale_candidates; ++candidate) {
        const float scale = neighbour_of(bits, candidate_by(candidate), type).value;
        const float cost = row_cost(trial(candidate, 0)[p], trial(candidate, 1)[p], weight,
                                    product_of(scale, scale));
        if (candidate != 0 && !(cost < best_cost)) continue;
        best_cost = cost;
        best = candidate;
      }
      out[r] = static_cast<std::byte>(neighbour_of(bits, candidate_by(best), type).bits);
      vectors_.inverse_scale()[p] = vectors_.inverse_scale(best)[p];
    });
    __syncthreads();
  }

  // 5. Codes.
  __device__ void make_codes() {
    const float n = max_code();
    const auto inverse = tile_.own_rows(vectors_.inverse_scale());
    owned_codes<Shape> made(shape_, codes(), tile_.g, tile_.l);
    tile_.for_cols([&](int j) {
      const float zero = vectors_.zero()[tile_.col_place(j)];
      const float range = vectors_.inverse_range()[tile_.col_place(j)];
      tile_.for_rows([&](int i) {
        made.set(i, j, bits_of(shifted_code(std::fma(tile_.x(i, j), inverse(i), -zero), range, n)));
      });
    });
    made.put(codes(), tile_.g, tile_.l);
    __syncthreads();
  }
  __device__ void round_with_feedback() {
    const int cols = tile_.cols();
    float* const deviations =
        Shape::is_fixed ? buffer() : tile_memory() + std::int64_t{tile_.rows()} * cols;
    feedback_rounding<Shape>(tile_, vectors_, shared_ + p_.feedback, deviations,
                             group_->factors + std::int64_t{head_} * cols * cols, p_.layout,
                             record())
        .run();
  }

  __device__ void store() const {
    std::byte* const out = record();
    const tile_layout& layout = p_.layout;
    const int groups = code_groups(tile_.cols());
    for (int task = static_cast<int>(threadIdx.x); task < tile_.rows() * groups;
         task += block_threads) {
      const int r = task / groups;
      const int group = task % groups;
      const int runs = min(4, tile_.col_steps() - 4 * group);
      std::uint32_t words[16];
#pragma unroll
      for (int k = 0; k < 16; k += 4) {
        const uint4 quad = *reinterpret_cast<const uint4*>(codes() + code_word(task, k));
        words[k] = quad.x;
        words[k + 1] = quad.y;
        words[k + 2] = quad.z;
        words[k + 3] = quad.w;
      }
      for (int plane = 0; plane < layout.planes(); ++plane) {
        const int width = layout.plane_bits(plane);
        std::byte* const place = out + layout.code_offset(plane, r) + 4 * group * 2 * width;
        if (width == 1) store_runs<1>(words, layout.plane_shift(plane), place, runs);
        if (width == 2) store_runs<2>(words, layout.plane_shift(plane), place, runs);
        if (width == 4) store_runs<4>(words, layout.plane_shift(plane), place, runs);
      }
    }
  }

  const encode_parameters& p_;
  const Shape shape_;
  const encode_group* const group_;
  const int head_;
  float* const shared_;
  const encode_vectors<Shape> vectors_;
  block_tile<Shape> tile_;
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
