// What the transformer needs of a KV cache: one sequence that it appends to and attends from.
#pragma once

#include <cstdint>

namespace kvarn_engine {

// One layer's vectors of the tokens of a step. Keys and queries after RoPE.
struct attention_step {
  int tokens = 0;
  const float* queries = nullptr;  // [tokens][query_heads][head_dim]
  const float* keys = nullptr;     // [tokens][kv_heads][head_dim]
  const float* values = nullptr;   // [tokens][kv_heads][head_dim]
  float* out = nullptr;            // [tokens][query_heads][head_dim]
};

// A step: attend once in every layer, in order, with the same number of tokens; then commit or
// discard.
class kv_memory {
 public:
  virtual ~kv_memory() = default;

  // Appends the step's keys and values to a layer, then attends from its queries to all tokens of
  // the layer under the causal mask, with softmax scale 1/sqrt(head_dim).
  virtual void attend(int layer, const attention_step& step) = 0;

  // Ends the step. Complete groups of tokens may be quantised now, and only now.
  virtual void commit() = 0;

  // Forgets the tokens of the step.
  virtual void discard() = 0;

  // Committed tokens: the position of the next one.
  virtual std::int64_t length() const = 0;
};

}  // namespace kvarn_engine
