// Head vectors of many tokens and KV heads in device memory.
#pragma once

#include "../codec/tokens.hpp"
#include "device.cuh"
#include "rotation.cuh"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// Head vectors: number v is head v % heads of token v / heads, counted from element `first`.
struct token_source {
  const void* data;
  element_type type;
  int heads;
  std::int64_t first;
  token_strides strides;

  __device__ std::int64_t place(int vector) const {
    const int token = heads == 1 ? vector : vector / heads;
    return first + token * strides.token + (vector - token * heads) * strides.head;
  }
  // Whether runs of 8 channels can be loaded 16 bytes at a time.
  __device__ bool is_vectorised() const {
    const auto bytes = static_cast<std::uint64_t>(element_bytes(type));
    const std::uint64_t start =
        reinterpret_cast<std::uint64_t>(data) + static_cast<std::uint64_t>(first) * bytes;
    const auto steps = static_cast<std::uint64_t>(strides.token) |
                       (heads == 1 ? 0 : static_cast<std::uint64_t>(strides.head));
    return strides.channel == 1 && ((start | steps * bytes) % 16) == 0;
  }
};

// Eight neighbouring channels of a head vector.
struct channel_run {
  uint4 raw[2];

  // Asks for those from element `place` on, where the source is vectorised.
  __device__ void request(const token_source& source, std::int64_t place, bool is_vectorised) {
    if (!is_vectorised) return;
    const auto* const from = reinterpret_cast<const uint4*>(
        static_cast<const std::byte*>(source.data) + place * element_bytes(source.type));
    raw[0] = __ldg(from);
    if (source.type == element_type::float32) raw[1] = __ldg(from + 1);
  }
  // What was asked for, or else is loaded now. `memory`: eight numbers of this thread.
  __device__ void take(const token_source& source, std::int64_t place, bool is_vectorised,
                       float* memory, float (&v)[8]) const {
    if (!is_vectorised) {
#pragma unroll 1
      for (int i = 0; i < 8; ++i)
        memory[i] = load_element(source.data, source.type, place + i * source.strides.channel);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = memory[i];
    } else if (source.type == element_type::float32) {
      const std::uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                                      raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(words[i]);
    } else {
      widen_eight(raw[0], source.type, v);
    }
  }
};

// sanitize of N numbers of which the largest magnitude (NaN where there is one) is known.
// `place[Stride * i]`: memory of this thread for number i.
template <int Stride, int N>
__device__ void sanitize_run(float (&v)[N], float largest, float* place,
                             replaced_values& replaced) {
  if (largest <= 65504.0f) return;
#pragma unroll
  for (int i = 0; i < N; ++i) place[Stride * i] = v[i];
#pragma unroll 1
  for (int i = 0; i < N; ++i) place[Stride * i] = sanitize(place[Stride * i], replaced);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = place[Stride * i];
}
template <int Stride, int N>
__device__ void sanitize_run(float (&v)[N], float* place, replaced_values& replaced) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = larger_magnitude(largest, v[i]);
  sanitize_run<Stride>(v, largest, place, replaced);
}

// 16 numbers of a type of 16 bits, and the largest of their magnitudes (NaN where one is).
template <element_type Type>
__device__ float widen_sixteen(const uint4 (&raw)[2], float (&v)[16]) {
  widen_eight(raw[0], Type, v);
  widen_eight(raw[1], Type, v + 8);
  const std::uint32_t words[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                                  raw[1].x, raw[1].y, raw[1].z, raw[1].w};
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = larger_magnitudes(Type, largest, words[i]);
  const float_pair pair = unpack_pair(Type, largest);
  return larger_magnitude(pair.low, pair.high);
}

// Loads `count` vectors (none where it is negative) from `first_vector` on into buffer tokens 0 ..
// count - 1, sanitized; with `rotate` through stages 1 and 2 of the rotation. Synchronises the
// block at its end. A thread requests `Ahead` runs of 16 channels before it uses the first.
template <int Ahead, int Threads = block_threads, int Dim>
__device__ void load_tokens(const token_source& source, int first_vector, int count, bool rotate,
                            const token_buffer<Dim>& buffer, replaced_values& replaced) {
  const int dim = buffer.dim();
  const int block = dim / hadamard_core(dim);
  const auto runs = static_cast<unsigned>(dim) / 16;
  const unsigned units = static_cast<unsigned>(max(count, 0)) * runs;
  const auto place = [&](unsigned unit) {
    return source.place(first_vector + static_cast<int>(unit / runs)) +
           static_cast<int>(16 * (unit % runs)) * source.strides.channel;
  };
  const auto memory = [&](unsigned unit) {
    const auto token = static_cast<int>(unit / runs);
    const auto run = static_cast<int>(unit % runs);
    return buffer.data + (run >> 2) * buffer.plane() + 68 * token + (run & 3);
  };
  const auto finish = [&](float* out, float(&v)[16]) {
    if (rotate) rotate_neighbours(v, block);
#pragma unroll
    for (int i = 0; i < 16; ++i) out[4 * i] = v[i];
  };
  const unsigned thread = threadIdx.x;
  if (source.type != element_type::float32 && source.is_vectorised()) {
    for (unsigned base = thread; base < units; base += Ahead * Threads) {
      uint4 raw[Ahead][2];
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        const unsigned unit = base + a * Threads;
        if (unit >= units) break;
        const auto* const from = reinterpret_cast<const uint4*>(
            static_cast<const std::uint16_t*>(source.data) + place(unit));
        raw[a][0] = __ldg(from);
        raw[a][1] = __ldg(from + 1);
      }
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        const unsigned unit = base + a * Threads;
        if (unit >= units) break;
        float v[16];
        float* const out = memory(unit);
        const float largest = source.type == element_type::float16
                                  ? widen_sixteen<element_type::float16>(raw[a], v)
                                  : widen_sixteen<element_type::bfloat16>(raw[a], v);
        sanitize_run<4>(v, largest, out, replaced);
        finish(out, v);
      }
    }
  } else {
#pragma unroll 1
    for (unsigned unit = thread; unit < units; unit += Threads) {
      const std::int64_t start = place(unit);
      float v[16];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        v[i] = load_element(source.data, source.type, start + i * source.strides.channel);
      float* const out = memory(unit);
      sanitize_run<4>(v, out, replaced);
      finish(out, v);
    }
  }
  if (rotate)
    rotate_cores<Threads>(buffer, count);
  else
    __syncthreads();
}

// Writes eight neighbouring channels from element `place` on.
__device__ inline void store_eight(void* array, element_type type, std::int64_t place,
                                   std::int64_t stride, const float (&v)[8]) {
  auto* const out = static_cast<std::byte*>(array) + place * element_bytes(type);
  if (stride == 1 && reinterpret_cast<std::uint64_t>(out) % 16 == 0) {
    auto* const quads = reinterpret_cast<uint4*>(out);
    if (type == element_type::float32) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        quads[i] = make_uint4(__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]),
                              __float_as_uint(v[4 * i + 2]), __float_as_uint(v[4 * i + 3]));
    } else {
      quads[0] = make_uint4(round_pair(type, v[0], v[1]), round_pair(type, v[2], v[3]),
                            round_pair(type, v[4], v[5]), round_pair(type, v[6], v[7]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) store_element(array, type, place + i * stride, v[i]);
}

__device__ inline void report(const replaced_values& replaced, replaced_counts* out) {
  if (out == nullptr) return;
  if (replaced.nan != 0) atomicAdd(&out->nan, static_cast<unsigned>(replaced.nan));
  if (replaced.saturated != 0)
    atomicAdd(&out->saturated, static_cast<unsigned>(replaced.saturated));
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
