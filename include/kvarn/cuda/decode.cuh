// Decoding of tiles to FP16, BF16 or FP32 tokens, rotated back or as stored: one block per tile.
//
// The numbers are those of kvarn::decode_tokens, bit for bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "packed.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {

// Decodes the key (or value) records of `count` groups, in one launch. FP16 and BF16 saturate.
// Tokens must be aligned to their type.
launch_status decode(const decode_arguments& arguments, cudaStream_t stream);

// implementation

namespace detail {

struct decode_parameters {
  decode_arguments arguments;
  tile_layout layout;
  float unit;  // of the rotation
  int batch;   // tokens at a time, a multiple of 16
};

// `Dim`: the head dimension, or 0 for any. `Bits`: per code.
template <int Dim, tile_kind Kind, int Bits>
KVARN_KERNEL void __launch_bounds__(block_threads)
    decode_kernel(const __grid_constant__ decode_parameters p) {
  extern __shared__ float4 shared[];
  const decode_arguments& a = p.arguments;
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.kv_heads));
  const decode_group group = a.groups[blockIdx.x / static_cast<unsigned>(a.kv_heads)];
  const tile_layout& layout = p.layout;
  const int dim = Dim != 0 ? Dim : layout.head_dim;
  const int runs = dim / 16;
  const int block = dim / hadamard_core(dim);
  const int thread = static_cast<int>(threadIdx.x);

  auto* const record = reinterpret_cast<std::byte*>(shared);
  auto* const scales = reinterpret_cast<float*>(record + layout.record_bytes());
  const token_buffer<Dim> buffer{scales + layout.rows(), p.batch, dim};
  const std::byte* const source =
      group.page +
      (Kind == tile_kind::key ? a.format.key_offset(head) : a.format.value_offset(head));
  for (int i = thread; i < static_cast<int>(layout.record_bytes() / 16); i += block_threads)
    reinterpret_cast<uint4*>(record)[i] = __ldg(reinterpret_cast<const uint4*>(source) + i);
  __syncthreads();
  const packed_record<Bits> tile(record, layout);
  for (int r = thread; r < layout.rows(); r += block_threads) scales[r] = tile.scale(r);
  __syncthreads();

  for (int first = 0; first < group.count; first += p.batch) {
    float step[16];
    float zero[16];
    int columns = -1;  // run of columns that step and zero are of
    for (int unit = thread; unit < p.batch * runs; unit += block_threads) {
      // Neighbouring threads take neighbouring tokens of values, whose codes share a word.
      const int token = Kind == tile_kind::key ? unit / runs : unit % p.batch;
      const int run = Kind == tile_kind::key ? unit % runs : unit / p.batch;
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
      rotate_cores(buffer, p.batch);
    else
      __syncthreads();

    const bool strided = a.rotate_back && hadamard_core(dim) == 1;
    const bool pairs = a.type != element_type::float32 && a.strides.channel == 1 &&
                       (a.strides.token | a.strides.head) % 2 == 0 &&
                       reinterpret_cast<std::uint64_t>(group.tokens) % 4 == 0;
    const int l = thread & 15;
    constexpr int max_runs = (Dim != 0 ? Dim : max_head_dim) / 16;
    for (int t = thread >> 4; t < p.batch; t += 16) {
      float v[max_runs];
      read_strided(buffer, t, l, v);
      if (strided) rotate_strided(v, runs);
      if (a.rotate_back) {
#pragma unroll
        for (int j = 0; j < max_runs; ++j) v[j] = __fmul_rn(v[j], p.unit);
      }
      const bool is_wanted = first + t < group.count;
      const std::int64_t place = (first + t) * a.strides.token + head * a.strides.head;
#pragma unroll
      for (int j = 0; j < max_runs; j += 2) {
        if (j >= runs) break;
        const bool has_second = j + 1 < max_runs && j + 1 < runs;
        const float second = has_second ? v[j + 1 < max_runs ? j + 1 : j] : 0.0f;
        if (pairs) {
          // Even lanes store both channels of run j, odd ones those of run j + 1.
          const std::uint32_t both = round_pair(a.type, v[j], second);
          const std::uint32_t other = __shfl_xor_sync(all_lanes, both, 1);
          const bool is_odd = (l & 1) != 0;
          const std::uint32_t word =
              is_odd ? __byte_perm(other, both, 0x7632) : __byte_perm(both, other, 0x5410);
          if (is_wanted && (!is_odd || has_second))
            *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(group.tokens) + place +
                                              (l & ~1) + 16 * (j + (l & 1))) = word;
        } else if (is_wanted) {
          store_element(group.tokens, a.type, place + (l + 16 * j) * a.strides.channel, v[j]);
          if (has_second)
            store_element(group.tokens, a.type, place + (l + 16 * j + 16) * a.strides.channel,
                          second);
        }
      }
    }
    __syncthreads();
  }
}

template <int Dim, tile_kind Kind, int Bits>
launch_status launch_decoding(decode_parameters p, cudaStream_t stream) {
  const auto kernel = decode_kernel<Dim, Kind, Bits>;
  p.batch = p.layout.head_dim <= 128 ? 64 : 16;
  const std::size_t shared_bytes =
      p.layout.record_bytes() + sizeof(float) * (static_cast<std::size_t>(p.layout.rows()) +
                                                 token_buffer_floats(p.layout.head_dim, p.batch));
  if (const cudaError_t code = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
      code != cudaSuccess)
    return status_of(code);
  const auto blocks =
      static_cast<unsigned>(p.arguments.count) * static_cast<unsigned>(p.arguments.kv_heads);
  kernel<<<blocks, block_threads, shared_bytes, stream>>>(p);
  return last_launch();
}

template <tile_kind Kind, int Bits>
launch_status launch_decoding(const decode_parameters& p, cudaStream_t stream) {
  return p.layout.head_dim == 128 ? launch_decoding<128, Kind, Bits>(p, stream)
                                  : launch_decoding<0, Kind, Bits>(p, stream);
}

template <tile_kind Kind>
launch_status launch_decoding(const decode_parameters& p, cudaStream_t stream) {
  return p.layout.bits == 2   ? launch_decoding<Kind, 2>(p, stream)
         : p.layout.bits == 3 ? launch_decoding<Kind, 3>(p, stream)
                              : launch_decoding<Kind, 4>(p, stream);
}

}  // namespace detail

inline launch_status decode(const decode_arguments& arguments, cudaStream_t stream) {
  if (launch_status checked = detail::check_groups(arguments); !checked.ok()) return checked;
  if (arguments.count == 0) return {};
  detail::decode_parameters p{};
  p.arguments = arguments;
  const bool is_key = arguments.kind == tile_kind::key;
  p.layout = is_key ? arguments.format.key_layout() : arguments.format.value_layout();
  p.unit = detail::rotation_unit(p.layout.head_dim, arguments.rotate_back);
  return is_key ? detail::launch_decoding<tile_kind::key>(p, stream)
                : detail::launch_decoding<tile_kind::value>(p, stream);
}

}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
