// Instantiates attention for one of the formats of the tests.
#pragma once

#include "cuda/attention_formats.hpp"
#include "kvarn/cuda/attention.cuh"

namespace kvarn_test {

template <int Index>
attention_functions attention_of() {
  return {&kvarn::cuda::attend<attention_formats[Index]>,
          &kvarn::cuda::attention_workspace_bytes<attention_formats[Index]>};
}

}  // namespace kvarn_test
