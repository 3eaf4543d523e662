// Decoding of tiles to FP16, BF16 or FP32 tokens, rotated back or as stored.
//
// The numbers are those of kvarn::decode_tokens, bit for bit.
#pragma once

#include <algorithm>
#include <cstddef>

#include "../format/tile_layout.hpp"
#include "decode_kernels.cuh"
#include "device.cuh"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {

// Decodes the key (or value) records of `count` groups, in one launch. FP16 and BF16 saturate.
// Tokens must be aligned to their type.
launch_status decode(const decode_arguments& arguments, cudaStream_t stream);

// implementation

namespace detail {

template <class Kernel>
launch_status launch_decode_kernel(Kernel kernel, const decode_parameters& p, int blocks,
                                   std::size_t shared_bytes, cudaStream_t stream) {
  if (launch_status s = allow_shared_memory(kernel, shared_bytes); !s.ok()) return s;
  kernel<<<static_cast<unsigned>(blocks), block_threads, shared_bytes, stream>>>(p);
  return last_launch();
}

template <tile_kind Kind, int Bits, int Dim>
launch_status launch_decoding_lanes(const decode_parameters& p, cudaStream_t stream) {
  const int resident =
      decode_blocks_per_multiprocessor * device_attribute(cudaDevAttrMultiProcessorCount);
  return launch_decode_kernel(decode_lanes_kernel<Dim, Kind, Bits>, p,
                              (std::min)(p.tiles(), resident),
                              2 * static_cast<std::size_t>(shared_record_bytes(p.layout)) +
                                  2 * Dim * sizeof(float) + 4 * sizeof(decode_group),
                              stream);
}

template <tile_kind Kind, int Bits>
launch_status launch_decoding(const decode_parameters& p, cudaStream_t stream) {
  const int dim = p.layout.head_dim;
  if (dim == 64) return launch_decoding_lanes<Kind, Bits, 64>(p, stream);
  if (dim == 128) return launch_decoding_lanes<Kind, Bits, 128>(p, stream);
  if (dim == 256) return launch_decoding_lanes<Kind, Bits, 256>(p, stream);
  const std::size_t floats =
      static_cast<std::size_t>(p.layout.rows()) + token_buffer_floats(dim, vectors_at_once(dim));
  return launch_decode_kernel(
      decode_kernel<Kind, Bits>, p, p.tiles(),
      static_cast<std::size_t>(shared_record_bytes(p.layout)) + floats * sizeof(float), stream);
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
