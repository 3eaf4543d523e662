// Which tokens and layers stay exact (FP16) beside those that a method quantises.
#pragma once

#include <cstddef>
#include <numeric>

#include "../config.hpp"
#include "../format/tile_layout.hpp"

namespace kvarn {

// Of T tokens the first `sink` are exact; of the rest as many are quantised, from the oldest on, as
// are a multiple of `step` and leave at least `tail`.
struct exact_rule {
  std::size_t sink = 0;
  std::size_t tail = 0;
  std::size_t step = 1;  // positive
};

// Tokens first <= t < end.
struct token_range {
  std::size_t first = 0;
  std::size_t end = 0;

  KVARN_INLINE constexpr std::size_t count() const { return end - first; }
};

// What stays exact while a model runs.
struct exact_policy {
  exact_rule keys;
  exact_rule values;
  int edge_layers = 0;  // so many first layers and so many last ones

  KVARN_INLINE constexpr const exact_rule& of(tile_kind kind) const {
    return kind == tile_kind::key ? keys : values;
  }
};

inline namespace KVARN_ISA_NAMESPACE {

// The tokens that are quantised, where `together` of them must be quantised at once.
// Precondition: exact.step and together are positive.
constexpr token_range quantised_tokens(const exact_rule& exact, std::size_t together,
                                       std::size_t tokens) {
  const std::size_t step = std::lcm(exact.step, together);
  const std::size_t first = exact.sink < tokens ? exact.sink : tokens;
  const std::size_t after_sink = tokens - first;
  const std::size_t old = exact.tail < after_sink ? after_sink - exact.tail : 0;
  return {first, first + old / step * step};
}

constexpr bool is_exact_layer(const exact_policy& policy, int layer, int layers) {
  return layer < policy.edge_layers || layer >= layers - policy.edge_layers;
}

// One sink, one tail and one step for all: how the KVarN paper (arXiv 2606.03458) runs every
// method, so that none gains from the tokens that it leaves exact.
constexpr exact_policy equal_for_all(std::size_t sink, std::size_t tail, std::size_t step) {
  return {.keys = {sink, tail, step}, .values = {sink, tail, step}};
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
