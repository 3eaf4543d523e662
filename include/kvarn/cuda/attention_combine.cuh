// Joining what the blocks of a sequence have stored, in the order in which one block would have: by
// those blocks, where they are a cluster, or by a second kernel.
#pragma once

#include <cstdint>

#include "../format/tile_layout.hpp"
#include "attention_rows.cuh"
#include "device.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// Threads that join one row.
template <int Dim>
inline constexpr int row_threads = 32 * blocks_of(Dim, 32);

// Joins the partial sums of `rows` rows: sums go to `out`, what they are relative to to `states`.
// Row r of partial sum i stands at stored + r * row_stride + i * partial_stride. A thread asks for
// `Together` values at a time.
template <int Dim, int Threads, int Together>
__device__ void join_rows(int rows, int partials, int per_section, const float* stored,
                          int row_stride, int partial_stride, const token_buffer<0>& out,
                          softmax_state* states) {
  for (int unit = static_cast<int>(threadIdx.x); unit < rows * row_threads<Dim>; unit += Threads) {
    const int row = unit / row_threads<Dim>;
    const int d = unit % row_threads<Dim>;
    const float* const mine_stored = stored + row * row_stride;
    const auto part = [&](int i) {
      return mine_stored + std::int64_t{max(min(i, partials - 1), 0)} * partial_stride;
    };
    // A lane has the state of every 32nd partial sum.
    const auto state_of = [&](int i) {
      const float* const place = part(i) + Dim;
      const softmax_state state{__float_as_int(load_now(place)), load_now(place + 1)};
      return i < partials ? state : softmax_state{nothing_seen, 0.0f};
    };
    float batch[Together];
    const auto load = [&](int start) {
#pragma unroll
      for (int i = 0; i < Together; ++i) batch[i] = load_now(part(start + i) + min(d, Dim - 1));
    };
    softmax_state mine = state_of(lane_index());
    load(0);
    int maximum = mine.maximum;
    for (int i = lane_index() + 32; i < partials; i += 32)
      maximum = max(maximum, state_of(i).maximum);
    maximum = __reduce_max_sync(all_lanes, maximum);
    float sum = 0.0f;
    float total = 0.0f;
    float section_sum = 0.0f;
    float section_total = 0.0f;
    for (int start = 0; start < partials; start += Together) {
      if (start > 0) load(start);
      if (start > 0 && start % 32 == 0) mine = state_of(start + lane_index());
      const float my_factor = power(mine.maximum - maximum);
#pragma unroll
      for (int i = 0; i < Together; ++i) {
        if (start + i >= partials) break;
        const int lane = (Together == 32 ? 0 : start & 31) + i;
        const float factor = __shfl_sync(all_lanes, my_factor, lane);
        section_sum = std::fma(__shfl_sync(all_lanes, mine.sum, lane), factor, section_sum);
        section_total = std::fma(batch[i], factor, section_total);
        if (((i + 1) & (per_section - 1)) == 0 || start + i + 1 == partials) {
          sum = sum + section_sum;
          total = total + section_total;
          section_sum = 0.0f;
          section_total = 0.0f;
        }
      }
    }
    if (d < Dim) *out.at(row, d) = total;
    if (d == 0) states[row] = {maximum, sum};
  }
}

// Joins what the blocks of a sequence have stored, where they are too many for a cluster: one block
// per row.
template <format_id Format>
KVARN_KERNEL void __launch_bounds__(row_threads<format_of_id(Format).value_head_dim>)
    combine_kernel(const __grid_constant__ attention_parameters p) {
  using layout = attention_layout<format_of_id(Format)>;
  constexpr int dim = layout::value_dim;
  extern __shared__ float4 shared[];
  __shared__ softmax_state total_state;
  const attention_arguments& a = p.arguments;
  // The kernel in front has waited for those before it: what they wrote can be read already.
  const attention_sequence& s = a.sequences[blockIdx.z];
  const int block = p.by_kv_heads.quotient(static_cast<int>(blockIdx.y));
  const int kv_head = static_cast<int>(blockIdx.y) - block * a.kv_heads;
  const int row = static_cast<int>(blockIdx.x) + block * p.block_rows;
  if (row >= s.tokens * a.heads) return;
  const auto chunks = sequence_chunks::of(s.sink.count, s.page_count, s.tail.count);
  const int partial = chunks.partial(chunks.run(p.splits, p.by_splits));
  const float* const stored =
      static_cast<const float*>(a.workspace) +
      ((std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * p.partials * p.block_rows +
       blockIdx.x) *
          layout::stored_stride;
  wait_for_kernels_before();
  const token_buffer<0> total{reinterpret_cast<float*>(shared), 16, dim};
  join_rows<dim, row_threads<dim>, 32>(
      1, partial == 1 ? chunks.count() : blocks_of(chunks.count(), chunks_per_section),
      chunks_per_section / partial, stored, 0, p.block_rows * layout::stored_stride, total,
      &total_state);
  __syncthreads();
  finish_rows<dim, row_threads<dim>>(p, s, kv_head, row, 1, total,
                                     [&](int) { return total_state; });
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
