// What a method costs on a head, and its mean over heads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "heads.hpp"
#include "kvarn/metrics.hpp"
#include "methods.hpp"

namespace kvarn_demo {

// Sizes and errors of the tokens that were quantised, and errors of the attention of the last
// queries (`tail` of them, all query heads) over all tokens. kvarn/metrics.hpp defines the errors.
struct evaluation {
  stored_size key_size;
  stored_size value_size;
  std::optional<double> encode_us_per_tile;
  double k_rel_sq_error = 0;
  double v_rel_sq_error = 0;
  double e_m_share = 0;                   // of magnitude in the squared error of keys
  double attention_kl = 0;                // nats
  double output_rel_sq_error = 0;         // of the attention output
  double output_rel_sq_error_v_only = 0;  // the same with exact keys

  stored_size size() const { return key_size + value_size; }
};

evaluation evaluate(const head& h, const method& m, int repeats = 1);

// Sums of the sizes, geometric means of the errors and of the share of magnitude, arithmetic mean
// of the time. Precondition: not empty, all of one method.
evaluation mean_over_heads(std::span<const evaluation> heads);

// implementation

inline evaluation evaluate(const head& h, const method& m, int repeats) {
  const quantised_head quantised = quantise(h, m, repeats);
  const auto exact_keys = h.quantised_part(h.keys, h.key_dim);
  const auto approx_keys = h.quantised_part(quantised.keys, h.key_dim);
  const auto attention = kvarn::compare_attention({.tokens = h.tokens,
                                                   .query_heads = h.query_heads,
                                                   .key_dim = h.key_dim,
                                                   .value_dim = h.value_dim,
                                                   .queries = h.measured_queries(),
                                                   .keys = h.keys,
                                                   .values = h.values,
                                                   .approx_keys = quantised.keys,
                                                   .approx_values = quantised.values});

  evaluation e;
  e.key_size = quantised.key_size;
  e.value_size = quantised.value_size;
  e.encode_us_per_tile = quantised.encode_us_per_tile;
  e.k_rel_sq_error = kvarn::relative_squared_error(exact_keys, approx_keys);
  e.v_rel_sq_error = kvarn::relative_squared_error(h.quantised_part(h.values, h.value_dim),
                                                   h.quantised_part(quantised.values, h.value_dim));
  e.e_m_share = kvarn::split_error(exact_keys, approx_keys, h.key_dim).magnitude_share();
  e.attention_kl = (std::max)(attention.kl, 0.0);  // of equal softmaxes rounding can be below
  e.output_rel_sq_error = attention.output;
  e.output_rel_sq_error_v_only = attention.output_exact_keys;
  return e;
}

inline evaluation mean_over_heads(std::span<const evaluation> heads) {
  const auto count = static_cast<double>(heads.size());
  evaluation mean;
  for (const evaluation& e : heads) {
    mean.key_size = mean.key_size + e.key_size;
    mean.value_size = mean.value_size + e.value_size;
    if (e.encode_us_per_tile)
      mean.encode_us_per_tile =
          mean.encode_us_per_tile.value_or(0.0) + *e.encode_us_per_tile / count;
  }
  for (const auto field :
       {&evaluation::k_rel_sq_error, &evaluation::v_rel_sq_error, &evaluation::e_m_share,
        &evaluation::attention_kl, &evaluation::output_rel_sq_error,
        &evaluation::output_rel_sq_error_v_only}) {
    double sum_of_logs = 0;
    for (const evaluation& e : heads) sum_of_logs += std::log(e.*field);
    mean.*field = std::exp(sum_of_logs / count);
  }
  return mean;
}

}  // namespace kvarn_demo
