// Up to 16 exact tokens against four rows of queries, by one warp, in FP32.
#pragma once

#include <cstdint>

#include "attention_rows.cuh"
#include "attention_tile.cuh"
#include "device.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// `count` tokens of one KV head, from token `first` of some rows on.
struct exact_leaf {
  const void* keys;
  const void* values;
  element_type type;
  std::int64_t key;  // element of the first key
  std::int64_t value;
  std::int64_t key_stride;
  std::int64_t value_stride;
  int count;

  __device__ exact_leaf(const attention_arguments& a, const exact_rows& rows, int kv_head,
                        int first, int n)
      : keys(rows.keys),
        values(rows.values),
        type(a.exact_type),
        key(first * a.key_strides.token + kv_head * a.key_strides.head),
        value(first * a.value_strides.token + kv_head * a.value_strides.head),
        key_stride(a.key_strides.token),
        value_stride(a.value_strides.token),
        count(n) {}
};

// Softmax weights of the tokens, of token lane % 16 in each lane, and what they are relative to.
// `query(row)`, `unit(row)`: as in score_tile. `sees(row, token)`: whether the row sees the token.
template <int Dim, class Query, class Unit, class Sees>
__device__ inline void weigh_exact(const exact_leaf& tokens, Query query, Unit unit, Sees sees,
                                   soft_cap cap, float (&weight)[4], softmax_state (&state)[4]) {
  // A lane has one token and every other run of 8 channels.
  const int lane = lane_index();
  const int token = lane & 15;
  float score[4] = {};
  const std::int64_t key = tokens.key + min(token, tokens.count - 1) * tokens.key_stride;
#pragma unroll 4
  for (int c = 8 * (lane >> 4); c < Dim; c += 16) {
    float k[8];
    load_eight(tokens.keys, tokens.type, key + c, k);
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      const float4 x = *reinterpret_cast<const float4*>(query(row) + c);
      const float4 y = *reinterpret_cast<const float4*>(query(row) + c + 4);
      const float q[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) score[row] = std::fma(q[i], k[i], score[row]);
    }
  }
#pragma unroll
  for (int row = 0; row < 4; ++row) {
    float s = (score[row] + __shfl_xor_sync(all_lanes, score[row], 16)) * unit(row);
    if (cap.cap != 0.0f) s = cap(s);
    if (token >= tokens.count || !sees(row, token)) s = unseen;
    float largest = s;
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, lanes));
    state[row].maximum = rounded_maximum(largest);
    weight[row] = state[row].maximum == nothing_seen
                      ? 0.0f
                      : exp2_approx(s - static_cast<float>(state[row].maximum));
    state[row].sum = weight[row];
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2)
      state[row].sum = state[row].sum + __shfl_xor_sync(all_lanes, state[row].sum, lanes);
  }
}

// Sums of weights times values to the channels at out(row).
template <int Dim, class Out>
__device__ inline void sum_exact(const exact_leaf& tokens, const float (&weight)[4], Out out) {
  // A lane has channels 2 lane + 64 k and the next.
  constexpr int pairs = blocks_of(Dim, 64);
  const int lane = lane_index();
  float sum[4][pairs][2] = {};
#pragma unroll 4
  for (int t = 0; t < tokens.count; ++t) {
    float w[4];
#pragma unroll
    for (int row = 0; row < 4; ++row) w[row] = __shfl_sync(all_lanes, weight[row], t);
#pragma unroll
    for (int k = 0; k < pairs; ++k) {
      const int d = 2 * lane + 64 * k;
      if (d >= Dim) break;
      const float_pair v =
          load_pair(tokens.values, tokens.type, tokens.value + t * tokens.value_stride + d);
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        sum[row][k][0] = std::fma(w[row], v.low, sum[row][k][0]);
        sum[row][k][1] = std::fma(w[row], v.high, sum[row][k][1]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < 4; ++row)
#pragma unroll
    for (int k = 0; k < pairs; ++k) {
      const int d = 2 * lane + 64 * k;
      if (d < Dim)
        *reinterpret_cast<float2*>(out(row) + d) = make_float2(sum[row][k][0], sum[row][k][1]);
    }
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
