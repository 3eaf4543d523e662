// The kernels of a cache on a device, as function pointers that C++ files can call.
#pragma once

#include "cache_launchers.hpp"
#include "encode.cuh"
#include "exact_rows.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {

inline cache_launchers cache_launchers_of_device() {
  return {&append, &copy_rows, &encode, &encode_workspace_bytes};
}

}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
