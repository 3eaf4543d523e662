// The forward pass of a llama or qwen2 transformer.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "../executors/thread_pool.hpp"
#include "kv_memory.hpp"
#include "weights.hpp"

namespace kvarn_engine {

// Turns the pairs of channels of [tokens][heads][head_dim] by position * base^(-2i / head_dim),
// i = 0 .. head_dim / 2 - 1. `angles`: see rope_angles.
void rotate_pairs(float* x, int tokens, int heads, int head_dim, rope_pairing pairing,
                  std::span<const float> angles);

// cos and sin of tokens `position` .. `position` + tokens - 1: [tokens][head_dim / 2][2].
std::vector<float> rope_angles(std::int64_t position, int tokens, int head_dim, float base);

class transformer {
 public:
  // Throws std::runtime_error where weights do not fit their configuration. Weights and pool must
  // outlive it.
  transformer(const model_weights& weights, const kvarn_examples::thread_pool& pool);

  const model_config& config() const { return weights_->config; }

  // One step, to be committed or discarded: the tokens go through all layers at once, at positions
  // memory.length() and up. Writes their final hidden states, after the output norm, to `hidden`:
  // [tokens][hidden]. Throws std::runtime_error for a token outside of the vocabulary.
  void forward(std::span<const int> tokens, kv_memory& memory, float* hidden);

  // The same, and commits.
  void advance(std::span<const int> tokens, kv_memory& memory, float* hidden);

  // Many tokens in steps of at most `chunk`. `done` gets the tokens of a step before it and their
  // hidden states.
  void prefill(std::span<const int> tokens, int chunk, kv_memory& memory,
               const std::function<void(std::size_t first, std::span<const float> hidden)>& done);

  // [tokens][vocabulary] from [tokens][hidden].
  void logits(const float* hidden, int tokens, float* out) const;

  // Seconds that all calls spent in memory.attend and in memory.commit.
  double attention_seconds() const { return attention_seconds_; }
  double commit_seconds() const { return commit_seconds_; }

 private:
  void attention_block(const layer_weights& w, int layer, int tokens, std::span<const float> angles,
                       kv_memory& memory);
  void feed_forward_block(const layer_weights& w, int tokens);

  const model_weights* weights_;
  const kvarn_examples::thread_pool* pool_;
  double attention_seconds_ = 0;
  double commit_seconds_ = 0;
  // Of a step: [tokens][...].
  std::vector<float> residual_, normed_, queries_, keys_, values_, attended_, gate_, up_, delta_;
};

}  // namespace kvarn_engine
