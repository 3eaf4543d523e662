// The Hadamard transform of a batch of head vectors by one block of threads.
//
// Sums are those of hadamard_unnormalized (docs/arithmetic.md, section 3), in three stages where
// the vectors go through shared memory:
//   1. a thread has 16 neighbouring channels: half = 1, 2, 4, 8;
//   2. Paley's matrices across blocks, where the dimension has such a core;
//   3. a thread has every 16th channel: half = 16, 32, ...
#pragma once

#include <cmath>
#include <cstddef>

#include "../codec/hadamard.hpp"
#include "device.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

inline constexpr int block_threads = 256;

// Head vectors that a block takes through shared memory at a time where not all fit, a multiple of
// 16.
KVARN_INLINE constexpr int vectors_at_once(int dim) { return dim <= 128 ? 64 : 16; }

// The vectors between the stages. Channel l + 16 j of token t is element
//   plane(j / 4) + 68 t + 4 l + j % 4,
// so that stage 1 writes and stage 3 reads without bank conflicts.
template <int Dim>
struct token_buffer {
  float* data;
  int tokens;    // that there is room for, a multiple of 16
  int dim_ = 0;  // where Dim is 0

  __device__ int dim() const { return Dim != 0 ? Dim : dim_; }
  __device__ int plane() const { return 68 * tokens + 16; }
  __device__ float* at(int token, int channel) const {
    return data + (channel >> 6) * plane() + 68 * token + 4 * (channel & 15) + ((channel >> 4) & 3);
  }
};

KVARN_INLINE constexpr std::size_t token_buffer_floats(int dim, int tokens) {
  return static_cast<std::size_t>((dim + 63) / 64) * static_cast<std::size_t>(68 * tokens + 16);
}

// Stage 1, or the beginning of it, of channels N k .. N k + N - 1. `block`: dim /
// hadamard_core(dim).
template <int N>
__device__ void rotate_neighbours(float (&v)[N], int block) {
#pragma unroll
  for (int half = 1; half < N; half *= 2) {
    if (half >= block) break;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if ((i & half) == 0) {
        const float a = v[i];
        const float b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
  }
}

// Stage 3 of channels l, l + 16, ..., of which there are `count`.
template <int N>
__device__ void rotate_strided(float (&v)[N], int count) {
#pragma unroll
  for (int half = 1; half < N; half *= 2) {
    if (half >= count) break;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if ((i & half) == 0 && i + half < N && i + half < count) {
        const float a = v[i];
        const float b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
  }
}

// All stages for a power of two in registers, times `unit`: of one token, lane `part` of `Lanes`
// neighbouring ones has channels 8 (Lanes k + part) + i = v[k][i]. By whole warps.
template <int Lanes, int Runs>
__device__ void rotate_in_lanes(float (&v)[Runs][8], int part, float unit) {
#pragma unroll
  for (int k = 0; k < Runs; ++k) rotate_neighbours(v[k], 8);
#pragma unroll
  for (int mask = 1; mask < Lanes; mask *= 2) {
    const float sign = (part & mask) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < Runs; ++k)
#pragma unroll
      for (int i = 0; i < 8; ++i)  // a + b or a - b
        v[k][i] = std::fma(sign, v[k][i], __shfl_xor_sync(all_lanes, v[k][i], mask));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float column[Runs];
#pragma unroll
    for (int k = 0; k < Runs; ++k) column[k] = v[k][i];
    rotate_strided(column, Runs);
#pragma unroll
    for (int k = 0; k < Runs; ++k) v[k][i] = __fmul_rn(column[k], unit);
  }
}

// Paley's matrix of order 2 (Q + 1) over channels i, i + block, ... of one token.
template <int Q, int Dim>
__device__ void rotate_core(const token_buffer<Dim>& buffer, int token, int i, int block) {
  constexpr auto c = kvarn::detail::conference_matrix<Q>();
  float sum[Q + 1];
  float difference[Q + 1];
#pragma unroll
  for (int j = 0; j <= Q; ++j) {
    const float a = *buffer.at(token, i + 2 * j * block);
    const float b = *buffer.at(token, i + (2 * j + 1) * block);
    sum[j] = a + b;
    difference[j] = a - b;
  }
#pragma unroll
  for (int j = 0; j <= Q; ++j) {
    float even = difference[j];
    float odd = -sum[j];
#pragma unroll
    for (int k = 0; k <= Q; ++k) {
      if (c.sign[j][k] > 0) {
        even = even + sum[k];
        odd = odd + difference[k];
      } else if (c.sign[j][k] < 0) {
        even = even - sum[k];
        odd = odd - difference[k];
      }
    }
    *buffer.at(token, i + 2 * j * block) = even;
    *buffer.at(token, i + (2 * j + 1) * block) = odd;
  }
}

// Stage 2 of `tokens` vectors. Synchronises the block before and after, also where there is nothing
// to do.
template <int Threads = block_threads, int Dim>
__device__ void rotate_cores(const token_buffer<Dim>& buffer, int tokens) {
  const int dim = buffer.dim();
  const int core = hadamard_core(dim);
  __syncthreads();
  if (core == 1) return;
  const int block = dim / core;
  for (int task = static_cast<int>(threadIdx.x); task < tokens * block; task += Threads) {
    const int token = task / block;
    const int i = task % block;
    if (core == 12) rotate_core<5>(buffer, token, i, block);
    if (core == 20) rotate_core<9>(buffer, token, i, block);
    if (core == 28) rotate_core<13>(buffer, token, i, block);
  }
  __syncthreads();
}

// Channels l, l + 16, ... of one token; N at least dim / 16.
template <int N, int Dim>
__device__ void read_strided(const token_buffer<Dim>& buffer, int token, int l, float (&v)[N]) {
  const int count = buffer.dim() / 16;
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    if (j >= count) break;
    const float4 quad = *reinterpret_cast<const float4*>(buffer.data + (j >> 2) * buffer.plane() +
                                                         68 * token + 4 * l);
    v[j] = quad.x;
    if (j + 1 < N) v[j + 1] = quad.y;
    if (j + 2 < N) v[j + 2] = quad.z;
    if (j + 3 < N) v[j + 3] = quad.w;
  }
}

// 1/sqrt(dim) as hadamard_norm has it, computed by the host.
inline float rotation_unit(int dim, bool rotate) { return rotate ? hadamard_norm(dim) : 1.0f; }

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
