// What attention reads and how: queries, the memory of one KV head, options.
//
// A token is attended by the queries at its position and after it. Work is cut into chunks of fixed
// extent (the sink, each groups_per_chunk sealed groups, the tail); within a chunk groups are
// joined in order, then chunks are joined in order, so the result does not depend on who computes
// what, nor on the other queries of a call. The definition: scalar_attention.hpp. To call:
// attend.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "../format/tile_layout.hpp"
#include "softmax.hpp"
#include "tile_product.hpp"

namespace kvarn {

inline constexpr int groups_per_chunk = 8;

// Of queries; also the largest window.
inline constexpr std::int64_t max_position = std::int64_t{1} << 62;

// Tokens kept exact, their keys and values rotated. Any count.
template <class T>
struct exact_tokens {
  tokens_view<const T> keys = {};
  tokens_view<const T> values = {};
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

// Groups that are attended to one after another. `following` comes after them and is only fetched
// ahead of its use; null: nothing does.
struct sealed_run {
  const sealed_group* groups = nullptr;
  std::size_t count = 0;
  const sealed_group* following = nullptr;
};

// What one KV head has stored of a sequence. Positions ascend from the sink to the tail.
template <class T>
struct attention_memory {
  cache_format format = {};
  exact_tokens<T> sink = {};
  std::span<const sealed_group> sealed = {};
  exact_tokens<T> tail = {};
};

// `tokens` consecutive query tokens with `heads` query heads each, all of which share the KV head.
// The view has the heads of one query token after another, then those of the next one.
template <class T>
struct attention_queries {
  tokens_view<const T> vectors = {};
  int tokens = 1;
  int heads = 1;
  std::int64_t position = 0;     // of the first query token, 0 to max_position
  std::ptrdiff_t token_gap = 0;  // elements that lie between two query tokens beyond the stride
};

struct attention_options {
  float softmax_scale = 0.0f;          // above 0; most often 1/sqrt(key head_dim)
  float logit_soft_cap = 0.0f;         // cap * tanh(logit / cap); 0: none
  std::int64_t window = 0;             // tokens a query sees, itself and those before it; 0: all
  const float* sink_logits = nullptr;  // one per query head: joins the softmax without a value
  operand_precision precision = operand_precision::int16;
  bool queries_rotated = false;  // they come rotated
  bool rotate_output = true;     // false: the engine has folded the rotation into its weights
};

// One query on its way through the memory: the softmax-weighted sum so far, of weights
// 2^(score - maximum).
struct attention_row {
  const float* query = nullptr;  // key head_dim floats: rotated, times softmax_scale * log2(e)
  std::int64_t first_visible = 0;
  std::int64_t end_visible = 0;  // one past its own position
  float maximum = minus_infinity;
  float sum = 0.0f;         // of the weights
  float* values = nullptr;  // value head_dim floats: of the weighted values, rotated
};

// Exact tokens are joined in blocks of this many.
inline constexpr int exact_block = max_group;

}  // namespace kvarn
