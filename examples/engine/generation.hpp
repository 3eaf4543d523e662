// Generates tokens with a model and a memory, and says where the time went.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cache_memory.hpp"
#include "kv_memory.hpp"
#include "sampler.hpp"
#include "transformer.hpp"

namespace kvarn_engine {

// Of some tokens that went through a model.
struct timing {
  std::size_t tokens = 0;
  double seconds = 0;
  double attention = 0;  // seconds of these in attention, with appending
  double commit = 0;     // seconds of these in committing and sealing

  double tokens_per_second() const { return static_cast<double>(tokens) / seconds; }
};

struct generation_times {
  timing prefill;
  timing decode;
};

// Feeds the prompt in chunks, then draws at most `most` tokens. `take` gets each and returns
// whether to go on. Precondition: the prompt is not empty.
generation_times generate(transformer& model, std::span<const int> prompt, int chunk, int most,
                          sampler& draw, kv_memory& memory, const std::function<bool(int)>& take);

// What parse_cache takes, for people: "exact, ... and query_aware".
std::string cache_names();

// "exact", or an encoder's name and bits as "k2v2". Throws std::runtime_error with what is allowed.
cache_choice parse_cache(const std::string& name, const std::string& bits);

// The ChatML prompt of one question, as SmolLM2 and Qwen 2 were trained on. Its control tokens are
// parsed as such by the tokenizer; `question` and `system` must not contain any.
std::string chat_prompt(const std::string& system, const std::string& question);

// The same tokens through two memories, step by step in turns.
struct comparison {
  // Seconds of one token, and of its attention with appending. The fastest say more than the
  // medians where other programs run.
  struct times {
    double median = 0;
    double fastest = 0;
  };
  times token[2];
  times attention[2];
};

// Decodes `tokens` behind what the memories already have, which is the same.
comparison compare_decoding(transformer& model, std::span<const int> tokens, kv_memory& first,
                            kv_memory& second);

}  // namespace kvarn_engine
