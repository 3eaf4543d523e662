// The shape of a transformer that the engine can run.
#pragma once

#include <string>

namespace kvarn_engine {

// Which channels of a head RoPE turns together: 2i and 2i + 1, or i and i + head_dim / 2.
enum class rope_pairing { neighbours, halves };

struct model_config {
  std::string architecture;  // "llama" or "qwen2"
  int layers = 0;
  int hidden = 0;        // channels of the residual stream
  int feed_forward = 0;  // channels between gate/up and down
  int query_heads = 0;   // a multiple of kv_heads
  int kv_heads = 0;
  int head_dim = 0;  // even
  int vocabulary = 0;
  int context = 0;  // tokens that the model was trained for
  float rms_epsilon = 0;
  float rope_base = 0;
  rope_pairing pairing = rope_pairing::neighbours;

  int query_size() const { return query_heads * head_dim; }
  int kv_size() const { return kv_heads * head_dim; }
};

// Throws std::runtime_error that names the value where a number is out of range or numbers
// contradict each other.
void validate(const model_config& config);

}  // namespace kvarn_engine
