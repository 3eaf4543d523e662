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
KVARN_KERNEL void __launch_bounds__(block_threads, Shape::blocks)
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

  std::size_t workspace_bytes() const {  // of a block
    return static_cast<std::size_t>(parameters.workspace_floats) * sizeof(float);
  }
};

// Whether a block of the current device can have so much shared memory.
inline bool fits_block(std::size_t bytes) {
  return static_cast<int>(bytes) <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

inline encode_plan plan_encoding(const cache_format& format, tile_kind kind, encoder method,
                                 bool fixed) {
  encode_plan plan{};
  encode_parameters& p = plan.parameters;
  plan.fixed = fixed;
  p.layout = kind == tile_kind::key ? format.key_layout() : format.value_layout();
  p.recipe = recipe_of(method, kind, p.layout.bits);
  const int rows = p.layout.rows();
  const int cols = p.layout.cols();
  p.batch = fixed ? p.layout.group : 16;
  int used = encode_vector_floats(rows, cols);
  const auto take = [&](int place, int floats) {
    used = (std::max)(used, (place + floats + 3) / 4 * 4);
    return place;
  };
  const int partials = partial_floats(p.recipe.refits > 0 ? 4 : 2);
  const auto vectors = static_cast<int>(token_buffer_floats(p.layout.head_dim, p.batch));
  p.buffer = take(used, (std::max)(vectors, partials));
  const feedback_plan feedback{rows, cols, fixed};
  if (p.recipe.error_feedback) {
    if (fixed) take(p.buffer, feedback.deviation_floats());
    p.feedback = take(used, feedback.floats());
  } else {
    // Sums over columns are taken while there is a history, and while unbias() gets codes made.
    const bool beside = p.recipe.unbiased || p.recipe.scaling == row_scaling::dual_axis;
    const int history = normalize_history_floats(rows, cols, p.recipe.iterations);
    const int trials = 2 * scale_candidates * vector_floats(rows);
    p.codes = take(p.buffer + (beside ? partials : 0),
                   (std::max)({16 * rows * code_groups(cols), history, trials}));
  }
  p.tile = used;
  if (!fixed) {
    const int tile =
        rows * cols + (p.recipe.error_feedback ? (feedback.deviation_floats() + 3) / 4 * 4 : 0);
    p.in_workspace = !fits_block(static_cast<std::size_t>(used + tile) * sizeof(float));
    if (p.in_workspace)
      p.workspace_floats = tile;
    else
      used += tile;
  }
  plan.shared_bytes = static_cast<std::size_t>(used) * sizeof(float);
  return plan;
}

// Whether there are kernels that keep the tile in registers.
inline bool is_fixed_shape(const tile_layout& layout) {
  return layout.group == 128 && (layout.head_dim == 64 || layout.head_dim == 128);
}

// The tile in registers where there is such a kernel and the device has the shared memory.
inline encode_plan plan_encoding(const cache_format& format, tile_kind kind, encoder method) {
  const tile_layout layout = kind == tile_kind::key ? format.key_layout() : format.value_layout();
  if (is_fixed_shape(layout)) {
    const encode_plan plan = plan_encoding(format, kind, method, true);
    if (fits_block(plan.shared_bytes)) return plan;
  }
  return plan_encoding(format, kind, method, false);
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
  if (plan.parameters.in_workspace)
    blocks = (std::min)(blocks, std::int64_t{encode_blocks_in_workspace()});
  kernel<<<static_cast<unsigned>(blocks), block_threads, plan.shared_bytes, stream>>>(
      plan.parameters);
  return last_launch();
}

template <tile_kind Kind, encoder Method>
launch_status launch_encoding(const encode_plan& plan, cudaStream_t stream) {
  constexpr bool is_key = Kind == tile_kind::key;
  if (!plan.fixed) return launch_encoding<any_shape, Kind, Method>(plan, stream);
  if (plan.parameters.layout.head_dim == 128)
    return launch_encoding<fixed_shape<128, 128>, Kind, Method>(plan, stream);
  return launch_encoding<fixed_shape<is_key ? 128 : 64, is_key ? 64 : 128>, Kind, Method>(plan,
                                                                                          stream);
}

}  // namespace detail

inline std::size_t encode_workspace_bytes(const cache_format& format, tile_kind kind,
                                          encoder method) {
  if (!validate(format).ok() || !validate(method).ok()) return 0;
  return detail::plan_encoding(format, kind, method).workspace_bytes() *
         static_cast<std::size_t>(detail::encode_blocks_in_workspace());
}

inline launch_status encode(const encode_arguments& arguments, cudaStream_t stream) {
  if (launch_status checked = detail::check_groups(arguments); !checked.ok()) return checked;
  if (const status s = validate(arguments.method); !s.ok()) return detail::refuse(s.message());
  if (arguments.count == 0) return {};
  detail::encode_plan plan =
      detail::plan_encoding(arguments.format, arguments.kind, arguments.method);
  if (plan.parameters.in_workspace && arguments.workspace == nullptr)
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
