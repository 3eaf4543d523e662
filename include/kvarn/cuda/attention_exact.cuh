// Up to 16 exact tokens against four rows of queries, by one warp on tensor cores for 16-bit
// floating point.
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

// Some of the 32 channels at a time that a lane has of its two tokens.
template <int Dim, element_type Type>
struct channel_batch {
  static constexpr int steps = blocks_of(Dim, 32);
  static constexpr int together = Type == element_type::float32 ? 2 : 4;

  eight_channels<Type> low[together];
  eight_channels<Type> high[together];

  // Steps from `start` on. `index`: of the first token; `behind`: from there to the second.
  __device__ void load(const void* array, std::int64_t index, std::int64_t behind, int start) {
    const int channel = 8 * (lane_index() & 3);
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
  }

  // Calls use(step, low, high) with all of them; the first batch is loaded.
  template <class Use>
  __device__ void for_all(const void* array, std::int64_t index, std::int64_t behind, Use use) {
#pragma unroll
    for (int start = 0; start < steps; start += together) {
      if (start > 0) load(array, index, behind, start);
#pragma unroll
      for (int i = 0; i < together; ++i)
        if (start + i < steps) use(start + i, low[i], high[i]);
    }
  }
};

// Products of the lane's row with tokens r and r + 8. `query`: of the row in column r / 2 of the
// operand, zeros behind the head dimension.
template <int Dim, element_type Type>
__device__ inline void score_exact(const exact_leaf& tokens, channel_batch<Dim, Type>& batch,
                                   const float* query, float (&scores)[2]) {
  using channels = eight_channels<Type>;
  constexpr auto type = channels::part_type;
  const bool is_rest = (lane_index() & 4) != 0;
  const float* const place = query + 8 * (lane_index() & 3);
  float c[4] = {};
  batch.for_all(tokens.keys, tokens.key, tokens.key_behind,
                [&](int step, const channels& low, const channels& high) {
#pragma unroll
                  for (int m = 0; m < 2; ++m) {
                    std::uint32_t a[4][channels::parts];
                    low.words(2 * m, a[0]);
                    high.words(2 * m, a[1]);
                    low.words(2 * m + 1, a[2]);
                    high.words(2 * m + 1, a[3]);
                    const float4 q = *reinterpret_cast<const float4*>(place + 32 * step + 4 * m);
                    const std::uint32_t b0 = part_of_pair(type, q.x, q.y, is_rest);
                    const std::uint32_t b1 = part_of_pair(type, q.z, q.w, is_rest);
#pragma unroll
                    for (int p = 0; p < channels::parts; ++p)
                      multiply_pairs<type>(c, {a[0][p], a[1][p], a[2][p], a[3][p]}, b0, b1);
                  }
                });
  scores[0] = c[0] + c[1];
  scores[1] = c[2] + c[3];
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
  for (float& score : scores) score = exp2_approx(score + shift);
  float sum = scores[0] + scores[1];
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2) sum = sum + __shfl_xor_sync(all_lanes, sum, lane);
  state.sum = sum * (1.0f / (1 << exact_weight_bits));
  return state;
}

// Calls put(channel, sum) with sums of weights times values, of the lane's row.
template <int Dim, element_type Type, class Put>
__device__ inline void sum_exact(const exact_leaf& tokens, channel_batch<Dim, Type>& batch,
                                 const float (&weights)[2], Put put) {
  using channels = eight_channels<Type>;
  constexpr auto type = channels::part_type;
  std::uint32_t b[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float whole = unpack_pair(type, pack_pair(type, weights[i], 0.0f)).low;
    b[i] = transpose_matrix(pack_pair(type, weights[i], weights[i] - whole));
  }
  const int r = lane_index() >> 2;
  const int first = 8 * (r >> 1) + (r & 1);
  batch.for_all(tokens.values, tokens.value, tokens.value_behind,
                [&](int step, const channels& low, const channels& high) {
#pragma unroll
                  for (int m = 0; m < 2; ++m) {
                    std::uint32_t a[4][channels::parts];
                    low.words(2 * m, a[0]);
                    low.words(2 * m + 1, a[1]);
                    high.words(2 * m, a[2]);
                    high.words(2 * m + 1, a[3]);
                    float c[4] = {};
#pragma unroll
                    for (int p = 0; p < channels::parts; ++p)
                      multiply_pairs<type>(c,
                                           {transpose_matrix(a[0][p]), transpose_matrix(a[1][p]),
                                            transpose_matrix(a[2][p]), transpose_matrix(a[3][p])},
                                           b[0], b[1]);
                    constexpr float unit = 1.0f / (1 << exact_weight_bits);
                    const int channel = first + 32 * step + 4 * m;
                    if (Dim % 32 == 0 || channel < Dim) {
                      put(channel, (c[0] + c[1]) * unit);
                      put(channel + 2, (c[2] + c[3]) * unit);
                    }
                  }
                });
}

// What a warp does with one leaf and four rows. Places in shared memory, in bytes.
struct exact_task {
  exact_leaf tokens;
  element_type type;
  int count;   // of tokens; none where 0 or less
  int ahead;   // of the first token in front of what the block's first row sees
  int window;  // that a row sees
  soft_cap cap;
  int query;   // of the first of the four rows
  int part;    // where sums go
  int states;  // four
};

template <format_id Format, element_type Type>
__device__ inline softmax_state attend_leaf(const exact_task& task, const float* query,
                                            float* part) {
  using layout = attention_layout<format_of_id(Format)>;
  const exact_leaf& tokens = task.tokens;
  channel_batch<layout::key_dim, Type> keys;
  channel_batch<layout::value_dim, Type> values;
  keys.load(tokens.keys, tokens.key, tokens.key_behind, 0);
  values.load(tokens.values, tokens.value, tokens.value_behind, 0);
  const int r = lane_index() >> 2;
  float scores[2];
  score_exact(tokens, keys, query + (r >> 1) * layout::query_stride, scores);
  const float* const mine = query + (lane_index() & 3) * layout::query_stride;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float score = scores[k] * mine[layout::query_unit];
    if (task.cap.cap != 0.0f) score = task.cap(score);
    const int token = r + 8 * k;
    const int ahead = task.ahead + __float_as_int(mine[layout::query_offset]);
    scores[k] = seen_tokens::of(task.count, ahead, task.window).has(token) ? score : unseen;
  }
  const softmax_state state = weigh_exact(scores);
  sum_exact(tokens, values, scores, [part](int channel, float sum) { part[channel] = sum; });
  return state;
}

// Leaves what four rows get of a leaf.
template <format_id Format>
__device__ inline void attend_exact(const exact_task& task) {
  using layout = attention_layout<format_of_id(Format)>;
  extern __shared__ float4 shared[];
  auto* const base = reinterpret_cast<std::byte*>(shared);
  const auto* const query = reinterpret_cast<const float*>(base + task.query);
  const int row = lane_index() & 3;
  float* const part = reinterpret_cast<float*>(base + task.part) + row * layout::part_stride;
  softmax_state state{nothing_seen, 0.0f};
  if (task.count <= 0) {
    for (int d = lane_index() >> 2; d < layout::value_dim; d += 8) part[d] = 0.0f;
  } else if (task.type == element_type::float16) {
    state = attend_leaf<Format, element_type::float16>(task, query, part);
  } else if (task.type == element_type::bfloat16) {
    state = attend_leaf<Format, element_type::bfloat16>(task, query, part);
  } else {
    state = attend_leaf<Format, element_type::float32>(task, query, part);
  }
  if (lane_index() < 4) reinterpret_cast<softmax_state*>(base + task.states)[row] = state;
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
