// What a cache on a device calls of the files that nvcc compiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "arguments.hpp"

namespace kvarn::cuda {

// One .cu file gets them from cache_launchers_of_device() in cache_launchers.cuh.
struct cache_launchers {
  launch_status (*append)(const append_arguments&, cudaStream_t) = nullptr;
  launch_status (*copy_rows)(const row_copy*, int, cudaStream_t) = nullptr;
  launch_status (*encode)(const encode_arguments&, cudaStream_t) = nullptr;
  std::size_t (*encode_workspace_bytes)(const cache_format&, tile_kind, encoder) = nullptr;
};

}  // namespace kvarn::cuda
