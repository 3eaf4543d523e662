#include "model_config.hpp"

#include <cmath>
#include <stdexcept>

namespace kvarn_engine {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& value,
                         const std::string& allowed) {
  throw std::runtime_error("model: " + what + " is " + value + "; it must be " + allowed);
}

void check_count(const char* what, int value, int most) {
  if (value < 1 || value > most)
    refuse(what, std::to_string(value), "1 to " + std::to_string(most));
}

}  // namespace

void validate(const model_config& config) {
  if (config.architecture != "llama" && config.architecture != "qwen2")
    refuse("architecture", config.architecture, "llama or qwen2");
  check_count("number of layers", config.layers, 1 << 10);
  check_count("hidden size", config.hidden, 1 << 16);
  check_count("feed-forward size", config.feed_forward, 1 << 18);
  check_count("number of query heads", config.query_heads, 1 << 10);
  check_count("number of KV heads", config.kv_heads, 1 << 10);
  check_count("head_dim", config.head_dim, 1 << 10);
  check_count("vocabulary", config.vocabulary, 1 << 20);
  check_count("context", config.context, 1 << 24);
  if (config.query_heads % config.kv_heads != 0)
    refuse("number of query heads", std::to_string(config.query_heads),
           "a multiple of the " + std::to_string(config.kv_heads) + " KV heads");
  if (config.head_dim % 2 != 0) refuse("head_dim", std::to_string(config.head_dim), "even");
  if (!(config.rms_epsilon >= 0) || !(config.rms_epsilon < 1))
    refuse("RMSNorm epsilon", std::to_string(config.rms_epsilon), "0 to 1");
  if (!(config.rope_base > 1) || !std::isfinite(config.rope_base))
    refuse("RoPE base", std::to_string(config.rope_base), "finite and above 1");
}

}  // namespace kvarn_engine
