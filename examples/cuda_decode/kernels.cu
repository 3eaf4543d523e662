// All that nvcc compiles of this program: attention for one format, and the kernels of the cache.
#include <kvarn/cuda.cuh>
#include <kvarn/cuda/cache_launchers.cuh>

#include "kernels.hpp"

namespace cuda_decode {

namespace {

// By a hash of the index.
__global__ void fill_kernel(std::uint16_t* numbers, std::size_t count, unsigned seed) {
  const auto hash = [](unsigned x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return static_cast<float>(((x ^ (x >> 16)) >> 8) + 1) * 0x1p-24f;
  };
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const auto n = 2 * static_cast<unsigned>(i) + seed;
    numbers[i] = kvarn::float16(sqrtf(-2.0f * logf(hash(n))) * cospif(2.0f * hash(n + 1))).bits;
  }
}

}  // namespace

kvarn::cuda::launch_status attend(const kvarn::cuda::attention_arguments& arguments,
                                  cudaStream_t stream) {
  return kvarn::cuda::attend<format>(arguments, stream);
}
std::size_t attention_workspace_bytes(const kvarn::cuda::attention_arguments& arguments) {
  return kvarn::cuda::attention_workspace_bytes<format>(arguments);
}
kvarn::cuda::cache_launchers cache_launchers() { return kvarn::cuda::cache_launchers_of_device(); }
void fill(void* numbers, std::size_t count, unsigned seed, cudaStream_t stream) {
  fill_kernel<<<1024, 256, 0, stream>>>(static_cast<std::uint16_t*>(numbers), count, seed);
}

}  // namespace cuda_decode
