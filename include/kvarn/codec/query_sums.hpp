// Sums of q q^T over queries and their factor, in plain scalar code: the definitions behind
// query_moment.hpp.
#pragma once

#include <cmath>
#include <cstddef>

#include "../config.hpp"
#include "../format/tile_layout.hpp"
#include "arithmetic.hpp"
#include "hadamard.hpp"
#include "tokens.hpp"

namespace kvarn {

// Floats of workspace that factorize needs on any target: the kernels take a matrix, aligned.
constexpr std::size_t factor_workspace(int head_dim) {
  return static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head_dim) + alignment_floats;
}

inline namespace KVARN_ISA_NAMESPACE {
namespace scalar {

// Adds q q^T of `count` queries to the upper triangle of `sums`, head_dim x head_dim, row-major.
template <class T>
replaced_values add_queries(tokens_view<T> queries, int count, bool rotate, int head_dim,
                            float* sums) {
  replaced_values replaced;
  float q[max_head_dim];
  for (int i = 0; i < count; ++i) {
    load_token(queries, i, head_dim, q, replaced);
    if (rotate) hadamard(q, head_dim);
    for (int row = 0; row < head_dim; ++row) {
      float* const out = sums + static_cast<std::ptrdiff_t>(row) * head_dim;
      for (int col = row; col < head_dim; ++col) out[col] = std::fma(q[row], q[col], out[col]);
    }
  }
  return replaced;
}

// Replaces the upper triangle of C, head_dim x head_dim, row-major, by U of
// C + lambda I = (U + I) D (U + I)^T, strictly upper triangular, with
// lambda = damping * trace(C) / head_dim.
inline void factorize(float* matrix, int head_dim, float damping, float* /*workspace*/) {
  const int n = head_dim;
  const auto at = [matrix, n](int row, int col) -> float& {
    return matrix[static_cast<std::ptrdiff_t>(row) * n + col];
  };
  const float trace = lane_sum(n, [&](int i, float sum) { return sum + at(i, i); });
  const float lambda = std::fma(trace, damping / static_cast<float>(n), 1e-20f);
  for (int i = 0; i < n; ++i) at(i, i) = at(i, i) + lambda;
  for (int k = n - 1; k >= 0; --k) {
    const float inverse_pivot = 1.0f / at(k, k);
    for (int i = 0; i < k; ++i) {
      const float u = at(i, k) * inverse_pivot;
      for (int j = i; j < k; ++j) at(i, j) = std::fma(-u, at(j, k), at(i, j));
    }
    for (int i = 0; i < k; ++i) at(i, k) = at(i, k) * inverse_pivot;
    at(k, k) = 0.0f;
  }
}

}  // namespace scalar
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
