// The library's launchers behind functions that C++ tests can call, and memory on the device.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvarn/cuda/arguments.hpp"
#include "kvarn/cuda/cache_launchers.hpp"

namespace kvarn_test {

kvarn::cuda::launch_status launch(const kvarn::cuda::encode_arguments& arguments,
                                  cudaStream_t stream);
kvarn::cuda::launch_status launch(const kvarn::cuda::decode_arguments& arguments,
                                  cudaStream_t stream);
kvarn::cuda::launch_status launch(const kvarn::cuda::observe_arguments& arguments,
                                  cudaStream_t stream);
kvarn::cuda::launch_status launch(const kvarn::cuda::factor_arguments& arguments,
                                  cudaStream_t stream);
std::size_t workspace_bytes(const kvarn::cache_format& format, kvarn::tile_kind kind,
                            kvarn::encoder method);
kvarn::cuda::cache_launchers cache_launchers();

inline void check(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}
inline void check(const kvarn::cuda::launch_status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}
inline void synchronize() { check(cudaDeviceSynchronize()); }

// `count` elements of device memory, filled with `poison` bytes at first. What they hold is there
// when they are made: the default stream may still be copying, and the tests' streams do not wait
// for it.
template <class T>
class device_array {
 public:
  explicit device_array(std::size_t count, int poison = 0xa5) : count_(count) {
    check(cudaMalloc(&data_, bytes() + 1));
    check(cudaMemset(data_, poison, bytes()));
    check(cudaStreamSynchronize(nullptr));
  }
  explicit device_array(const std::vector<T>& values) : device_array(values.size()) {
    check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));
  }
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;
  ~device_array() { cudaFree(data_); }

  T* data() const { return static_cast<T*>(data_); }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }
  std::vector<T> to_host() const {
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

// The norm of the difference, by that of the exact numbers.
inline double relative_error(const std::vector<float>& a, const std::vector<float>& exact) {
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(exact[i]);
    error += d * d;
    size += static_cast<double>(exact[i]) * static_cast<double>(exact[i]);
  }
  return std::sqrt(error / size);
}

}  // namespace kvarn_test
