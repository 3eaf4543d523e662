// Instantiates attention for one of the formats of the tests.
#pragma once

#include "cuda/attention_formats.hpp"
#include "kvarn/cuda/attention.cuh"

namespace kvarn_test {

// Bytes of registers that a thread of the kernel for up to four rows, or for more, keeps in memory.
template <int Index>
int local_bytes(bool has_more_rows) {
  constexpr kvarn::cache_format format = attention_formats[Index];
  const auto kernel =
      kvarn::cuda::detail::kernel_for<format, kvarn::cuda::default_policy(format)>(has_more_rows);
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel));
  return static_cast<int>(attributes.localSizeBytes);
}

template <int Index>
inline constexpr kvarn::cuda::attention_policy by_fours = [] {
  auto policy = kvarn::cuda::default_policy(attention_formats[Index]);
  policy.row_blocks = 1;
  return policy;
}();

template <int Index>
attention_functions attention_of() {
  constexpr kvarn::cache_format format = attention_formats[Index];
  return {&kvarn::cuda::attend<format>, &kvarn::cuda::attention_workspace_bytes<format>,
          &kvarn::cuda::attend<format, by_fours<Index>>,
          &kvarn::cuda::attention_workspace_bytes<format, by_fours<Index>>, &local_bytes<Index>};
}

}  // namespace kvarn_test
