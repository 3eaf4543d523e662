// An executor for kvarn::attention_batch over OpenMP. Compile with the compiler's OpenMP flag.
#pragma once

#if !defined(_OPENMP)
#error "openmp_executor.hpp needs OpenMP; compile with -fopenmp or link OpenMP::OpenMP_CXX"
#endif

#include <cstddef>
#include <cstdint>

namespace kvarn_examples {

// Shares the items of each call among `threads` threads. Items must not throw.
struct openmp_executor {
  int threads = 1;

  template <class F>
  void operator()(std::size_t count, const F& f) const {
    const auto end = static_cast<std::int64_t>(count);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (std::int64_t i = 0; i < end; ++i) f(static_cast<std::size_t>(i));
  }
};

}  // namespace kvarn_examples
