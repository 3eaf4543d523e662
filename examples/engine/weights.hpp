// The weights of a model in FP32, as the transformer reads them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "model_config.hpp"

namespace kvarn_engine {

// Row-major [rows][cols]; y = W x has one row per output.
struct matrix {
  int rows = 0;
  int cols = 0;
  std::vector<float> values;

  const float* row(int r) const {
    return values.data() + static_cast<std::size_t>(r) * static_cast<std::size_t>(cols);
  }
};

struct layer_weights {
  std::vector<float> attention_norm;                    // [hidden]
  matrix query, key, value;                             // [heads * head_dim][hidden]
  std::vector<float> query_bias, key_bias, value_bias;  // [heads * head_dim], or empty
  matrix output;                                        // [hidden][query_heads * head_dim]
  std::vector<float> feed_forward_norm;                 // [hidden]
  matrix gate, up;                                      // [feed_forward][hidden]
  matrix down;                                          // [hidden][feed_forward]
};

struct model_weights {
  model_config config;
  matrix embedding;  // [vocabulary][hidden]
  std::vector<layer_weights> layers;
  std::vector<float> output_norm;  // [hidden]
  matrix output;                   // [vocabulary][hidden]; empty: the embedding (tied)

  const matrix& unembedding() const { return output.values.empty() ? embedding : output; }
};

// Throws std::runtime_error where the configuration is invalid or a tensor has another shape than
// it asks for.
void validate(const model_weights& weights);

}  // namespace kvarn_engine
