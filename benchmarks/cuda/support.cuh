// What the CUDA benchmarks share: device memory, timing of one call among many in a graph, and how
// fast the same bytes can be read or copied.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kvarn/cuda/arguments.hpp"

namespace kvarn_bench {

inline void check(cudaError_t code) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(code));
  std::exit(1);
}
inline void check(const kvarn::cuda::launch_status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::exit(1);
}

template <class T>
class device_array {
 public:
  explicit device_array(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, std::max<std::size_t>(count * sizeof(T), 16)));
  }
  explicit device_array(const std::vector<T>& values) : device_array(values.size()) {
    check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;
  ~device_array() { cudaFree(data_); }
  T* data() const { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

// Microseconds of one of `calls` calls in a graph: the median of `repeats` replays. `call(i,
// stream)` should use other memory for every i, so that nothing is found in the L2 cache.
inline double graph_time(int calls, const std::function<void(int, cudaStream_t)>& call,
                         int repeats = 15) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t start;
  cudaEvent_t stop;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  call(0, stream);  // loads the kernels
  check(cudaStreamSynchronize(stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(i, stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<double> times;
  for (int i = 0; i < repeats + 2; ++i) {
    check(cudaEventRecord(start, stream));
    check(cudaGraphLaunch(executable, stream));
    check(cudaEventRecord(stop, stream));
    check(cudaEventSynchronize(stop));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i >= 2) times.push_back(1e3 * static_cast<double>(milliseconds) / calls);
  }
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
  check(cudaEventDestroy(start));
  check(cudaEventDestroy(stop));
  check(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

__global__ void __launch_bounds__(512)
    read_kernel(const uint4* data, std::size_t count, unsigned* sink) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  unsigned x = 0;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(data + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; ++k) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < count; i += step) {
    const uint4 v = __ldcs(data + i);
    x ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (x == 0x12345678u) *sink = x;
}

// Reads `in` and writes `out`, both whole.
__global__ void __launch_bounds__(256)
    copy_kernel(const uint4* in, std::size_t in_count, uint4* out, std::size_t out_count) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  const std::size_t first = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  uint4 x = {1, 2, 3, 4};
  std::size_t i = first;
  for (; i + 7 * step < in_count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(in + i + k * step);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      x.x ^= v[k].x;
      x.y ^= v[k].y;
      x.z ^= v[k].z;
      x.w ^= v[k].w;
    }
  }
  for (; i < in_count; i += step) x.x ^= __ldcs(in + i).x;
  for (i = first; i < out_count; i += step) out[i] = x;
}

// Standard normal numbers, by a hash of the index.
__global__ void normal_kernel(std::uint16_t* out, std::size_t count, unsigned seed) {
  const auto hash = [](unsigned x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
  };
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const auto n = static_cast<unsigned>(i);
    const float u = (static_cast<float>(hash(2 * n + seed) >> 8) + 1.0f) * 0x1p-24f;
    const float v = static_cast<float>(hash(2 * n + 1 + seed) >> 8) * 0x1p-24f;
    out[i] = kvarn::float16(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v)).bits;
  }
}

}  // namespace kvarn_bench
