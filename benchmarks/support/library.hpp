// The targets of this machine, and calls of kernels that have no function of their own in the
// library's interface.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "kvarn/kvarn.hpp"
#include "kvarn/simd/dispatch.hpp"

namespace kvarn_bench {

// Whether this machine can run the target and the library has kernels of its own for it.
inline bool has_kernels(kvarn::target on) {
  if (!kvarn::is_available(on)) return false;
  return on == kvarn::target::scalar || kvarn::with_kernels(on, [](auto kernels) {
           return !std::is_same_v<decltype(kernels), kvarn::scalar::kernels>;
         });
}

inline std::vector<kvarn::target> targets() {
  std::vector<kvarn::target> all;
  for (const kvarn::target_info& info : kvarn::target_infos)
    if (has_kernels(info.id)) all.push_back(info.id);
  return all;
}

// Those with a codec of their own: AVX-VNNI has that of AVX2, AMX that of AVX-512.
inline std::vector<kvarn::target> codec_targets() {
  std::vector<kvarn::target> all = targets();
  std::erase_if(all, [](kvarn::target on) {
    return on == kvarn::target::avx_vnni || on == kvarn::target::amx;
  });
  return all;
}

// Rotates `count` vectors of n floats, one after another.
inline void hadamard(float* x, int n, int count, kvarn::target on) {
  kvarn::with_kernels(on, [=](auto kernels) {
    if (count == 1)
      kernels.hadamard(x, n);
    else
      kernels.hadamard(x, n, count, n);
  });
}

// Floats of workspace of variance_normalize.
inline std::size_t normalize_workspace(int rows, int cols, kvarn::target on) {
  return kvarn::with_kernels(on,
                             [=](auto kernels) { return kernels.normalize_workspace(rows, cols); });
}

inline void variance_normalize(const float* x, int rows, int cols,
                               const kvarn::normalize_options& options, float* row_scale,
                               float* col_scale, float* workspace, kvarn::target on) {
  kvarn::with_kernels(on, [=, &options](auto kernels) {
    kernels.variance_normalize(x, rows, cols, 1.0f, options, row_scale, col_scale, workspace);
  });
}

// The factor of a moment, made in `matrix` of head_dim^2 floats. `workspace`:
// kvarn::factor_workspace(head_dim) floats.
inline void factorize(const kvarn::query_moment& moment, float* matrix, float* workspace,
                      kvarn::target on) {
  std::copy(moment.sums().begin(), moment.sums().end(), matrix);
  kvarn::with_kernels(on, [&](auto kernels) {
    kernels.factorize(matrix, moment.head_dim(), kvarn::query_factor::default_damping, workspace);
  });
}

}  // namespace kvarn_bench
