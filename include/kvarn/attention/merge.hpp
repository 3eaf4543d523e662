// Merging attention over disjoint parts of a memory by their log-sum-exp, as engines do that spread
// one sequence over devices, share a prefix, or compute part of it elsewhere.
#pragma once

#include <cmath>

#include "../codec/arithmetic.hpp"
#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "softmax.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// Merges rows 0 .. rows - 1 of `other` (outputs of `dim` channels and log-sum-exps in nats, as
// attend writes them) into `out` and `lse`. The order of the two matters only in rounding. A row
// without anything visible has lse -infinity and changes nothing. Precondition: no lse is NaN or
// +infinity.
template <class T>
void merge_attention(tokens_view<T> out, float* lse, tokens_view<const T> other,
                     const float* other_lse, int rows, int dim) {
  for (int r = 0; r < rows; ++r) {
    if (other_lse[r] == minus_infinity) continue;
    const float maximum = max_of(lse[r], other_lse[r]);
    const float weight = exp2_of((lse[r] - maximum) * log2_e);
    const float other_weight = exp2_of((other_lse[r] - maximum) * log2_e);
    const float sum = weight + other_weight;
    const float share = weight / sum;
    const float other_share = other_weight / sum;
    for (int d = 0; d < dim; ++d)
      out.store(r, d, std::fma(out.load(r, d), share, rounded(other.load(r, d) * other_share)));
    lse[r] = maximum + log_of(sum, 0.0f);
  }
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
