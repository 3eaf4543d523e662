// The kernels of this program, behind functions that C++ can call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kvarn/cuda/arguments.hpp"
#include "kvarn/cuda/cache_launchers.hpp"

namespace cuda_decode {

// 2.25 bits per element.
inline constexpr kvarn::cache_format format{
    .key_head_dim = 128, .value_head_dim = 128, .group = 128, .key_bits = 2, .value_bits = 2};

kvarn::cuda::launch_status attend(const kvarn::cuda::attention_arguments& arguments,
                                  cudaStream_t stream);
std::size_t attention_workspace_bytes(const kvarn::cuda::attention_arguments& arguments);
kvarn::cuda::cache_launchers cache_launchers();
// Normal numbers as FP16.
void fill(void* numbers, std::size_t count, unsigned seed, cudaStream_t stream);

}  // namespace cuda_decode
