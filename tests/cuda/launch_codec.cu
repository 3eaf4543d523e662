// Encoding, decoding, query moments and what a cache calls, compiled once for all tests.
#include "cuda/launch.hpp"
#include "kvarn/cuda/cache_launchers.cuh"
#include "kvarn/cuda/decode.cuh"
#include "kvarn/cuda/encode.cuh"
#include "kvarn/cuda/query_moments.cuh"

namespace kvarn_test {

using kvarn::cuda::launch_status;

launch_status launch(const kvarn::cuda::encode_arguments& arguments, cudaStream_t stream) {
  return kvarn::cuda::encode(arguments, stream);
}
launch_status launch(const kvarn::cuda::decode_arguments& arguments, cudaStream_t stream) {
  return kvarn::cuda::decode(arguments, stream);
}
launch_status launch(const kvarn::cuda::observe_arguments& arguments, cudaStream_t stream) {
  return kvarn::cuda::observe(arguments, stream);
}
launch_status launch(const kvarn::cuda::factor_arguments& arguments, cudaStream_t stream) {
  return kvarn::cuda::factorize(arguments, stream);
}
std::size_t workspace_bytes(const kvarn::cache_format& format, kvarn::tile_kind kind,
                            kvarn::encoder method) {
  return kvarn::cuda::encode_workspace_bytes(format, kind, method);
}
kvarn::cuda::cache_launchers cache_launchers() { return kvarn::cuda::cache_launchers_of_device(); }

}  // namespace kvarn_test
