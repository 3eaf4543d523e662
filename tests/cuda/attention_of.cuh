// Instantiates attention for one of the formats of the tests.
#pragma once

#include "cuda/attention_formats.hpp"
#include "kvarn/cuda/attention.cuh"

namespace kvarn_test {

// Bytes of registers that a thread of the kernel for up to four rows, or for more, keeps in memory.
template <int Index>
int local_bytes(bool has_more_rows) {
  constexpr kvarn::cache_format format = attention_formats[Index];
  constexpr kvarn::cuda::attention_policy policy = kvarn::cuda::default_policy(format);
  const auto kernel =
      has_more_rows ? kvarn::cuda::detail::attention_kernel<format.id(), policy.warps,
                                                            policy.blocks_per_sm, policy.row_blocks>
                    : kvarn::cuda::detail::attention_kernel<format.id(), policy.warps,
                                                            policy.blocks_per_sm, 1>;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel));
  return static_cast<int>(attributes.localSizeBytes);
}

template <int Index>
attention_functions attention_of() {
  return {&kvarn::cuda::attend<attention_formats[Index]>,
          &kvarn::cuda::attention_workspace_bytes<attention_formats[Index]>, &local_bytes<Index>};
}

}  // namespace kvarn_test
