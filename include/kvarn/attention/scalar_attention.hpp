// Attention in plain scalar code: the definition. Every faster version gives the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../codec/arithmetic.hpp"
#include "../codec/hadamard.hpp"
#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
#include "attention.hpp"
#include "softmax.hpp"
#include "tile_product.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// The tokens of [position, position + count) that a row sees, relative to position.
struct visible_range {
  int first;
  int end;

  visible_range(const attention_row& row, std::int64_t position, int count)
      : first(bounded(row.first_visible - position, count)),
        end(bounded(row.end_visible - position, count)) {}

  bool empty() const { return first >= end; }

 private:
  static int bounded(std::int64_t at, int count) {
    return static_cast<int>(at < 0 ? 0 : at > count ? count : at);
  }
};

namespace scalar {

// query[d] = rotated query times softmax_scale * log2(e). Not-finite values are replaced as in
// keys.
template <class T>
void prepare_query(tokens_view<T> queries, int index, int head_dim,
                   const attention_options& options, float* query) {
  replaced_values replaced;
  load_token(queries, index, head_dim, query, replaced);
  float unit = options.softmax_scale * log2_e;
  if (!options.queries_rotated) {
    hadamard_unnormalized(query, head_dim);
    unit = unit * hadamard_norm(head_dim);
  }
  for (int d = 0; d < head_dim; ++d) query[d] = query[d] * unit;
}

// cap * tanh(score / cap); both in units of log 2.
inline float soft_capped(float score, float cap) {
  // tanh(y) = 1 - 2 / (e^(2y) + 1)
  const float power = exp2_of(clamp((score / cap) * (2.0f * log2_e), -60.0f, 60.0f));
  return rounded(cap * (1.0f - 2.0f / (power + 1.0f)));
}

// Turns `count` scores into weights 2^(score - maximum), 0 for tokens outside `visible`. Writes
// their sum and returns the maximum. Precondition: visible is not empty.
inline float weigh(float* scores, const visible_range& visible, int count, float cap, float& sum) {
  float maximum = minus_infinity;
  for (int t = visible.first; t < visible.end; ++t) {
    if (cap != 0.0f) scores[t] = soft_capped(scores[t], cap);
    maximum = max_of(maximum, scores[t]);
  }
  for (int t = 0; t < count; ++t)
    scores[t] = t >= visible.first && t < visible.end ? exp2_of(scores[t] - maximum) : 0.0f;
  sum = lane_sum(count, [scores](int t, float partial) { return partial + scores[t]; });
  return maximum;
}

// Takes rows through the sealed groups of one chunk, in order. `cap` in units of log 2, 0: none.
inline void attend_sealed(const cache_format& format, const sealed_run& run, float cap,
                          operand_precision precision, attention_row* rows, int row_count) {
  const int dim = format.value_head_dim;
  float scores[max_group];
  float products[max_head_dim];
  folded_operand operand;
  for (const sealed_group* group = run.groups; group < run.groups + run.count; ++group) {
    const const_tile_view keys{group->keys, format.key_layout()};
    const const_tile_view values{group->values, format.value_layout()};
    for (attention_row* row = rows; row < rows + row_count; ++row) {
      const visible_range visible(*row, group->position, group->count);
      if (visible.empty()) continue;
      fold_operand(keys, row->query, precision, operand);
      tile_product(keys, operand, visible.end, scores);
      float sum = 0.0f;
      const float maximum = weigh(scores, visible, format.group, cap, sum);

      fold_operand(values, scores, precision, operand);
      const softmax_join join = join_maxima(row->maximum, maximum);
      operand.unit = operand.unit * join.second;
      operand.bias = operand.bias * join.second;
      tile_product(values, operand, dim, products);
      row->maximum = join.maximum;
      row->sum = std::fma(row->sum, join.first, sum * join.second);
      for (int d = 0; d < dim; ++d)
        row->values[d] = std::fma(row->values[d], join.first, products[d]);
    }
  }
}

// Joins a later part of the memory into `row`.
inline void join_row(attention_row& row, const attention_row& later, int dim) {
  if (later.maximum == minus_infinity) return;
  const softmax_join join = join_maxima(row.maximum, later.maximum);
  row.maximum = join.maximum;
  row.sum = std::fma(row.sum, join.first, later.sum * join.second);
  for (int d = 0; d < dim; ++d)
    row.values[d] = std::fma(row.values[d], join.first, later.values[d] * join.second);
}

// Takes rows through exact tokens, in blocks of exact_block.
template <class T>
void attend_exact(const cache_format& format, const exact_tokens<T>& tokens, float cap,
                  attention_row* rows, int row_count) {
  const int dim = format.value_head_dim;
  float weights[exact_block];
  float values[max_head_dim];
  for (int start = 0; start < tokens.count; start += exact_block) {
    const int count = (std::min)(exact_block, tokens.count - start);
    for (attention_row* row = rows; row < rows + row_count; ++row) {
      const visible_range visible(*row, tokens.position + start, count);
      if (visible.empty()) continue;
      for (int t = visible.first; t < visible.end; ++t)
        weights[t] = lane_sum(format.key_head_dim, [&](int d, float sum) {
          return std::fma(row->query[d], tokens.keys.load(start + t, d), sum);
        });
      attention_row part;
      part.values = values;
      part.maximum = weigh(weights, visible, count, cap, part.sum);
      std::fill(values, values + dim, 0.0f);
      for (int t = visible.first; t < visible.end; ++t)
        for (int d = 0; d < dim; ++d)
          values[d] = std::fma(weights[t], tokens.values.load(start + t, d), values[d]);
      join_row(*row, part, dim);
    }
  }
}

// Lets a learned logit (in nats) take part in the softmax without a value.
inline void join_sink_logit(attention_row& row, float logit, int dim) {
  const softmax_join join = join_maxima(row.maximum, rounded(logit * log2_e));
  row.maximum = join.maximum;
  row.sum = std::fma(row.sum, join.first, join.second);
  for (int d = 0; d < dim; ++d) row.values[d] = rounded(row.values[d] * join.first);
}

// Divides by the sum, rotates back and stores. Changes row.values.
template <class T>
void finish_row(const attention_row& row, int dim, bool rotate, tokens_view<T> out, int index) {
  float norm = row.maximum == minus_infinity ? 0.0f : 1.0f / row.sum;
  if (rotate) {
    hadamard_unnormalized(row.values, dim);
    norm = norm * hadamard_norm(dim);
  }
  for (int d = 0; d < dim; ++d) out.store(index, d, row.values[d] * norm);
}

}  // namespace scalar
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
