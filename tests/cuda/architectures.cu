// Attention, encoding, decoding and query moments, instantiated for compilation alone.
#include "kvarn/cuda/attention.cuh"
#include "kvarn/cuda/decode.cuh"
#include "kvarn/cuda/encode.cuh"
#include "kvarn/cuda/query_moments.cuh"

namespace kvarn::cuda {

template launch_status attend<cache_format{}>(const attention_arguments&, cudaStream_t);

}  // namespace kvarn::cuda
