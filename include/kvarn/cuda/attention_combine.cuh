// Joining what the blocks of a sequence have stored, in the order in which one block would have.
#pragma once

#include <cstdint>

#include "../format/tile_layout.hpp"
#include "attention_rows.cuh"
#include "device.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

inline constexpr int combine_threads = 128;

// Joins what the blocks of a sequence have stored: one block per row.
template <format_id Format>
KVARN_KERNEL void __launch_bounds__(combine_threads)
    combine_kernel(const __grid_constant__ attention_parameters p) {
  using layout = attention_layout<format_of_id(Format)>;
  constexpr int dim = layout::value_dim;
  extern __shared__ float4 shared[];
  const attention_arguments& a = p.arguments;
  // The kernel in front has waited for those before it: what they wrote can be read already.
  const attention_sequence& s = a.sequences[blockIdx.z];
  const int kv_head = static_cast<int>(blockIdx.y) % a.kv_heads;
  const int row =
      static_cast<int>(blockIdx.x) + static_cast<int>(blockIdx.y) / a.kv_heads * p.block_rows;
  if (row >= s.tokens * a.heads) return;
  const auto chunks = sequence_chunks::of(s.sink.count, s.page_count, s.tail.count);
  const int partial = chunks.partial(chunks.run(p.splits));
  const int partials = blocks_of(chunks.count(), partial);
  const int per_section = chunks_per_section / partial;
  constexpr int stride = layout::stored_stride;
  const float* const stored =
      static_cast<const float*>(a.workspace) +
      ((std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * p.partials * p.block_rows +
       blockIdx.x) *
          stride;
  const auto part = [stored, &p](int i) {
    return stored + std::int64_t{i} * p.block_rows * stride;
  };

  const int thread = static_cast<int>(threadIdx.x);
  constexpr int per_thread = blocks_of(dim, combine_threads);
  constexpr int together = 32;
  // A lane has the state of every 32nd partial sum.
  const auto state_of = [&](int i) {
    softmax_state state{nothing_seen, 0.0f};
    if (i < partials) {
      const int2 raw = __ldcg(reinterpret_cast<const int2*>(part(i) + dim));
      state = {raw.x, __int_as_float(raw.y)};
    }
    return state;
  };
  float stored_value[together][per_thread];
  const auto load = [&](int start) {
#pragma unroll
    for (int i = 0; i < together; ++i)
#pragma unroll
      for (int k = 0; k < per_thread; ++k) {
        const int d = thread + k * combine_threads;
        stored_value[i][k] = start + i < partials && d < dim ? __ldcg(part(start + i) + d) : 0.0f;
      }
  };
  wait_for_kernels_before();
  softmax_state mine = state_of(lane_index());
  load(0);
  int maximum = mine.maximum;
  for (int i = lane_index() + together; i < partials; i += together)
    maximum = max(maximum, state_of(i).maximum);
  maximum = __reduce_max_sync(all_lanes, maximum);

  float sum = 0.0f;
  float value[per_thread] = {};
  float section_sum = 0.0f;
  float section_value[per_thread] = {};
  for (int start = 0; start < partials; start += together) {
    if (start > 0) {
      load(start);
      mine = state_of(start + lane_index());
    }
    const float my_factor = power(mine.maximum - maximum);
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (start + i >= partials) break;
      const float factor = __shfl_sync(all_lanes, my_factor, i);
      section_sum = std::fma(__shfl_sync(all_lanes, mine.sum, i), factor, section_sum);
#pragma unroll
      for (int k = 0; k < per_thread; ++k)
        section_value[k] = std::fma(stored_value[i][k], factor, section_value[k]);
      if (((i + 1) & (per_section - 1)) == 0 || start + i + 1 == partials) {
        sum = sum + section_sum;
        section_sum = 0.0f;
#pragma unroll
        for (int k = 0; k < per_thread; ++k) {
          value[k] = value[k] + section_value[k];
          section_value[k] = 0.0f;
        }
      }
    }
  }
  const token_buffer<0> total{reinterpret_cast<float*>(shared), 16, dim};
#pragma unroll
  for (int k = 0; k < per_thread; ++k)
    if (thread + k * combine_threads < dim) *total.at(0, thread + k * combine_threads) = value[k];
  __syncthreads();
  finish_rows<dim, combine_threads>(p, s, kv_head, row, 1, total, [&](int) {
    return softmax_state{maximum, sum};
  });
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
