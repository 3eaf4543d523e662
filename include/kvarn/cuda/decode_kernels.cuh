// The kernels that decode tiles: in registers, or through shared memory.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "packed.cuh"
#include "rotation.cuh"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

struct decode_parameters {
  decode_arguments arguments;
  tile_layout layout;
  float unit;  // of the rotation

  KVARN_INLINE int tiles() const { return arguments.count * arguments.kv_heads; }
  __device__ int head(int tile) const { return tile % arguments.kv_heads; }
  __device__ decode_group group(int tile) const {
    return arguments.groups[tile / arguments.kv_heads];
  }
  // Starts to copy the description of a tile's group, or its record, to shared memory; nothing
  // behind the last tile, no record of an empty group.
  __device__ void copy_group(int tile, decode_group* shared) const {
    constexpr int words = sizeof(decode_group) / 8;
    const int i = static_cast<int>(threadIdx.x);
    if (i >= words || tile >= tiles()) return;
    copy_8_bytes(
        reinterpret_cast<std::uint64_t*>(shared) + i,
        reinterpret_cast<const std::uint64_t*>(arguments.groups + tile / arguments.kv_heads) + i);
  }
  __device__ void copy_record(const decode_group& group, int tile, float4* shared) const {
    const std::size_t offset = layout.kind == tile_kind::key
                                   ? arguments.format.key_offset(head(tile))
                                   : arguments.format.value_offset(head(tile));
    if (tile >= tiles() || group.count < 1) return;
    const auto* const record = reinterpret_cast<const float4*>(group.page + offset);
    const int quads = static_cast<int>(layout.record_bytes() / 16);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < quads; i += block_threads)
      copy_16_bytes(shared + shared_record_place(layout, i), record + i);
  }
};

// Writes channels 8 (Lanes k + part) + i = v[k][i] of a token, rounded to its type, from element
// `place` on.
template <element_type Type, int Lanes, int Runs>
__device__ void store_channels(const decode_arguments& a, void* tokens, std::int64_t place,
                               bool is_aligned, int part, const float (&v)[Runs][8]) {
#pragma unroll
  for (int k = 0; k < Runs; ++k) {
    const std::int64_t first = place + 8 * (Lanes * k + part) * a.strides.channel;
    if constexpr (Type == element_type::float32) {
      auto* const out = static_cast<float*>(tokens) + first;
      if (is_aligned) {
        reinterpret_cast<float4*>(out)[0] = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
        reinterpret_cast<float4*>(out)[1] = make_float4(v[k][4], v[k][5], v[k][6], v[k][7]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[i * a.strides.channel] = v[k][i];
      }
    } else {
      std::uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = round_pair(Type, v[k][2 * i], v[k][2 * i + 1]);
      auto* const out = static_cast<std::uint16_t*>(tokens) + first;
      if (is_aligned) {
        *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          out[i * a.strides.channel] = static_cast<std::uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
      }
    }
  }
}

// Whether runs of eight channels can be stored 16 bytes at a time.
__device__ inline bool stores_are_aligned(const decode_arguments& a, const void* tokens) {
  const auto bytes = static_cast<std::uint64_t>(element_bytes(a.type));
  const auto steps = static_cast<std::uint64_t>(a.strides.token | a.strides.head);
  return a.strides.channel == 1 &&
         (reinterpret_cast<std::uint64_t>(tokens) | steps * bytes) % 16 == 0;
}

// Head dimensions 64, 128 and 256: neighbouring lanes hold a token in registers, 32 channels each
// as rotate_in_lanes has them. Blocks take one tile after another and copy the next one meanwhile.
inline constexpr int decode_blocks_per_multiprocessor = 3;

template <int Dim, tile_kind Kind, int Bits>
KVARN_KERNEL void __launch_bounds__(block_threads, decode_blocks_per_multiprocessor)
    decode_lanes_kernel(const __grid_constant__ decode_parameters p) {
  extern __shared__ float4 shared[];
  constexpr bool is_key = Kind == tile_kind::key;
  constexpr int lanes = Dim / 32;
  constexpr int runs = 4;  // of eight channels
  constexpr int tokens_at_once = block_threads / lanes;
  const decode_arguments& a = p.arguments;
  const int thread = static_cast<int>(threadIdx.x);
  const int part = thread % lanes;
  const int record_quads = shared_record_bytes(p.layout) / 16;
  float4* const records = shared;  // by turns
  // Of each channel: step and zero of a key, scale of a value.
  auto* const factors = reinterpret_cast<float*>(records + 2 * record_quads);
  auto* const groups = reinterpret_cast<decode_group*>(factors + 2 * Dim);  // four, by turns
  const auto factor = [&](int which, int run, float(&out)[8]) {
    const auto* const quad =
        reinterpret_cast<const float4*>(factors + which * Dim + 8 * (lanes * run + part));
    const float4 low = quad[0];
    const float4 high = quad[1];
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
  };

  const int stride = static_cast<int>(gridDim.x);
  const int first = static_cast<int>(blockIdx.x);
  p.copy_group(first, groups);
  p.copy_group(first + stride, groups + 1);
  p.copy_record(p.group(first), first, records);
  for (int n = 0, tile = first; tile < p.tiles(); ++n, tile += stride) {
    wait_for_copies();
    __syncthreads();
    p.copy_group(tile + 2 * stride, groups + ((n + 2) & 3));
    p.copy_record(groups[(n + 1) & 3], tile + stride, records + ((n + 1) & 1) * record_quads);
    const packed_record<Bits> record(
        reinterpret_cast<const std::byte*>(records + (n & 1) * record_quads), p.layout);
    for (int c = thread; c < Dim; c += block_threads) {
      factors[c] = is_key ? record.step(c) : record.scale(c);
      if (is_key) factors[Dim + c] = record.zero(c);
    }
    __syncthreads();

    for (int first_token = 0; first_token < p.layout.group; first_token += tokens_at_once) {
      const int token = first_token + thread / lanes;
      const int readable = min(token, p.layout.group - 1);
      float v[runs][8];
      if constexpr (is_key) {
        const float scale = record.scale(readable);
#pragma unroll
        for (int k = 0; k < runs; ++k) {
          const int eight = lanes * k + part;
          const code_run<Bits> codes = record.codes(readable, eight / 2).half(eight % 2);
          float step[8];
          float zero[8];
          factor(0, k, step);
          factor(1, k, zero);
#pragma unroll
          for (int i = 0; i < 8; ++i)
            v[k][i] = __fmul_rn(std::fma(codes.value(i), step[i], zero[i]), scale);
        }
      } else {
        const float step = record.step(readable);
        const float zero = record.zero(readable);
#pragma unroll
        for (int k = 0; k < runs; ++k) {
          float scale[8];
          factor(0, k, scale);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float code =
                record.codes(lanes * k + part, i, readable >> 4).value(readable & 15);
            v[k][i] = __fmul_rn(std::fma(code, step, zero), scale[i]);
          }
        }
      }
      if (a.rotate_back) rotate_in_lanes<lanes>(v, part, p.unit);
      if (const decode_group& group = groups[n & 3]; token < group.count) {
        const bool is_aligned = stores_are_aligned(a, group.tokens);
        const std::int64_t place = token * a.strides.token + p.head(tile) * a.strides.head;
        switch (a.type) {
          case element_type::float16:
            store_channels<element_type::float16, lanes>(a, group.tokens, place, is_aligned, part,
                                                         v);
            break;
          case element_type::bfloat16:
            store_channels<element_type::bfloat16, lanes>(a, group.tokens, place, is_aligned, part,
                                                          v);
            break;
          case element_type::float32:
            store_channels<element_type::float32, lanes>(a, group.tokens, place, is_aligned, part,
                                                         v);
            break;
        }
      }
    }
  }
}

// The other head dimensions, one block a tile; the rotation goes through shared memory.
template <tile_kind Kind, int Bits>
KVARN_KERNEL void __launch_bounds__(block_threads)
    decode_kernel(const __grid_constant__ decode_parameters p) {
  extern __shared__ float4 shared[];
  const decode_arguments& a = p.arguments;
  const int tile_index = static_cast<int>(blockIdx.x);
  const decode_group group = p.group(tile_index);
  const tile_layout& layout = p.layout;
  const int dim = layout.head_dim;
  const int batch = vectors_at_once(dim);
  const int runs = dim / 16;
  const int block = dim / hadamard_core(dim);
  const int thread = static_cast<int>(threadIdx.x);

  auto* const record = reinterpret_cast<std::byte*>(shared);
  auto* const scales = reinterpret_cast<float*>(record + shared_record_bytes(layout));
  const token_buffer<0> buffer{scales + layout.rows(), batch, dim};
  p.copy_record(group, tile_index, shared);
  wait_for_copies();
  __syncthreads();
  const packed_record<Bits> tile(record, layout);
  for (int r = thread; r < layout.rows(); r += block_threads) scales[r] = tile.scale(r);
  __syncthreads();

  for (int first = 0; first < group.count; first += batch) {
    float step[16];
    float zero[16];
    int columns = -1;  // run of columns that step and zero are of
    for (int unit = thread; unit < batch * runs; unit += block_threads) {
      // Neighbouring threads take neighbouring tokens of values, whose codes share a word.
      const int token = Kind == tile_kind::key ? unit / runs : unit % batch;
      const int run = Kind == tile_kind::key ? unit % runs : unit / batch;
      float v[16];
      if constexpr (Kind == tile_kind::key) {
        if (run != columns) {
          columns = run;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            step[i] = tile.step(16 * run + i);
            zero[i] = tile.zero(16 * run + i);
          }
        }
        const code_run<Bits> codes = tile.codes(first + token, run);
        const float scale = scales[first + token];
#pragma unroll
        for (int i = 0; i < 16; ++i)
          v[i] = __fmul_rn(std::fma(codes.value(i), step[i], zero[i]), scale);
      } else {
        const int c = first + token;
        if (c != columns) {
          columns = c;
          step[0] = tile.step(c);
          zero[0] = tile.zero(c);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int r = 16 * run + i;
          const float code = tile.codes(r, c >> 4).value(c & 15);
          v[i] = __fmul_rn(std::fma(code, step[0], zero[0]), scales[r]);
        }
      }
      if (a.rotate_back) rotate_neighbours(v, block);
      float* const out = buffer.data + (run >> 2) * buffer.plane() + 68 * token + (run & 3);
#pragma unroll
      for (int i = 0; i < 16; ++i) out[4 * i] = v[i];
    }
    if (a.rotate_back)
      rotate_cores(buffer, batch);
    else
      __syncthreads();

    const bool strided = a.rotate_back && hadamard_core(dim) == 1;
    const int l = thread & 15;
    constexpr int max_runs = max_head_dim / 16;
    for (int t = thread >> 4; t < batch; t += 16) {
      float v[max_runs];
      read_strided(buffer, t, l, v);
      if (strided) rotate_strided(v, runs);
      if (a.rotate_back) {
#pragma unroll
        for (int j = 0; j < max_runs; ++j) v[j] = __fmul_rn(v[j], p.unit);
      }
      if (first + t >= group.count) continue;
      const std::int64_t place =
          (first + t) * a.strides.token + p.head(tile_index) * a.strides.head;
#pragma unroll
      for (int j = 0; j < max_runs; ++j) {
        if (j >= runs) break;
        store_element(group.tokens, a.type, place + (l + 16 * j) * a.strides.channel, v[j]);
      }
    }
    __syncthreads();
  }
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
