// Decode attention over sink, sealed pages and tail, straight from the packed bytes: one kernel
// over runs of chunks (attention_block.cuh). Blocks of one sequence join what they have
// (attention_combine.cuh) through the shared memory of a cluster where it holds them, else a second
// kernel does.
//
// The work of a sequence and KV head is cut into chunks: the sink in blocks of 128 tokens, the
// sealed groups eight at a time, the tail in blocks of 128. A block of threads takes a run of
// chunks, found from what the sequence has when the kernel runs; its warps take the eight groups
// (or 16 tokens of an exact block) of a chunk, called its leaves. Sums are bracketed as
//
//   (leaf + ... + leaf) per chunk, (chunk + ... + chunk) per section of four chunks, then sections
//
// in order. (Where a block has eight chunks or more, each warp takes a chunk of its own and adds
// its groups up in registers: the same sums, joined an eighth as often.) Every maximum that a
// softmax is taken about is rounded up to an integer power of two, so that moving sums to another
// maximum is exact. The result therefore does not depend on how many blocks a sequence is cut into,
// nor on the other sequences of the call; that of a query not on the others of its sequence either.
//
// Products with codes run on integer tensor cores. The operand of a tile (the query times the steps
// of its channels; the softmax weights times the steps of their tokens) is rounded to 16 bits
// relative to the largest step; a column of the multiplication is the low or the high byte of one
// row's operand, so that 4 rows (query heads, query tokens) fill its 8 columns and both parts of a
// result come to one thread. The masks 0x03 and 0x0c take codes out of a word without a shift; the
// factor 4 of the latter is taken from the operand. What zeros add is rounded to an integer that
// the sums begin with (of keys it is summed on tensor cores for FP16, with queries in two parts).
// Exact tokens run on tensor cores for FP16 or BF16, with operands in two parts in the same way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "../format/tile_layout.hpp"
#include "attention_block.cuh"
#include "attention_combine.cuh"
#include "attention_rows.cuh"
#include "device.cuh"
#include "rotation.cuh"

namespace kvarn::cuda {

// Tuning, apart from the algorithm: nothing here changes a bit of the result.
struct attention_policy {
  int warps = 8;          // per block, 8 or 4
  int blocks_per_sm = 2;  // that registers are kept for
  int row_blocks = 2;     // of four rows that go through a tile together, where there are so many:
                          // 1 or 2; with four warps 1
};

// What fits the shared memory and registers of the devices this was measured on.
KVARN_INLINE constexpr attention_policy default_policy(const cache_format& format) {
  const std::size_t eight_warps = 8 * format.head_bytes();
  const bool has_three_bits = format.key_bits == 3 || format.value_bits == 3;  // more registers
  if (eight_warps <= std::size_t{80} * 1024 && !has_three_bits) return {8, 2, 2};
  if (eight_warps <= std::size_t{150} * 1024) return {8, 1, 2};
  return {4, 1, 1};
}

inline namespace KVARN_CUDA_NAMESPACE {

// Device memory that attend needs beside its arguments, for these bounds, counts and splits. Its
// contents do not matter. Asks the current device.
template <cache_format Format, attention_policy Policy = default_policy(Format)>
std::size_t attention_workspace_bytes(const attention_arguments& arguments);

// Attention of every query of every sequence: out, and the log of the sum of exponentiated logits
// in nats. A query that sees nothing gets zeros and -infinity. Not-finite query values are replaced
// as in keys.
template <cache_format Format, attention_policy Policy = default_policy(Format)>
launch_status attend(const attention_arguments& arguments, cudaStream_t stream);

// implementation

namespace detail {

// Kernels take the format as its id: nvcc does not compile those with structs as parameters.
template <format_id Format, int Warps, int BlocksPerSm, int RowBlocks>
KVARN_KERNEL void __launch_bounds__(32 * Warps, BlocksPerSm)
    attention_kernel(const __grid_constant__ attention_parameters p) {
  extern __shared__ float4 shared[];
  __shared__ attention_barriers<Warps> barriers;
  attention_block<format_of_id(Format), Warps, RowBlocks>(p, reinterpret_cast<std::byte*>(shared),
                                                          barriers)
      .run();
}

// How a call is cut, and how much memory it takes.
struct attention_plan {
  attention_parameters parameters;
  int shared_bytes;
  std::size_t workspace_bytes;
};

// The kernel for up to four rows, or for more.
template <cache_format Format, attention_policy Policy>
auto kernel_for(bool has_more_rows) {
  return has_more_rows
             ? attention_kernel<Format.id(), Policy.warps, Policy.blocks_per_sm, Policy.row_blocks>
             : attention_kernel<Format.id(), Policy.warps, Policy.blocks_per_sm, 1>;
}

template <cache_format Format, attention_policy Policy>
attention_plan plan_attention(const attention_arguments& a) {
  using layout = attention_layout<Format>;
  attention_plan plan{};
  attention_parameters& p = plan.parameters;
  p.arguments = a;
  p.by_heads = divisor::of(a.heads);
  p.by_kv_heads = divisor::of(a.kv_heads);
  p.page_bytes = static_cast<std::uint32_t>(Format.page_bytes(a.kv_heads));
  const int rows = a.max_tokens * a.heads;
  p.block_rows = rows > 4 ? 4 * Policy.row_blocks : 4;
  const int chunks =
      (std::max)(sequence_chunks::of(a.max_sink, a.max_pages, a.max_tail).count(), 1);
  const int heads = a.count * a.kv_heads * blocks_of(rows, p.block_rows);
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  int splits = a.splits;
  if (splits <= 0) {
    const int one_each = (std::max)(1, multiprocessors / (std::max)(heads, 1));
    splits = (std::max)(1, Policy.blocks_per_sm * multiprocessors / (std::max)(heads, 1));
    // Unless each block has eight chunks, one a warp, fewer parts to join are worth more, where
    // they still fill the device.
    if (chunks < 8 * splits && std::int64_t{8} * heads * one_each >= 7 * multiprocessors)
      splits = one_each;
  }
  p.splits = (std::min)({splits, chunks, sequence_chunks::most_splits});
  p.partials = (std::max)((std::min)(chunks, sequence_chunks::longest_uneven_run * p.splits),
                          blocks_of(chunks, chunks_per_section));
  p.by_splits = divisor::of(p.splits);
  // All at once, since not every multiprocessor may be of use to a cluster: with 256 blocks in
  // clusters of four, two on each of 132, some wait for others to end.
  p.joins = p.splits == 1 ||
            (p.splits <= max_cluster && runs_newer_code() &&
             std::int64_t{2} * heads * p.splits <= Policy.blocks_per_sm * multiprocessors);

  int used = Policy.warps * layout::slot_bytes;
  const auto take = [&](std::size_t floats) {
    const int at = used;
    used += static_cast<int>((floats + 3) / 4 * 16);
    return at;
  };
  p.query = take(static_cast<std::size_t>(p.block_rows * layout::query_floats));
  p.sums = take(static_cast<std::size_t>(2 * p.block_rows * layout::value_dim));
  p.states = take(static_cast<std::size_t>(p.block_rows * Policy.warps));
  const std::size_t vectors =
      token_buffer_floats((std::max)(layout::key_dim, layout::value_dim), p.block_rows);
  p.parts = take((std::max)(vectors, std::size_t{layout::part_floats}));
  p.lag = 0;
  constexpr int reserved = 1024 + static_cast<int>(sizeof(attention_barriers<Policy.warps>));
  const int most =
      device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / Policy.blocks_per_sm -
      reserved;
  if (used + 4 * layout::part_floats <= most) {
    take(layout::part_floats);
    p.lag = 1;
  }
  if (p.joins && p.splits > 1) {
    while (p.splits << p.row_shift < p.block_rows) ++p.row_shift;
    const int row_bytes = static_cast<int>(sizeof(float)) * layout::stored_stride;
    p.near_partials =
        (std::min)(p.partials, (std::max)(most - used, 0) / (row_bytes << p.row_shift));
    p.stored =
        take(static_cast<std::size_t>((p.near_partials << p.row_shift) * layout::stored_stride));
  }
  plan.shared_bytes = used;
  if (p.splits > 1 && p.partials > p.near_partials)
    plan.workspace_bytes = sizeof(float) * static_cast<std::size_t>(heads) *
                           static_cast<std::size_t>(p.partials * p.block_rows) *
                           layout::stored_stride;
  return plan;
}

inline constexpr int max_rows = 8 * max_grid + 8;  // of queries, in blocks of at most 8

// What a call is cut by.
inline launch_status check_counts(const attention_arguments& a) {
  if (a.count < 0 || a.kv_heads < 1 || a.heads < 1 || a.max_tokens < 1)
    return refuse("count is " + std::to_string(a.count) + ", kv_heads " +
                  std::to_string(a.kv_heads) + ", heads " + std::to_string(a.heads) +
                  ", max_tokens " + std::to_string(a.max_tokens) +
                  "; none may be negative, the last three must be at least 1");
  if (a.count > max_grid)
    return refuse("count is " + std::to_string(a.count) + "; it must be at most " +
                  std::to_string(max_grid));
  const std::int64_t rows = std::int64_t{a.max_tokens} * a.heads;
  if (rows > max_rows || rows * a.kv_heads > max_rows)
    return refuse("kv_heads is " + std::to_string(a.kv_heads) + ", heads x max_tokens " +
                  std::to_string(rows) + "; their product must be at most " +
                  std::to_string(max_rows));
  if (launch_status s = check_product("count", a.count, "kv_heads x heads x max_tokens",
                                      static_cast<int>(rows * a.kv_heads));
      !s.ok())
    return s;
  for (const auto& [name, bound] :
       {std::pair{"max_sink", a.max_sink}, {"max_pages", a.max_pages}, {"max_tail", a.max_tail}})
    if (bound < 0 || bound > max_distance)
      return refuse(std::string(name) + " is " + std::to_string(bound) + "; allowed are 0 to " +
                    std::to_string(max_distance));
  return {};
}

inline launch_status check_attention(const attention_arguments& a) {
  if (launch_status s = check_counts(a); !s.ok()) return s;
  if (!(a.softmax_scale > 0.0f))
    return refuse("softmax_scale is " + std::to_string(a.softmax_scale) + "; it must be above 0");
  if (a.count > 0 && a.sequences == nullptr) return refuse("sequences is null");
  if (a.max_pages > 0 && a.pages == nullptr) return refuse("pages is null");
  const auto is_vector = [&](const token_strides& s) {
    return s.channel == 1 && (s.token * element_bytes(a.exact_type)) % 16 == 0 &&
           (s.head * element_bytes(a.exact_type)) % 16 == 0;
  };
  if ((a.max_sink > 0 || a.max_tail > 0) &&
      !(is_vector(a.key_strides) && is_vector(a.value_strides)))
    return refuse("strides of exact rows must be multiples of 16 bytes, that of channels 1");
  return {};
}

}  // namespace detail

template <cache_format Format, attention_policy Policy>
std::size_t attention_workspace_bytes(const attention_arguments& arguments) {
  if (!detail::check_counts(arguments).ok()) return 0;  // refused by attend
  return detail::plan_attention<Format, Policy>(arguments).workspace_bytes;
}

template <cache_format Format, attention_policy Policy>
launch_status attend(const attention_arguments& arguments, cudaStream_t stream) {
  static_assert(Policy.warps == 8 || (Policy.warps == 4 && Policy.row_blocks == 1));
  static_assert(Policy.row_blocks == 1 || Policy.row_blocks == 2);
  static_assert(Format.key_head_dim <= 256 && Format.value_head_dim <= 256,
                "attention is there for head dimensions up to 256");
  const attention_arguments& a = arguments;
  if (launch_status s = detail::check_attention(a); !s.ok() || a.count == 0) return s;
  detail::attention_plan plan = detail::plan_attention<Format, Policy>(a);
  detail::attention_parameters& p = plan.parameters;
  if (plan.workspace_bytes > 0 && a.workspace == nullptr)
    return detail::refuse("workspace is null; this call needs attention_workspace_bytes()");
  p.scale = a.softmax_scale * 1.44269504f *
            detail::rotation_unit(Format.key_head_dim, !a.queries_rotated);
  p.out_scale = detail::rotation_unit(Format.value_head_dim, a.rotate_output);
  p.cap.cap = a.logit_soft_cap * 1.44269504f;
  p.cap.slope = a.logit_soft_cap == 0.0f ? 0.0f : 2.0f / a.logit_soft_cap;
  p.window = static_cast<int>(a.window <= 0 ? max_distance : (std::min)(a.window, max_distance));
  const auto kernel = detail::kernel_for<Format, Policy>(p.block_rows > 4);
  const int rows = a.max_tokens * a.heads;
  const int row_blocks = a.kv_heads * detail::blocks_of(rows, p.block_rows);
  if (row_blocks > max_grid)
    return detail::refuse("kv_heads is " + std::to_string(a.kv_heads) + ", heads x max_tokens " +
                          std::to_string(rows) + ": " + std::to_string(row_blocks) +
                          " blocks of queries; allowed are " + std::to_string(max_grid));
  if (launch_status s =
          detail::allow_shared_memory(kernel, static_cast<std::size_t>(plan.shared_bytes));
      !s.ok())
    return s;
  const dim3 grid(static_cast<unsigned>(p.splits), static_cast<unsigned>(row_blocks),
                  static_cast<unsigned>(a.count));
  const launch_status s =
      detail::launch(kernel, grid, 32 * Policy.warps, static_cast<std::size_t>(plan.shared_bytes),
                     stream, p, p.joins ? p.splits : 1);
  if (!s.ok() || p.joins) return s;
  return detail::launch(detail::combine_kernel<Format.id()>,
                        dim3(static_cast<unsigned>((std::min)(rows, p.block_rows)), grid.y, grid.z),
                        detail::row_threads<Format.value_head_dim>,
                        sizeof(float) * detail::token_buffer_floats(Format.value_head_dim, 16),
                        stream, p);
}

}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
