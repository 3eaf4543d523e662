// The second moment of a KV head's queries, and the factor by which error feedback weighs channels.
//
// Scores depend on q.k alone, so an error e of a key costs e^T C e on average, C = mean of q q^T
// over the queries, rotated as the keys are. Rounding a key's channels one after another and
// carrying each error into those that follow minimises that cost greedily, as GPTQ (arXiv
// 2210.17323) does for weights; the coefficients are the factor U of C + damping = (U + I) D (U +
// I)^T.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../config.hpp"
#include "../error.hpp"
#include "../format/float16.hpp"
#include "../format/tile_layout.hpp"
#include "../simd/on_target.hpp"
#include "hadamard.hpp"
#include "query_sums.hpp"
#include "tokens.hpp"

namespace kvarn {

inline namespace KVARN_ISA_NAMESPACE {

// The running sum of q q^T over the queries of one KV head (all query heads that share it). Feed it
// as queries are computed, or fill it once from a text and keep it: merging and copying are plain.
class query_moment {
 public:
  // Precondition: validate(tile_layout) accepts head_dim.
  explicit query_moment(int head_dim)
      : head_dim_(head_dim),
        sums_(static_cast<std::size_t>(head_dim) * static_cast<std::size_t>(head_dim)) {
    KVARN_ASSERT(hadamard_core(head_dim) != 0);
  }

  // A moment that was saved: `sums` as sums() gave it (what stands below the diagonal is left out).
  // Precondition, not checked: a sum of q q^T, that is positive semidefinite. By other sums keys
  // are rounded badly or plainly, into valid records.
  static result<query_moment> from_sums(int head_dim, std::span<const float> sums,
                                        std::uint64_t count) {
    if (status s = validate(tile_layout{.head_dim = head_dim}); !s.ok()) return s;
    query_moment moment(head_dim);
    if (sums.size() != moment.sums_.size())
      return failure(error_code::invalid_argument,
                     {"query moment has ", sums.size(), " sums; head_dim ", head_dim, " has ",
                      moment.sums_.size()});
    for (std::size_t i = 0; i < sums.size(); ++i)
      if (!std::isfinite(sums[i]))
        return failure(error_code::invalid_data, {"query moment sum ", i, " is not finite"});
    const auto n = static_cast<std::size_t>(head_dim);
    for (std::size_t row = 0; row < n; ++row)
      for (std::size_t col = row; col < n; ++col) moment.sums_[row * n + col] = sums[row * n + col];
    moment.count_ = count;
    return moment;
  }

  // Adds `count` queries, one per token of the view (the query heads of one token count as tokens).
  // `rotate`: false where they are rotated already. Not-finite values are replaced as in keys.
  // Adding in pieces gives the same sums as adding at once.
  template <class T>
  replaced_values add(tokens_view<T> queries, int count, bool rotate = true,
                      target on = default_target()) {
    count_ += static_cast<std::uint64_t>(count);
    return on_target::elements<typename tokens_view<T>::element>::add_queries(
        on, queries, count, rotate, head_dim_, sums_.data());
  }

  // Adds the queries of another moment. Precondition: the same head_dim.
  void merge(const query_moment& other) {
    KVARN_ASSERT(head_dim_ == other.head_dim_);
    for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i] = sums_[i] + other.sums_[i];
    count_ += other.count_;
  }

  int head_dim() const noexcept { return head_dim_; }
  std::uint64_t count() const noexcept { return count_; }

  // head_dim x head_dim, row-major; the entries below the diagonal are 0, their mirror counts.
  std::span<const float> sums() const noexcept { return sums_; }

 private:
  int head_dim_;
  std::uint64_t count_ = 0;
  std::vector<float> sums_;
};

// U of C + lambda I = (U + I) D (U + I)^T, strictly upper triangular, with
// lambda = damping * trace(C) / head_dim. The scale of C cancels, so sums do as well as means.
class query_factor {
 public:
  static constexpr float default_damping = 0.1f;

  // Of a moment without queries, or one that has no finite U: U = 0, which is plain rounding.
  explicit query_factor(const query_moment& moment, float damping = default_damping,
                        target on = default_target())
      : head_dim_(moment.head_dim()), upper_(moment.sums().begin(), moment.sums().end()) {
    std::vector<float> workspace(factor_workspace(head_dim_));
    on_target::factorize(on, upper_.data(), head_dim_, damping, workspace.data());
    if (!is_finite()) std::fill(upper_.begin(), upper_.end(), 0.0f);
  }

  int head_dim() const noexcept { return head_dim_; }

  // head_dim x head_dim, row-major.
  const float* upper() const noexcept { return upper_.data(); }

 private:
  // Of what stands above the diagonal. A sum of bits, because a loop over std::isfinite takes as
  // long as the factor itself.
  bool is_finite() const noexcept {
    const auto n = static_cast<std::size_t>(head_dim_);
    std::uint32_t carries = 0;  // the sign bit: of an infinity or a NaN
    for (std::size_t row = 0; row < n; ++row)
      for (std::size_t i = row * n + row + 1; i < (row + 1) * n; ++i)
        carries |= (bits_of(upper_[i]) & 0x7fffffffu) + 0x00800000u;
    return (carries >> 31) == 0;
  }

  int head_dim_;
  std::vector<float> upper_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
