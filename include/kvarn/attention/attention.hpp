// Attention of one KV head over a sink, sealed tiles and a tail, in plain scalar code.
//
// This is the definition: every faster version gives the same bits. Keys run from position 0 up; a
// token is attended by the queries at its position and after it. Work is cut into chunks of fixed
// extent (the sink, each tiles_per_chunk sealed groups, the tail); within a chunk groups are joined
// in order, then chunks are joined in order, so the result does not depend on who computes what.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "../codec/arithmetic.hpp"
#include "../codec/hadamard.hpp"
#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
#include "softmax.hpp"
#include "tile_product.hpp"

namespace kvarn {

inline constexpr int groups_per_chunk = 8;

// Tokens kept exact, their keys and values rotated. Any count.
template <class T>
struct exact_tokens {
  tokens_view<const T> keys;
  tokens_view<const T> values;
  std::int64_t position = 0;  // of the first token
  int count = 0;
};

// One group of tokens in packed form.
struct sealed_group {
  const std::byte* keys = nullptr;    // a record of cache_format::key_layout()
  const std::byte* values = nullptr;  // a record of cache_format::value_layout()
  std::int64_t position = 0;          // of the first token
  int count = 0;                      // tokens that are valid, from the first on; at most the group
};

// What one KV head has stored of a sequence. Positions ascend from the sink to the tail.
template <class T>
struct attention_memory {
  cache_format format;
  exact_tokens<T> sink;
  std::span<const sealed_group> sealed;
  exact_tokens<T> tail;
};

// `tokens` consecutive query tokens with `heads` query heads each, all of which share the KV head.
// Vector (token, head) is the view's token number token * heads + head.
template <class T>
struct attention_queries {
  tokens_view<const T> vectors;
  int tokens = 1;
  int heads = 1;
  std::int64_t position = 0;  // of the first query token
};

struct attention_options {
  float softmax_scale = 0.0f;          // most often 1/sqrt(key head_dim)
  float logit_soft_cap = 0.0f;         // cap * tanh(logit / cap); 0: none
  std::int64_t window = 0;             // tokens a query sees, itself and those before it; 0: all
  const float* sink_logits = nullptr;  // one per query head: joins the softmax without a value
  operand_precision precision = operand_precision::int16;
  bool queries_rotated = false;  // they come rotated
  bool rotate_output = true;     // false: the engine has folded the rotation into its weights
};

inline namespace KVARN_ISA_NAMESPACE {

// Floats of workspace that attend needs.
constexpr std::size_t attention_workspace(const cache_format& format) {
  return static_cast<std::size_t>(2 * format.key_head_dim + 3 * format.value_head_dim +
                                  2 * max_group);
}

namespace detail {

// A softmax-weighted sum so far: of weights 2^(score - maximum), their sum and the values' sum.
struct partial_attention {
  float maximum;
  float sum;
  float* values;  // value_head_dim, rotated

  void clear(int dim) {
    maximum = minus_infinity;
    sum = 0.0f;
    std::fill(values, values + dim, 0.0f);
  }

  // Joins another partial result, after this one.
  void join(const partial_attention& other, int dim) {
    if (other.maximum == minus_infinity) return;
    const softmax_join weights = join_maxima(maximum, other.maximum);
    maximum = weights.maximum;
    sum = std::fma(sum, weights.first, other.sum * weights.second);
    for (int d = 0; d < dim; ++d)
      values[d] = std::fma(values[d], weights.first, other.values[d] * weights.second);
  }
};

// What is the same for every group that one query meets.
struct query_state {
  const float* query;  // rotated, times softmax_scale * log2(e)
  std::int64_t first_visible;
  std::int64_t end_visible;  // one past its own position
  float soft_cap;            // in units of log 2
  float* scores;             // max_group
  float* values;             // value_head_dim
};

inline float soft_capped(float score, float cap) {
  if (cap == 0.0f) return score;
  // tanh(y) = 1 - 2 / (e^(2y) + 1)
  const float power = exp2_of(clamp((score / cap) * (2.0f * log2_e), -60.0f, 60.0f));
  return rounded(cap * (1.0f - 2.0f / (power + 1.0f)));
}

// Turns scores of tokens [0, count) into weights 2^(score - maximum) and returns the maximum;
// weights of tokens outside [first, end) are 0. Precondition: first < end.
inline float weigh_scores(float* scores, int first, int end, int count, float cap) {
  float maximum = minus_infinity;
  for (int t = first; t < end; ++t) {
    scores[t] = soft_capped(scores[t], cap);
    maximum = max_of(maximum, scores[t]);
  }
  for (int t = 0; t < count; ++t)
    scores[t] = t >= first && t < end ? exp2_of(scores[t] - maximum) : 0.0f;
  return maximum;
}

inline float sum_weights(const float* weights, int count) {
  return lane_sum(count, [weights](int t, float sum) { return sum + weights[t]; });
}

// The part of [position, position + count) that a query sees, relative to position.
struct visible_range {
  int first, end;
  visible_range(const query_state& state, std::int64_t position, int count)
      : first(static_cast<int>(std::clamp<std::int64_t>(state.first_visible - position, 0, count))),
        end(static_cast<int>(std::clamp<std::int64_t>(state.end_visible - position, 0, count))) {}
  bool empty() const { return first >= end; }
};

inline void attend_sealed(const query_state& state, const cache_format& format,
                          const sealed_group& group, operand_precision precision,
                          partial_attention& total) {
  const visible_range visible(state, group.position, group.count);
  if (visible.empty()) return;
  const const_tile_view keys{group.keys, format.key_layout()};
  const const_tile_view values{group.values, format.value_layout()};
  folded_operand operand;
  fold_operand(keys, state.query, precision, operand);
  tile_product(keys, operand, visible.end, state.scores);
  const float maximum =
      weigh_scores(state.scores, visible.first, visible.end, format.group, state.soft_cap);

  const float sum = sum_weights(state.scores, format.group);
  fold_operand(values, state.scores, precision, operand);
  const softmax_join weights = join_maxima(total.maximum, maximum);
  operand.unit = operand.unit * weights.second;
  operand.bias = operand.bias * weights.second;
  tile_product(values, operand, format.value_head_dim, state.values);
  total.maximum = weights.maximum;
  total.sum = std::fma(total.sum, weights.first, sum * weights.second);
  for (int d = 0; d < format.value_head_dim; ++d)
    total.values[d] = std::fma(total.values[d], weights.first, state.values[d]);
}

// Exact tokens are joined in blocks of max_group.
template <class T>
void attend_exact(const query_state& state, const cache_format& format,
                  const exact_tokens<T>& tokens, partial_attention& total) {
  for (int start = 0; start < tokens.count; start += max_group) {
    const int count = (std::min)(max_group, tokens.count - start);
    const visible_range visible(state, tokens.position + start, count);
    if (visible.empty()) continue;
    for (int t = visible.first; t < visible.end; ++t)
      state.scores[t] = lane_sum(format.key_head_dim, [&](int d, float sum) {
        return std::fma(state.query[d], tokens.keys.load(start + t, d), sum);
      });
    const float maximum =
        weigh_scores(state.scores, visible.first, visible.end, count, state.soft_cap);
    std::fill(state.values, state.values + format.value_head_dim, 0.0f);
    for (int t = visible.first; t < visible.end; ++t)
      for (int d = 0; d < format.value_head_dim; ++d)
        state.values[d] =
            std::fma(state.scores[t], tokens.values.load(start + t, d), state.values[d]);
    total.join({maximum, sum_weights(state.scores, count), state.values}, format.value_head_dim);
  }
}

}  // namespace detail

// Attends from every query to the memory of one KV head. Writes query (token, head) to `out` token
// number token * heads + head, value_head_dim channels, and the log of the sum of exponentiated
// logits in nats to lse[token * heads + head] unless lse is null. A query that sees nothing gets
// zeros and -infinity. Not-finite query values are replaced as in keys. `workspace`:
// attention_workspace(memory.format) floats. Preconditions: validate(memory.format) is ok; every
// count fits its memory; sealed counts are in [0, group]; options.softmax_scale > 0.
template <class Q, class T, class O>
void attend(const attention_queries<Q>& queries, const attention_memory<T>& memory,
            const attention_options& options, tokens_view<O> out, float* lse, float* workspace) {
  const cache_format& format = memory.format;
  const int dim = format.value_head_dim;
  KVARN_ASSERT(options.softmax_scale > 0.0f);
  float* const query = workspace;
  detail::partial_attention total{0.0f, 0.0f, query + format.key_head_dim};
  detail::partial_attention chunk{0.0f, 0.0f, total.values + dim};
  detail::query_state state{};
  state.query = query;
  state.values = chunk.values + dim;
  state.scores = state.values + dim;
  state.soft_cap = options.logit_soft_cap * log2_e;

  for (int index = 0; index < queries.tokens * queries.heads; ++index) {
    replaced_values replaced;
    load_token(queries.vectors, index, format.key_head_dim, query, replaced);
    float unit = options.softmax_scale * log2_e;
    if (!options.queries_rotated) {
      hadamard_unnormalized(query, format.key_head_dim);
      unit = unit * hadamard_norm(format.key_head_dim);
    }
    for (int d = 0; d < format.key_head_dim; ++d) query[d] = rounded(query[d] * unit);
    state.end_visible = queries.position + index / queries.heads + 1;
    state.first_visible = options.window > 0 ? state.end_visible - options.window : 0;

    total.clear(dim);
    detail::attend_exact(state, format, memory.sink, total);
    for (std::size_t first = 0; first < memory.sealed.size(); first += groups_per_chunk) {
      const std::size_t count =
          (std::min)(memory.sealed.size() - first, static_cast<std::size_t>(groups_per_chunk));
      chunk.clear(dim);
      for (const sealed_group& group : memory.sealed.subspan(first, count))
        detail::attend_sealed(state, format, group, options.precision, chunk);
      total.join(chunk, dim);
    }
    chunk.clear(dim);
    detail::attend_exact(state, format, memory.tail, chunk);
    total.join(chunk, dim);

    if (options.sink_logits != nullptr) {
      const float logit = options.sink_logits[index % queries.heads] * log2_e;
      const softmax_join weights = join_maxima(total.maximum, logit);
      total.sum = std::fma(total.sum, weights.first, weights.second);
      for (int d = 0; d < dim; ++d) total.values[d] = rounded(total.values[d] * weights.first);
      total.maximum = weights.maximum;
    }
    const bool empty = total.maximum == minus_infinity;
    const float inverse = empty ? 0.0f : 1.0f / total.sum;
    if (options.rotate_output) {
      hadamard_unnormalized(total.values, dim);
      const float norm = inverse * hadamard_norm(dim);
      for (int d = 0; d < dim; ++d) out.store(index, d, total.values[d] * norm);
    } else {
      for (int d = 0; d < dim; ++d) out.store(index, d, total.values[d] * inverse);
    }
    if (lse != nullptr) lse[index] = empty ? minus_infinity : log_of(total.sum, total.maximum);
  }
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
