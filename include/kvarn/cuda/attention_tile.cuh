// One packed tile against four rows of queries, or blocks of four, by one warp on integer tensor
// cores. Codes are taken out of their words once for all blocks.
// Lanes: attention_codes.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../format/tile_layout.hpp"
#include "attention_codes.cuh"
#include "device.cuh"
#include "tensor_core.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// The score of tokens that a row does not see, in any unit above 0.
inline constexpr float unseen = -std::numeric_limits<float>::infinity();

// Those of `count` tokens that a row sees, where they begin `ahead` in front of the end of what it
// sees: the row's own token is token ahead - 1.
struct seen_tokens {
  int first;
  int end;

  __device__ static seen_tokens of(int count, int ahead, int window) {
    return {ahead - window, min(count, ahead)};
  }
  __device__ bool has(int token) const { return token >= first && token < end; }
};

// What units of scores are at least.
inline constexpr float least_slope = std::numeric_limits<float>::min();

// The maximum and the sum of a softmax: the sum of 2^(score - maximum). The maximum is a score
// rounded up, or nothing_seen.
struct softmax_state {
  int maximum;
  float sum;
};
inline constexpr int nothing_seen = -(1 << 24);
inline constexpr int largest_maximum = 1 << 23;

__device__ inline int rounded_maximum(float score) {
  return score > unseen ? static_cast<int>(fminf(ceilf(score), 1.0f * largest_maximum))
                        : nothing_seen;
}

// 2^d for d <= 127, 0 below -126.
__device__ inline float power(int d) { return __int_as_float((max(d, -127) + 127) << 23); }

// cap * tanh(score / cap); cap 0: none.
struct soft_cap {
  float cap;
  float slope;  // 2 log2(e) / cap

  __device__ float operator()(float score) const {
    const float y = fminf(fmaxf(score * slope, -60.0f), 60.0f);
    return cap * (1.0f - __fdividef(2.0f, exp2_approx(y) + 1.0f));
  }
};

template <cache_format Format>
inline constexpr int key_runs = (Format.key_head_dim + 63) / 64;
template <cache_format Format>
inline constexpr int value_runs = Format.group / 64;

// Scores of a tile in the order of the values' operand.
template <cache_format Format>
using score_array = float[value_runs<Format>][2][4];

template <cache_format Format, class F>
__device__ inline void for_scores(score_array<Format>& scores, F f) {
#pragma unroll
  for (int q = 0; q < value_runs<Format>; ++q)
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        f(scores[q][w][e], 16 * q + token_order<Format>::word_stride * w + e);
}

// Sums of the queries of the lane's rows, times the zeros of a key record. `parts(block)`: of the
// row in column r of an operand, padded with zeros, its numbers rounded to binary16 (even columns)
// or what the rounding left; channel c stands at place_of_channel(c). Rows r and r + 8 of an
// operand of zeros are halves of the same channels, each for one of two multiplications.
__device__ inline int place_of_channel(int c) { return (c & ~6) | ((c & 2) << 1) | ((c & 4) >> 1); }
template <tile_layout Layout, int Runs, int Blocks, class Parts>
__device__ inline void sum_zeros(const std::byte* record, Parts parts, float (&bias)[Blocks]) {
  constexpr int cols = Layout.cols();
  const std::byte* const zeros = record + Layout.zero_offset();
  float first[Blocks][4] = {};
  float second[Blocks][4] = {};
#pragma unroll
  for (int start = 0; start < 64 * Runs; start += 32) {
    const int channel = start + 8 * (lane_index() & 3);
    uint4 zero = {0u, 0u, 0u, 0u};
    if (64 * Runs == cols || channel < cols)
      zero = *reinterpret_cast<const uint4*>(zeros + 2 * channel);
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
      const uint4 q = *reinterpret_cast<const uint4*>(parts(block) + channel);
      const std::uint32_t a[4] = {zero.x, zero.y, zero.z, zero.w};
      multiply_pairs<element_type::float16>(first[block], a, q.x, q.y);
      multiply_pairs<element_type::float16>(second[block], a, q.z, q.w);
    }
  }
#pragma unroll
  for (int block = 0; block < Blocks; ++block)
    bias[block] = (first[block][0] + first[block][1]) + (second[block][2] + second[block][3]);
}

// Queries are scaled to this magnitude.
inline constexpr int largest_query = 1 << 15;

// Scores of the lane's rows with the tokens of the key record, of which slope[block] is the unit.
// `query(block)`: of magnitude at most largest_query, zeros behind the head dimension;
// `parts(block)`: see sum_zeros.
template <cache_format Format, int Blocks, class Query, class Parts>
__device__ inline void score_tile(const std::byte* keys, Query query, Parts parts,
                                  score_array<Format> (&scores)[Blocks], float (&slope)[Blocks]) {
  constexpr tile_layout layout = Format.key_layout();
  constexpr int runs = key_runs<Format>;
  using order = code_order<layout.bits>;
  using tokens = token_order<Format>;
  folded_operand<runs> operands[Blocks];
  const int mine = order::base(runs);
  float bias[Blocks];
  sum_zeros<layout, runs>(keys, parts, bias);
  float largest[Blocks];
#pragma unroll
  for (float& x : largest) x = 1.0f * largest_query;
  fold<true, layout, order>(
      keys, largest, bias,
      [&](int block, int q, int w, float(&a)[4]) {
        const float4 quad =
            *reinterpret_cast<const float4*>(query(block) + mine + 16 * q + order::word_stride * w);
        a[0] = quad.x;
        a[1] = quad.y;
        a[2] = quad.z;
        a[3] = quad.w;
      },
      operands);
  const int base = tokens::base(value_runs<Format>);
  const code_rows<layout, runs> rows(keys, base, tokens::swap());
  constexpr int together = Blocks == 1 ? 2 : 1;  // more take more registers than there are
#pragma unroll
  for (int q = 0; q < value_runs<Format>; ++q)
#pragma unroll
    for (int pair = 0; pair < 4; pair += together) {
      float sums[Blocks][together][2];
      multiply_rows<true, false>(
          rows, [=](int n) { return 16 * q + tokens::column(pair + n, 0); },
          [=](int n) { return 16 * q + tokens::column(pair + n, 1); }, operands, sums);
#pragma unroll
      for (int block = 0; block < Blocks; ++block)
#pragma unroll
        for (int n = 0; n < together; ++n)
#pragma unroll
          for (int slot = 0; slot < 2; ++slot)
            scores[block][q][tokens::word(pair + n, slot)][tokens::element(pair + n, slot)] =
                sums[block][n][slot];
    }
  const std::byte* const scales = keys + layout.scale_offset() + base;
#pragma unroll
  for (int q = 0; q < value_runs<Format>; ++q)
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      float scale[4];
      widen_bytes(halves_of(tokens::swap_bytes(*reinterpret_cast<const std::uint32_t*>(
                      scales + 16 * q + tokens::word_stride * w))),
                  scale);
#pragma unroll
      for (int block = 0; block < Blocks; ++block)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[block][q][w][e] = scale[e] * scores[block][q][w][e];
    }
#pragma unroll
  for (int block = 0; block < Blocks; ++block)
    slope[block] = operands[block].unit * fp8_factor<Format.scale>;
}

// Weights of a tile are at most 2 to this.
inline constexpr int weight_bits = 16;

// Scores in units of `slope` log 2 become capped ones in units of log 2.
template <cache_format Format>
__device__ inline void cap_scores(score_array<Format>& scores, float& slope, soft_cap cap) {
  for_scores<Format>(scores, [&](float& score, int) { score = cap(score * slope); });
  slope = 1.0f;
}

// Takes out the tokens that the lane's row does not see.
template <cache_format Format>
__device__ inline void hide_scores(score_array<Format>& scores, const seen_tokens& seen) {
  using order = token_order<Format>;
  const int base = order::base(value_runs<Format>);
  for_scores<Format>(scores, [&](float& score, int token) {
    if (!seen.has((base + token) ^ order::swap())) score = unseen;
  });
}

// The weights of one tile for one row.
struct tile_weights {
  int maximum;    // of the softmax state
  float largest;  // weight
  float sum;      // over the lane's tokens
};

// Scores become weights, 2^weight_bits times what they are relative to the maximum. `slope`: the
// unit of scores, in log 2.
template <cache_format Format, int Blocks>
__device__ inline void weigh_scores(score_array<Format> (&scores)[Blocks],
                                    const float (&slope)[Blocks], tile_weights (&out)[Blocks]) {
#pragma unroll
  for (int block = 0; block < Blocks; ++block) {
    float most[4] = {unseen, unseen, unseen, unseen};
    for_scores<Format>(scores[block], [&](float& score, int token) {
      most[token & 3] = fmaxf(most[token & 3], score);
    });
    out[block].largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
  }
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2)
#pragma unroll
    for (int block = 0; block < Blocks; ++block)
      out[block].largest =
          fmaxf(out[block].largest, __shfl_xor_sync(all_lanes, out[block].largest, lane));
#pragma unroll
  for (int block = 0; block < Blocks; ++block) {
    out[block].maximum = rounded_maximum(out[block].largest * slope[block]);
    const float shift = static_cast<float>(weight_bits) - static_cast<float>(out[block].maximum);
    const auto weight = [&](float score) {
      return exp2_approx(std::fma(score, slope[block], shift));
    };
    float part[4] = {};
    for_scores<Format>(scores[block], [&](float& score, int token) {
      score = weight(score);
      part[token & 3] = part[token & 3] + score;
    });
    out[block].largest = weight(out[block].largest);
    out[block].sum = (part[0] + part[1]) + (part[2] + part[3]);
  }
}

// 16 N channels from d on.
template <int N, bool Swaps, int Blocks, tile_layout Layout, int Runs, class Put>
__device__ inline void sum_channels(const code_rows<Layout, Runs>& rows, const std::uint8_t* scales,
                                    int d, const folded_operand<Runs> (&operands)[Blocks],
                                    Put put) {
  float sums[Blocks][N][2];
  multiply_rows<false, Swaps>(
      rows, [d](int n) { return d + 16 * n; }, [d](int n) { return d + 16 * n + 8; }, operands,
      sums);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = raw_scale(scales[d + 16 * n + 8 * half]);
#pragma unroll
      for (int block = 0; block < Blocks; ++block)
        put(block, d / 8 + 2 * n + half, scale * sums[block][n][half]);
    }
}

// Calls put(block, k, x) with the sum of weights times values, in units of unit[block], of channel
// r + 8 k for the lane's row. Units are there before the first call, and sums over all tokens in
// the place of those over the lane's.
template <cache_format Format, int Blocks, class Put>
__device__ inline void sum_values(const std::byte* values,
                                  const score_array<Format> (&weights)[Blocks],
                                  tile_weights (&tile)[Blocks], float (&unit)[Blocks], Put put) {
  constexpr tile_layout layout = Format.value_layout();
  constexpr int runs = value_runs<Format>;
  using order = token_order<Format>;
  float bias[Blocks] = {};
  const std::byte* const zeros = values + layout.zero_offset() + 2 * order::base(runs);
#pragma unroll
  for (int q = 0; q < runs; ++q)
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint2 zero =
          *reinterpret_cast<const uint2*>(zeros + 2 * (16 * q + order::word_stride * w));
      const float_pair low = unpack_halves(order::swap_halves(zero.x));
      const float_pair high = unpack_halves(order::swap_halves(zero.y));
#pragma unroll
      for (int block = 0; block < Blocks; ++block) {
        const float(&a)[4] = weights[block][q][w];
        bias[block] = bias[block] + std::fma(a[0], low.low,
                                             std::fma(a[1], low.high,
                                                      std::fma(a[2], high.low, a[3] * high.high)));
      }
    }
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2)
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
      bias[block] = bias[block] + __shfl_xor_sync(all_lanes, bias[block], lane);
      tile[block].sum = tile[block].sum + __shfl_xor_sync(all_lanes, tile[block].sum, lane);
    }
  float largest[Blocks];
#pragma unroll
  for (int block = 0; block < Blocks; ++block) largest[block] = tile[block].largest;
  folded_operand<runs> operands[Blocks];
  fold<false, layout, order>(
      values, largest, bias,
      [&](int block, int q, int w, float(&a)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = weights[block][q][w][e];
      },
      operands);
#pragma unroll
  for (int block = 0; block < Blocks; ++block)
    unit[block] = operands[block].unit *
                  (fp8_factor<Format.scale> * power_of_two(raw_scale_exponent - weight_bits));
  const int r = lane_index() >> 2;
  const code_rows<layout, runs> rows(values, r);
  const auto* const scales =
      reinterpret_cast<const std::uint8_t*>(values + layout.scale_offset()) + r;
  // 32 channels are read before any is written: the compiler does not know that the two differ.
  constexpr int blocks = layout.head_dim / 16;
  constexpr int together = 2;
#pragma unroll
  for (int start = 0; start < blocks; start += together) {
    constexpr int last = blocks % together == 0 ? together : blocks % together;
    if (start + together <= blocks)
      sum_channels<together, order::swaps>(rows, scales, 16 * start, operands, put);
    else
      sum_channels<last, order::swaps>(rows, scales, 16 * start, operands, put);
  }
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
