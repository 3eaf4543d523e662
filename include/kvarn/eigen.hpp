// Eigen matrices in and out: the only header that needs Eigen (3.3 or newer).
//
// A matrix here is tokens x head_dim, one head vector per row, row-major or column-major, fixed or
// dynamic; arrays, maps, refs and blocks count as matrices. Its scalar is float, Eigen::half,
// Eigen::bfloat16, float16 or bfloat16; of other scalars hand over m.cast<float>().
//
// tokens(m) is the view that every function of the library takes. The functions below it allocate
// what they return, and check sizes.
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/attend.hpp"
#include "codec/hadamard.hpp"
#include "codec/tile_codec.hpp"
#include "codec/tokens.hpp"
#include "config.hpp"
#include "error.hpp"
#include "format/float16.hpp"
#include "format/tile_layout.hpp"
#include "format/tile_view.hpp"

namespace kvarn {

// What the functions below return: one head vector per row, contiguous.
template <class Scalar>
using head_matrix = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

namespace detail {

// The library's type with the bits of an Eigen scalar.
template <class Scalar>
struct element_of {
  static_assert(sizeof(Scalar) == 0,
                "the scalar must be float, Eigen::half, Eigen::bfloat16, kvarn::float16 or "
                "kvarn::bfloat16; of other scalars use m.cast<float>()");
};
template <>
struct element_of<float> {
  using type = float;
};
template <>
struct element_of<float16> {
  using type = float16;
};
template <>
struct element_of<bfloat16> {
  using type = bfloat16;
};
template <>
struct element_of<Eigen::half> {
  using type = float16;
};
#if EIGEN_VERSION_AT_LEAST(3, 4, 0)
template <>
struct element_of<Eigen::bfloat16> {
  using type = bfloat16;
};
#endif

template <class Matrix>
inline constexpr bool has_memory = (std::remove_cvref_t<Matrix>::Flags & Eigen::DirectAccessBit) !=
                                   0;

template <class Matrix>
inline constexpr bool owns_memory =
    std::is_base_of_v<Eigen::PlainObjectBase<std::remove_cvref_t<Matrix>>,
                      std::remove_cvref_t<Matrix>>;

}  // namespace detail

inline namespace KVARN_ISA_NAMESPACE {

// The rows of `m` as tokens, without a copy, at any strides; tokens_view<const T> where m cannot be
// written. An expression without memory (a product, a cast) does not compile: use m.eval().
template <class Matrix>
auto tokens(Matrix&& m) {
  static_assert(detail::has_memory<Matrix>, "an expression has no memory: use .eval()");
  static_assert(std::is_lvalue_reference_v<Matrix> || !detail::owns_memory<Matrix>,
                "the matrix would be gone before its view");
  using pointer = decltype(m.data());
  using scalar = std::remove_const_t<std::remove_pointer_t<pointer>>;
  using element = typename detail::element_of<scalar>::type;
  static_assert(sizeof(element) == sizeof(scalar));
  using target =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<pointer>>, const element, element>;
  // Views read and write through memcpy, so the type of the memory does not matter.
  return tokens_view<target>{reinterpret_cast<target*>(m.data()), m.rowStride(), m.colStride()};
}

namespace detail {

// `m` itself where it has memory, else its value.
template <class Derived>
decltype(auto) with_memory(const Eigen::DenseBase<Derived>& m) {
  if constexpr (has_memory<Derived>)
    return m.derived();
  else
    return head_matrix<typename Derived::Scalar>(m.derived());
}

inline std::string extent(Eigen::Index rows, Eigen::Index cols) {
  return std::to_string(rows) + " x " + std::to_string(cols);
}

inline status check_extent(const char* name, Eigen::Index rows, Eigen::Index cols, int tokens,
                           int head_dim) {
  if (rows == tokens && cols == head_dim) return {};
  return {error_code::invalid_argument, std::string(name) + " matrix is " + extent(rows, cols) +
                                            "; it must be " + extent(tokens, head_dim) +
                                            " (tokens x head_dim)"};
}

}  // namespace detail

// The record of one tile, layout.group x layout.head_dim numbers. `report`, unless null, receives
// what was replaced.
template <class Derived>
result<std::vector<std::byte>> encode_matrix(const Eigen::DenseBase<Derived>& m,
                                             const tile_layout& layout,
                                             const encode_options& options = {},
                                             encode_report* report = nullptr) {
  auto encoder = tile_encoder::make(layout, options);
  if (!encoder.ok()) return encoder.why();
  if (status s = detail::check_extent("token", m.rows(), m.cols(), layout.group, layout.head_dim);
      !s.ok())
    return s;
  std::vector<std::byte> record(layout.record_bytes());
  const auto& held = detail::with_memory(m);
  const encode_report made = encoder.value()(tokens(held), record.data());
  if (report != nullptr) *report = made;
  return record;
}

// The group x head_dim numbers of a record, which is checked first. `rotate_back`: false leaves the
// rows rotated.
template <class Scalar = float>
result<head_matrix<Scalar>> decode_matrix(std::span<const std::byte> record,
                                          const tile_layout& layout, bool rotate_back = true) {
  const const_tile_view tile{record.data(), layout};
  if (status s = validate_record(tile, record.size()); !s.ok()) return s;
  head_matrix<Scalar> m(layout.group, layout.head_dim);
  decode_tile(tile, tokens(m), rotate_back);
  return m;
}

// Rotates every row in place: m <- m H / sqrt(head_dim), which is its own inverse. For sinks, tails
// and moments, which hold rotated vectors. Precondition: all numbers are finite.
template <class Matrix>
status hadamard_rows(Matrix&& m) {
  const auto head_dim = static_cast<int>(m.cols());
  if (hadamard_core(head_dim) == 0)
    return {error_code::invalid_argument,
            "matrix is " + detail::extent(m.rows(), m.cols()) +
                "; the number of columns must be 1, 12, 20 or 28 times a power of two"};
  auto row = tokens(m);
  std::vector<float> vector(static_cast<std::size_t>(head_dim));
  for (Eigen::Index r = 0; r < m.rows(); ++r) {
    for (int d = 0; d < head_dim; ++d) vector[static_cast<std::size_t>(d)] = row.load(0, d);
    hadamard(vector.data(), head_dim);
    for (int d = 0; d < head_dim; ++d) row.store(0, d, vector[static_cast<std::size_t>(d)]);
    row = row.from(1);
  }
  return {};
}

// Attends from the queries of one KV head: row token * heads + head of `queries` is one query head
// of one of consecutive tokens, the first of which stands at `position`. The result has as many
// rows, and value_head_dim columns. `lse`, unless null, receives a log-sum-exp per row.
template <class Derived, class T>
result<head_matrix<float>> attend_matrix(const Eigen::DenseBase<Derived>& queries, int heads,
                                         std::int64_t position, const attention_memory<T>& memory,
                                         const attention_options& options,
                                         std::vector<float>* lse = nullptr) {
  const cache_format& format = memory.format;
  if (status s = validate(format); !s.ok()) return s;
  if (heads < 1 || queries.rows() % heads != 0)
    return status{error_code::invalid_argument,
                  "query matrix has " + std::to_string(queries.rows()) +
                      " rows; it must be a multiple of the heads, of which there are " +
                      std::to_string(heads)};
  const auto rows = static_cast<int>(queries.rows());
  if (status s =
          detail::check_extent("query", queries.rows(), queries.cols(), rows, format.key_head_dim);
      !s.ok())
    return s;
  if (!(options.softmax_scale > 0.0f))
    return status{
        error_code::invalid_argument,
        "softmax_scale is " + std::to_string(options.softmax_scale) + "; it must be above 0"};
  const auto& held = detail::with_memory(queries);
  head_matrix<float> out(rows, format.value_head_dim);
  if (lse != nullptr) lse->resize(static_cast<std::size_t>(rows));
  std::vector<float> workspace(attention_workspace(format));
  const auto vectors = tokens(held);
  using element = typename decltype(vectors)::element;
  attend(attention_queries<element>{vectors, rows / heads, heads, position}, memory, options,
         tokens(out), lse != nullptr ? lse->data() : nullptr, workspace.data());
  return out;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
