// Second moments of queries and their factors, for the encoder query_aware.
//
// The numbers are those of kvarn::query_moment and kvarn::query_factor, bit for bit.
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

// Adds q q^T of every query to the upper triangle of its KV head's sums, token by token, within a
// token head by head. Entries below the diagonal are left as they are.
launch_status observe(const observe_arguments& arguments, cudaStream_t stream);

// U of C + lambda I = (U + I) D (U + I)^T for every C. Every entry is written, 0 on and below the
// diagonal.
launch_status factorize(const factor_arguments& arguments, cudaStream_t stream);

// implementation

namespace detail {

struct observe_parameters {
  observe_arguments arguments;
  float unit;  // of the rotation
  int batch;   // queries at a time, a multiple of 16
};

// A block adds 64 x 64 entries: blockIdx.y counts such blocks of the upper triangle. A thread has
// 4 x 4 of them and takes the queries in order.
template <int Threads>
KVARN_KERNEL void __launch_bounds__(Threads)
    observe_kernel(const __grid_constant__ observe_parameters p) {
  extern __shared__ float4 shared[];
  const observe_arguments& a = p.arguments;
  const int dim = a.head_dim;
  const int padded = (dim + 63) / 64 * 64;
  const int kv_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.kv_heads));
  const observed_queries work = a.sequences[blockIdx.x / static_cast<unsigned>(a.kv_heads)];
  int block_row = 0;
  int block_col = static_cast<int>(blockIdx.y);
  for (int left = padded / 64; block_col >= left; --left) {
    block_col -= left;
    ++block_row;
  }
  block_col += block_row;

  const token_buffer<0> buffer{reinterpret_cast<float*>(shared), p.batch, dim};
  float* const rotated = buffer.data + token_buffer_floats(dim, p.batch);  // [batch][padded]
  for (int i = static_cast<int>(threadIdx.x); i < p.batch * padded; i += block_threads)
    rotated[i] = 0;

  const int row = 64 * block_row + 4 * (static_cast<int>(threadIdx.x) >> 4);
  const int col = 64 * block_col + 4 * (static_cast<int>(threadIdx.x) & 15);
  float* const out = work.sums + std::int64_t{kv_head} * dim * dim;
  float sum[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row + i <= col + j && col + j < dim) sum[i][j] = out[(row + i) * dim + col + j];

  const bool strided = a.rotate && hadamard_core(dim) == 1;
  const int l = static_cast<int>(threadIdx.x) & 15;
  const int vectors = work.count * a.heads;
  const token_source source{work.queries, a.type, a.heads,
                            std::int64_t{kv_head} * a.heads * a.strides.head, a.strides};
  for (int first = 0; first < vectors; first += p.batch) {
    const int count = min(p.batch, vectors - first);
    replaced_values replaced;
    load_tokens<2>(source, first, count, a.rotate, buffer, replaced);
    for (int token = static_cast<int>(threadIdx.x) >> 4; token < count; token += 16) {
      float v[max_head_dim / 16];
      read_strided(buffer, token, l, v);
      if (strided) rotate_strided(v, dim / 16);
#pragma unroll
      for (int j = 0; j < max_head_dim / 16; ++j) {
        if (j >= dim / 16) break;
        rotated[token * padded + l + 16 * j] = a.rotate ? __fmul_rn(v[j], p.unit) : v[j];
      }
    }
    __syncthreads();
#pragma unroll 4
    for (int t = 0; t < count; ++t) {
      const float4 r = *reinterpret_cast<const float4*>(rotated + t * padded + row);
      const float4 c = *reinterpret_cast<const float4*>(rotated + t * padded + col);
      const float rows[4] = {r.x, r.y, r.z, r.w};
      const float cols[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = std::fma(rows[i], cols[j], sum[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row + i <= col + j && col + j < dim) out[(row + i) * dim + col + j] = sum[i][j];
}

// lambda of one matrix, by every warp on its own.
__device__ inline float damping_of(const factor_arguments& a, const float* sums) {
  float trace = 0.0f;
  for (int i = lane_index() & 15; i < a.head_dim; i += 16) trace = trace + sums[i * a.head_dim + i];
#pragma unroll
  for (int half = 8; half > 0; half /= 2) trace = trace + __shfl_xor_sync(all_lanes, trace, half);
  return std::fma(trace, a.damping / static_cast<float>(a.head_dim), 1e-20f);
}

// One matrix per block, head_dim up to 128, in registers: thread (y, x) has entries (y + 16 i,
// x + 16 j). Entries below the diagonal take part and mean nothing.
template <int Steps>
KVARN_KERNEL void __launch_bounds__(block_threads)
    factorize_in_registers(const __grid_constant__ factor_arguments a) {
  constexpr int steps = Steps;
  __shared__ float column[2][16 * steps];  // k, zeros from its diagonal on
  __shared__ float pivot[2];
  const int n = a.head_dim;
  const float* const sums = a.sums + std::int64_t{blockIdx.x} * n * n;
  float* const out = a.factors + std::int64_t{blockIdx.x} * n * n;
  const int x = static_cast<int>(threadIdx.x) & 15;
  const int y = static_cast<int>(threadIdx.x) >> 4;
  const float lambda = damping_of(a, sums);
  float entry[steps][steps];
#pragma unroll
  for (int i = 0; i < steps; ++i)
#pragma unroll
    for (int j = 0; j < steps; ++j) {
      const int row = y + 16 * i;
      const int col = x + 16 * j;
      entry[i][j] = row <= col && col < n ? sums[row * n + col] : 0.0f;
      if (row == col) entry[i][j] = entry[i][j] + lambda;
    }
  __syncthreads();  // of sums that are the output
#pragma unroll
  for (int jk = steps - 1; jk >= 0; --jk) {
    if (16 * jk >= n) continue;
#pragma unroll 1
    for (int xk = 15; xk >= 0; --xk) {
      const int k = xk + 16 * jk;
      float* const now = column[k & 1];
      if (x == xk) {
#pragma unroll
        for (int i = 0; i <= jk; ++i) {
          const int row = y + 16 * i;
          now[row] = row < k ? entry[i][jk] : 0.0f;
          if (row == k) pivot[k & 1] = entry[i][jk];
        }
      }
      __syncthreads();
      const float inverse_pivot = 1.0f / pivot[k & 1];
      float u[steps];
      float c[steps];
#pragma unroll
      for (int i = 0; i <= jk; ++i) {
        u[i] = __fmul_rn(now[y + 16 * i], inverse_pivot);
        c[i] = now[x + 16 * i];
      }
#pragma unroll
      for (int i = 0; i <= jk; ++i) {
#pragma unroll
        for (int j = i; j <= jk; ++j) entry[i][j] = std::fma(-u[i], c[j], entry[i][j]);
        if (x == xk && y + 16 * i < k) entry[i][jk] = u[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < steps; ++i)
#pragma unroll
    for (int j = 0; j < steps; ++j) {
      const int row = y + 16 * i;
      const int col = x + 16 * j;
      if (row < n && col < n) out[row * n + col] = row < col ? entry[i][j] : 0.0f;
    }
}

inline constexpr int factor_threads = 512;

// One matrix per block, any head_dim, in place of the output.
template <int Threads>
KVARN_KERNEL void __launch_bounds__(Threads)
    factorize_in_memory(const __grid_constant__ factor_arguments a) {
  __shared__ float column[max_head_dim];
  const int n = a.head_dim;
  const float* const sums = a.sums + std::int64_t{blockIdx.x} * n * n;
  float* const matrix = a.factors + std::int64_t{blockIdx.x} * n * n;
  const int thread = static_cast<int>(threadIdx.x);
  const float lambda = damping_of(a, sums);
  __syncthreads();  // of sums that are the output
  for (int e = thread; e < n * n; e += Threads) {
    const int i = e / n;
    const int j = e % n;
    matrix[e] = j < i ? 0.0f : i == j ? sums[e] + lambda : sums[e];
  }
  for (int k = n - 1; k > 0; --k) {
    __syncthreads();
    for (int i = thread; i < k; i += Threads) column[i] = matrix[i * n + k];
    const float inverse_pivot = 1.0f / matrix[k * n + k];
    __syncthreads();
    for (int i = thread >> 5; i < k; i += Threads / 32) {
      const float u = __fmul_rn(column[i], inverse_pivot);
      for (int j = i + lane_index(); j < k; j += 32)
        matrix[i * n + j] = std::fma(-u, column[j], matrix[i * n + j]);
      if (lane_index() == 0) matrix[i * n + k] = u;
    }
  }
  __syncthreads();
  for (int i = thread; i < n; i += Threads) matrix[i * n + i] = 0.0f;
}

inline launch_status check_head_dim(int head_dim) {
  const status s = validate(tile_layout{.head_dim = head_dim});
  return s.ok() ? launch_status{} : refuse(s.message());
}

}  // namespace detail

inline launch_status observe(const observe_arguments& arguments, cudaStream_t stream) {
  using detail::refuse;
  if (launch_status s = detail::check_head_dim(arguments.head_dim); !s.ok()) return s;
  if (arguments.kv_heads < 1 || arguments.heads < 1)
    return refuse("kv_heads is " + std::to_string(arguments.kv_heads) + " and heads " +
                  std::to_string(arguments.heads) + "; both must be at least 1");
  if (arguments.count < 1) return {};
  if (arguments.sequences == nullptr) return refuse("sequences is null");
  const int blocks = (arguments.head_dim + 63) / 64;
  const int batch = arguments.head_dim <= 128 ? 64 : 16;
  const std::size_t shared_bytes =
      sizeof(float) * (detail::token_buffer_floats(arguments.head_dim, batch) +
                       static_cast<std::size_t>(batch * 64 * blocks));
  if (const cudaError_t code = cudaFuncSetAttribute(detail::observe_kernel<detail::block_threads>,
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(shared_bytes));
      code != cudaSuccess)
    return detail::status_of(code);
  const dim3 grid(
      static_cast<unsigned>(arguments.count) * static_cast<unsigned>(arguments.kv_heads),
      static_cast<unsigned>(blocks * (blocks + 1) / 2));
  detail::observe_kernel<detail::block_threads>
      <<<grid, detail::block_threads, shared_bytes, stream>>>(
          {arguments, detail::rotation_unit(arguments.head_dim, arguments.rotate), batch});
  return detail::last_launch();
}

inline launch_status factorize(const factor_arguments& arguments, cudaStream_t stream) {
  if (launch_status s = detail::check_head_dim(arguments.head_dim); !s.ok()) return s;
  if (arguments.count < 1) return {};
  if (arguments.sums == nullptr || arguments.factors == nullptr)
    return detail::refuse("sums or factors is null");
  const auto blocks = static_cast<unsigned>(arguments.count);
  if (arguments.head_dim <= 128)
    detail::factorize_in_registers<8><<<blocks, detail::block_threads, 0, stream>>>(arguments);
  else
    detail::factorize_in_memory<detail::factor_threads>
        <<<blocks, detail::factor_threads, 0, stream>>>(arguments);
  return detail::last_launch();
}

}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
