// Up to 16 exact tokens against four rows of queries, or blocks of four, by one warp on tensor
// cores for 16-bit floating point.
//
// A column of a multiplication is one row's operand rounded to 16 bits, or what the rounding left,
// so that 4 rows fill its 8 columns and both parts of a result come to one thread. Numbers of
// FP32 are three of BF16 each. Lane 4 r + i loads 16 or 32 bytes at a time of tokens r and r + 8:
// channels 8 i .. 8 i + 7 of every 32.
#pragma once

#include <cstdint>

#include "attention_rows.cuh"
#include "attention_tile.cuh"
#include "device.cuh"
#include "tensor_core.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

inline constexpr int leaf_tokens = exact_chunk / groups_per_chunk;

// Some tokens of one KV head, at most leaf_tokens.
struct exact_leaf {
  const void* keys;
  const void* values;
  std::int64_t key;  // element of the lane's first key
  std::int64_t value;
  std::int64_t key_behind;  // elements from there to the lane's second
  std::int64_t value_behind;

  // `count` tokens from token `first` of some rows on; the last one stands for those behind it.
  __device__ exact_leaf(const attention_arguments& a, const exact_rows& rows, int kv_head,
                        int first, int count)
      : keys(rows.keys), values(rows.values) {
    const int r = lane_index() >> 2;
    const int token = first + min(r, count - 1);
    const int behind = min(r + 8, count - 1) - min(r, count - 1);
    key = token * a.key_strides.token + kv_head * a.key_strides.head;
    value = token * a.value_strides.token + kv_head * a.value_strides.head;
    key_behind = behind * a.key_strides.token;
    value_behind = behind * a.value_strides.token;
  }
};

// Eight neighbouring channels of a token.
template <element_type Type>
struct eight_channels {
  static constexpr bool is_wide = Type == element_type::float32;
  static constexpr element_type part_type = is_wide ? element_type::bfloat16 : Type;
  static constexpr int parts = is_wide ? 3 : 1;

  uint4 raw[is_wide ? 2 : 1];

  __device__ void load(const void* array, std::int64_t index) {
    const auto* const from = reinterpret_cast<const uint4*>(static_cast<const std::byte*>(array) +
                                                            index * element_bytes(Type));
    raw[0] = __ldg(from);
    if constexpr (is_wide) raw[1] = __ldg(from + 1);
  }
  __device__ void clear() {
    raw[0] = {0u, 0u, 0u, 0u};
    if constexpr (is_wide) raw[1] = raw[0];
  }
  // Channels 2 w and 2 w + 1 as numbers of part_type whose sum they are.
  __device__ void words(int w, std::uint32_t (&out)[parts]) const {
    if constexpr (is_wide) {
      const uint4& quad = raw[w >> 1];
      float low = __uint_as_float(w & 1 ? quad.z : quad.x);
      float high = __uint_as_float(w & 1 ? quad.w : quad.y);
#pragma unroll
      for (int p = 0; p < parts; ++p) {
        out[p] = pack_pair(part_type, low, high);
        const float_pair rounded = unpack_pair(part_type, out[p]);
        low = low - rounded.low;
        high = high - rounded.high;
      }
    } else {
      out[0] = w == 0 ? raw[0].x : w == 1 ? raw[0].y : w == 2 ? raw[0].z : raw[0].w;
    }
  }
};

// Calls use(step, low, high) with 32 channels at a time of the lane's two tokens, some of which are
// loaded before the first is used.
template <int Dim, element_type Type, class Use>
__device__ inline void for_channels(const void* array, std::int64_t index, std::int64_t behind,
                                    Use use) {
  using channels = eight_channels<Type>;
  constexpr int steps = blocks_of(Dim, 32);
  constexpr int together = channels::is_wide ? 2 : 4;
  const int channel = 8 * (lane_index() & 3);
#pragma unroll
  for (int start = 0; start < steps; start += together) {
    channels low[together];
    channels high[together];
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (start + i >= steps) break;
      const int c = channel + 32 * (start + i);
      if (Dim % 32 == 0 || c < Dim) {
        low[i].load(array, index + c);
        high[i].load(array, index + behind + c);
      } else {
        low[i].clear();
        high[i].clear();
      }
    }
#pragma unroll
    for (int i = 0; i < together; ++i)
      if (start + i < steps) use(start + i, low[i], high[i]);
  }
}

// Products of the lane's rows with tokens r and r + 8. `query(block)`: of the row in column r / 2
// of the operand, zeros behind the head dimension.
template <int Dim, element_type Type, int Blocks, class Query>
__device__ inline void score_exact(const exact_leaf& tokens, Query query,
                                   float (&scores)[Blocks][2]) {
  using channels = eight_channels<Type>;
  constexpr auto type = channels::part_type;
  const bool is_rest = (lane_index() & 4) != 0;
  const int channel = 8 * (lane_index() & 3);
  float c[Blocks][4] = {};
  for_channels<Dim, Type>(
      tokens.keys, tokens.key, tokens.key_behind,
      [&](int step, const channels& low, const channels& high) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          std::uint32_t a[4][channels::parts];
          low.words(2 * m, a[0]);
          high.words(2 * m, a[1]);
          low.words(2 * m + 1, a[2]);
          high.words(2 * m + 1, a[3]);
#pragma unroll
          for (int block = 0; block < Blocks; ++block) {
            const float4 q =
                *reinterpret_cast<const float4*>(query(block) + channel + 32 * step + 4 * m);
            const std::uint32_t b0 = part_of_pair(type, q.x, q.y, is_rest);
            const std::uint32_t b1 = part_of_pair(type, q.z, q.w, is_rest);
#pragma unroll
            for (int p = 0; p < channels::parts; ++p)
              multiply_pairs<type>(c[block], {a[0][p], a[1][p], a[2][p], a[3][p]}, b0, b1);
          }
        }
      });
#pragma unroll
  for (int block = 0; block < Blocks; ++block) {
    scores[block][0] = c[block][0] + c[block][1];
    scores[block][1] = c[block][2] + c[block][3];
  }
}

inline constexpr int exact_weight_bits = 15;  // weights are at most 2 to this

// A softmax over the two tokens of each of the 8 lanes of a row: scores become weights, 2^15 times
// what they are relative to the state's maximum.
__device__ inline softmax_state weigh_exact(float (&scores)[2]) {
  float largest = fmaxf(scores[0], scores[1]);
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, lane));
  softmax_state state{rounded_maximum(largest), 0.0f};
  const float shift = static_cast<float>(exact_weight_bits) - static_cast<float>(state.maximum);
#pragma unroll
  for (float& score : scores) score = score > 0.5f * unseen ? exp2_approx(score + shift) : 0.0f;
  float sum = scores[0] + scores[1];
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2) sum = sum + __shfl_xor_sync(all_lanes, sum, lane);
  state.sum = sum * (1.0f / (1 << exact_weight_bits));
  return state;
}

// Of how many channels a lane gets sums, and which they are: exact_channel() + exact_offset(k).
template <int Dim>
inline constexpr int exact_sums = 4 * blocks_of(Dim, 32);
__device__ inline int exact_channel() {
  const int r = lane_index() >> 2;
  return 8 * (r >> 1) + (r & 1);
}
KVARN_HOST_DEVICE constexpr int exact_offset(int k) { return 32 * (k >> 2) + 2 * (k & 3); }

// Sums of weights times values, of the lane's row. Channels from Dim on get zeros.
template <int Dim, element_type Type, int Blocks, int N>
__device__ inline void sum_exact(const exact_leaf& tokens, const float (&weights)[Blocks][2],
                                 float (&sums)[Blocks][N]) {
  static_assert(N >= exact_sums<Dim>);
  using channels = eight_channels<Type>;
  constexpr auto type = channels::part_type;
  std::uint32_t b[Blocks][2];
#pragma unroll
  for (int block = 0; block < Blocks; ++block)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = weights[block][i];
      const float whole = unpack_pair(type, pack_pair(type, weight, 0.0f)).low;
      b[block][i] = transpose_matrix(pack_pair(type, weight, weight - whole));
    }
  for_channels<Dim, Type>(
      tokens.values, tokens.value, tokens.value_behind,
      [&](int step, const channels& low, const channels& high) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          std::uint32_t a[4][channels::parts];
          low.words(2 * m, a[0]);
          low.words(2 * m + 1, a[1]);
          high.words(2 * m, a[2]);
          high.words(2 * m + 1, a[3]);
          float c[Blocks][4] = {};
#pragma unroll
          for (int p = 0; p < channels::parts; ++p) {
            const std::uint32_t t[4] = {transpose_matrix(a[0][p]), transpose_matrix(a[1][p]),
                                        transpose_matrix(a[2][p]), transpose_matrix(a[3][p])};
#pragma unroll
            for (int block = 0; block < Blocks; ++block)
              multiply_pairs<type>(c[block], t, b[block][0], b[block][1]);
          }
#pragma unroll
          for (int block = 0; block < Blocks; ++block) {
            constexpr float unit = 1.0f / (1 << exact_weight_bits);
            sums[block][4 * step + 2 * m] = (c[block][0] + c[block][1]) * unit;
            sums[block][4 * step + 2 * m + 1] = (c[block][2] + c[block][3]) * unit;
          }
        }
      });
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
