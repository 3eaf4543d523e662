// Encoding of tiles: rotate, normalise, quantise and pack in one kernel, one block per tile
// (encode_block.cuh). The bytes are those of kvarn::encode_tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../codec/encoder.hpp"
#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "encode_block.cuh"
#include "rotation.cuh"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {

// Device memory that encode needs beside its arguments: 0 for most shapes. Its contents do not
// matter. Asks the current device.
std::size_t encode_workspace_bytes(const cache_format& format, tile_kind kind, encoder method);

// Encodes the key (or value) records of `count` groups, in one launch. Other bytes of the pages are
// not touched. Tokens must be aligned to their type.
launch_status encode(const encode_arguments& arguments, cudaStream_t stream);

// implementation

namespace detail {

template <class Shape, tile_kind Kind, encoder Method>
KVARN_KERNEL void __launch_bounds__(block_threads, Shape::is_fixed ? 2 : 1)
    encode_kernel(const __grid_constant__ encode_parameters p) {
  extern __shared__ float4 shared[];
  auto* const memory = reinterpret_cast<float*>(shared);
  if constexpr (Shape::is_fixed) {
    tile_encoder_block<Shape, Kind, Method>(p, memory, blockIdx.x).run();
  } else {
    const std::int64_t tiles = std::int64_t{p.arguments.count} * p.arguments.kv_heads;
    for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
      tile_encoder_block<Shape, Kind, Method>(p, memory, tile).run();
  }
}

// Where an encoding keeps what, and how much shared memory and workspace it takes.
struct encode_plan {
  encode_parameters parameters;
  bool fixed;
  std::size_t shared_bytes;
  std::size_t workspace_per_block;
};

inline encode_plan plan_encoding(const cache_format& format, tile_kind kind, encoder method) {
  encode_plan plan{};
  encode_parameters& p = plan.parameters;
  p.layout = kind == tile_kind::key ? format.key_layout() : format.value_layout();
  p.recipe = recipe_of(method, kind, p.layout.bits);
  const int rows = p.layout.rows();
  const int cols = p.layout.cols();
  plan.fixed = rows == 128 && cols == 128;
  p.batch = plan.fixed ? 128 : 16;
  const auto tile = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  const std::size_t column_partials =
      (p.recipe.refits > 0 ? 4 : 2) * 8 * static_cast<std::size_t>(cols);
  const std::size_t buffer =
      (std::max)(token_buffer_floats(p.layout.head_dim, p.batch), column_partials);
  const std::size_t codes =
      static_cast<std::size_t>(rows) * static_cast<std::size_t>((cols + 63) / 64) * 16;
  const auto aligned = [](std::size_t floats) { return (floats + 3) / 4 * 4; };
  std::size_t used = aligned(static_cast<std::size_t>(encode_vector_floats(rows, cols)));
  p.buffer = static_cast<int>(used);
  used += aligned(buffer);
  p.codes = static_cast<int>(used);
  used += codes;
  p.panel = static_cast<int>(used);
  if (plan.fixed && p.recipe.error_feedback) used += 2 * 16 * static_cast<std::size_t>(cols);
  p.tile = static_cast<int>(used);
  if (!plan.fixed) {
    const std::size_t kept = tile * (p.recipe.error_feedback ? 2 : 1);
    const auto limit = static_cast<std::size_t>(
        (std::max)(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), 0));
    p.in_workspace = (used + kept) * sizeof(float) > limit;
    if (p.in_workspace)
      plan.workspace_per_block = kept * sizeof(float);
    else
      used += kept;
  }
  plan.shared_bytes = used * sizeof(float);
  return plan;
}

inline int encode_blocks_in_workspace() {
  return (std::max)(device_attribute(cudaDevAttrMultiProcessorCount), 1);
}

template <class Shape, tile_kind Kind, encoder Method>
launch_status launch_encoding(const encode_plan& plan, cudaStream_t stream) {
  const auto kernel = encode_kernel<Shape, Kind, Method>;
  if (launch_status s = allow_shared_memory(kernel, plan.shared_bytes); !s.ok()) return s;
  const encode_arguments& a = plan.parameters.arguments;
  std::int64_t blocks = std::int64_t{a.count} * a.kv_heads;
  if (plan.workspace_per_block != 0)
    blocks = (std::min)(blocks, std::int64_t{encode_blocks_in_workspace()});
  kernel<<<static_cast<unsigned>(blocks), block_threads, plan.shared_bytes, stream>>>(
      plan.parameters);
  return last_launch();
}

template <tile_kind Kind, encoder Method>
launch_status launch_encoding(const encode_plan& plan, cudaStream_t stream) {
  return plan.fixed ? launch_encoding<fixed_shape<128, 128>, Kind, Method>(plan, stream)
                    : launch_encoding<any_shape, Kind, Method>(plan, stream);
}

}  // namespace detail

inline std::size_t encode_workspace_bytes(const cache_format& format, tile_kind kind,
                                          encoder method) {
  if (!validate(format).ok() || !validate(method).ok()) return 0;
  return detail::plan_encoding(format, kind, method).workspace_per_block *
         static_cast<std::size_t>(detail::encode_blocks_in_workspace());
}

inline launch_status encode(const encode_arguments& arguments, cudaStream_t stream) {
  if (launch_status checked = detail::check_groups(arguments); !checked.ok()) return checked;
  if (const status s = validate(arguments.method); !s.ok()) return detail::refuse(s.message());
  if (arguments.count == 0) return {};
  detail::encode_plan plan =
      detail::plan_encoding(arguments.format, arguments.kind, arguments.method);
  if (plan.workspace_per_block != 0 && arguments.workspace == nullptr)
    return detail::refuse("workspace is null; this shape needs encode_workspace_bytes()");
  plan.parameters.arguments = arguments;
  plan.parameters.unit =
      detail::rotation_unit(arguments.kind == tile_kind::key ? arguments.format.key_head_dim
                                                             : arguments.format.value_head_dim,
                            arguments.rotate);
  const bool is_key = arguments.kind == tile_kind::key;
  switch (arguments.method) {
    case encoder::paper:
      return is_key ? detail::launch_encoding<tile_kind::key, encoder::paper>(plan, stream)
                    : detail::launch_encoding<tile_kind::value, encoder::paper>(plan, stream);
    case encoder::tuned:
      return is_key ? detail::launch_encoding<tile_kind::key, encoder::tuned>(plan, stream)
                    : detail::launch_encoding<tile_kind::value, encoder::tuned>(plan, stream);
    case encoder::query_aware:  // values: the same kernel as tuned
      return is_key ? detail::launch_encoding<tile_kind::key, encoder::query_aware>(plan, stream)
                    : detail::launch_encoding<tile_kind::value, encoder::tuned>(plan, stream);
  }
  return detail::refuse("this encoder has no kernel");
}

}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
