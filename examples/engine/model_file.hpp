// A model out of a GGUF file, its weights dequantised to FP32.
#pragma once

#include "gguf.hpp"
#include "weights.hpp"

namespace kvarn_engine {

// The configuration of architecture llama or qwen2. Throws kvarn::error or std::runtime_error that
// names the key or tensor where something is missing, contradictory or not supported (other
// architectures, experts, RoPE scaling, sliding windows).
model_config read_config(const gguf_file& file);

// The configuration and all weights.
model_weights load_model(const gguf_file& file);

}  // namespace kvarn_engine
