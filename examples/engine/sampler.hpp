// Chooses the next token from logits: greedy, or drawn after temperature, top-k and top-p.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace kvarn_engine {

struct sampler_settings {
  float temperature = 0;  // 0: greedy, whatever the others say
  int top_k = 0;          // draw from the k most likely tokens; 0: from all
  float top_p = 1;        // then from the fewest of them whose probabilities reach p
  std::uint64_t seed = 1;
};

class sampler {
 public:
  // Throws std::runtime_error that names the setting which is out of range.
  explicit sampler(const sampler_settings& settings);

  // Equal logits: the lower token is the more likely one. The same settings and logits give the
  // same tokens on every platform. Throws std::runtime_error where a logit is NaN, as of weights
  // that are not finite. Precondition: logits is not empty.
  int operator()(std::span<const float> logits);

 private:
  sampler_settings settings_;
  std::mt19937_64 random_;
  std::vector<std::pair<float, int>> candidates_;
};

}  // namespace kvarn_engine
