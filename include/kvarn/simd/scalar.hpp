// The target without vector instructions: the definitions themselves.
#pragma once

#include "kernel_includes.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace scalar {

using kvarn::decode_row;
using kvarn::decode_tile;
using kvarn::decode_tokens;
using kvarn::encode_tile;
using kvarn::encode_workspace;
using kvarn::hadamard;
using kvarn::hadamard_unnormalized;
using kvarn::normalize_workspace;
using kvarn::variance_normalize;

template <class T>
replaced_values add_queries(tokens_view<T> queries, int count, bool rotate, int head_dim,
                            float* sums) {
  const auto size = static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head_dim);
  query_moment moment = query_moment::from_sums(head_dim, {sums, size}, 0).value();
  const replaced_values replaced = moment.add(queries, count, rotate);
  std::memcpy(sums, moment.sums().data(), size * sizeof(float));
  return replaced;
}

constexpr std::size_t factor_workspace(int) { return 0; }

inline void factorize(float* matrix, int head_dim, float damping, float*) {
  const auto size = static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head_dim);
  const query_factor factor(query_moment::from_sums(head_dim, {matrix, size}, 0).value(), damping);
  std::memcpy(matrix, factor.upper(), size * sizeof(float));
}

#include "kernels.inl"

}  // namespace scalar
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
