// Exact rows of a cache: new tokens rotated into them, and rows moved to other memory.
//
// The numbers are those of kvarn::rotate_tokens, bit for bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {

// Rotates and rounds new tokens of many sequences into their exact rows, in one launch. Tokens must
// be aligned to their type. Not-finite numbers are replaced as sanitize in tokens.hpp says.
launch_status append(const append_arguments& arguments, cudaStream_t stream);

// Makes `count` copies, which stand in an array in device memory, in one launch.
launch_status copy_rows(const row_copy* copies, int count, cudaStream_t stream);

// implementation

namespace detail {

struct append_parameters {
  append_arguments arguments;
  float key_unit;  // of the rotations
  float value_unit;
};

inline constexpr int append_batch = 32;  // head vectors of a block
inline constexpr int copy_blocks = 16;   // of one copy

// One block: some head vectors of one sequence, keys (blockIdx.y 0) or values.
template <int Threads>
KVARN_KERNEL void __launch_bounds__(Threads)
    append_kernel(const __grid_constant__ append_parameters p) {
  extern __shared__ float4 shared[];
  wait_for_kernels_before();
  const append_arguments& a = p.arguments;
  const append_sequence& s = a.sequences[blockIdx.z];
  const bool is_key = blockIdx.y == 0;
  const int first = static_cast<int>(blockIdx.x) * append_batch;
  const int vectors = min(s.count * a.kv_heads - first, append_batch);
  if (vectors <= 0) return;
  const int dim = is_key ? a.key_head_dim : a.value_head_dim;
  const bool rotate = is_key ? a.rotate_keys : a.rotate_values;
  const token_strides& strides = is_key ? a.key_strides : a.value_strides;
  const token_source source{is_key ? a.keys : a.values, a.type, a.kv_heads, s.first * strides.token,
                            strides};
  const token_buffer<0> buffer{reinterpret_cast<float*>(shared), append_batch, dim};
  replaced_values replaced;
  load_tokens<1, Threads>(source, first, vectors, rotate, buffer, replaced);
  const float unit = is_key ? p.key_unit : p.value_unit;
  const int runs = dim / 16;
  const int l = static_cast<int>(threadIdx.x) & 15;
  constexpr int max_runs = max_head_dim / 16;
  for (int t = static_cast<int>(threadIdx.x) >> 4; t < vectors; t += Threads / 16) {
    float v[max_runs];
    read_strided(buffer, t, l, v);
    if (rotate && hadamard_core(dim) == 1) rotate_strided(v, runs);
    const int token = (first + t) / a.kv_heads;
    const bool is_sink = token < s.to_sink;
    void* const rows =
        is_key ? (is_sink ? s.sink_keys : s.tail_keys) : (is_sink ? s.sink_values : s.tail_values);
    const int behind = first + t - (is_sink ? 0 : s.to_sink * a.kv_heads);
    const std::int64_t place = std::int64_t{behind} * dim + l;
#pragma unroll
    for (int j = 0; j < max_runs; ++j)
      if (j < runs)
        store_element(rows, a.exact_type, place + 16 * j, rotate ? __fmul_rn(v[j], unit) : v[j]);
  }
  report(replaced, a.replaced);
}

template <int Threads>
KVARN_KERNEL void __launch_bounds__(Threads) copy_rows_kernel(const row_copy* copies) {
  const row_copy copy = copies[blockIdx.y];
  const auto count = static_cast<std::int64_t>(copy.bytes / sizeof(uint4));
  for (std::int64_t i = std::int64_t{blockIdx.x} * Threads + threadIdx.x; i < count;
       i += std::int64_t{copy_blocks} * Threads)
    static_cast<uint4*>(copy.to)[i] = static_cast<const uint4*>(copy.from)[i];
}

}  // namespace detail

inline launch_status append(const append_arguments& a, cudaStream_t stream) {
  const cache_format format{.key_head_dim = a.key_head_dim, .value_head_dim = a.value_head_dim};
  if (const status s = validate(format); !s.ok()) return detail::refuse(s.message());
  if (a.kv_heads < 1 || a.count < 0 || a.count > max_grid || a.max_tokens < 1)
    return detail::refuse("kv_heads is " + std::to_string(a.kv_heads) + ", count " +
                          std::to_string(a.count) + ", max_tokens " + std::to_string(a.max_tokens) +
                          "; count may be 0 to " + std::to_string(max_grid) +
                          ", the others must be at least 1");
  if (launch_status s = detail::check_product("max_tokens", a.max_tokens, "kv_heads", a.kv_heads);
      !s.ok() || a.count == 0)
    return s;
  if (a.sequences == nullptr) return detail::refuse("sequences is null");
  const detail::append_parameters p{a, detail::rotation_unit(a.key_head_dim, a.rotate_keys),
                                    detail::rotation_unit(a.value_head_dim, a.rotate_values)};
  const int dim = (std::max)(a.key_head_dim, a.value_head_dim);
  const std::size_t shared_bytes =
      sizeof(float) * detail::token_buffer_floats(dim, detail::append_batch);
  const auto kernel = detail::append_kernel<detail::block_threads>;
  if (launch_status s = detail::allow_shared_memory(kernel, shared_bytes); !s.ok()) return s;
  const auto vectors = static_cast<unsigned>(a.max_tokens * a.kv_heads);
  const dim3 grid((vectors + detail::append_batch - 1) / detail::append_batch, 2,
                  static_cast<unsigned>(a.count));
  return detail::launch(kernel, grid, detail::block_threads, shared_bytes, stream, p);
}

inline launch_status copy_rows(const row_copy* copies, int count, cudaStream_t stream) {
  if (count < 0 || count > max_grid)
    return detail::refuse("count is " + std::to_string(count) + "; allowed are 0 to " +
                          std::to_string(max_grid));
  if (count == 0) return {};
  detail::copy_rows_kernel<detail::block_threads>
      <<<dim3(detail::copy_blocks, static_cast<unsigned>(count)), detail::block_threads, 0,
         stream>>>(copies);
  return detail::last_launch();
}

}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
