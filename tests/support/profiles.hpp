// Synthetic keys, values and queries of one KV head with the habits of real models: a fixed outlier
// direction in slowly rotating channel pairs whose amplitude changes from token to token, tokens of
// unlike size, correlated channels, a small first token (sink) that wins the attention.
//
// The token-dependent amplitude is what matters: with it the errors of per-channel rounding are
// errors of magnitude, as they are in real models. Equal seeds give equal numbers with every
// standard library (up to the last bit of log, cos and pow).
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <random>
#include <span>
#include <string_view>
#include <vector>

namespace kvarn_test {

struct kv_profile {
  std::string_view name;
  int head_dim;
  double rope_theta;
  int outlier_pairs;      // channel pairs of the outlier direction
  double outlier_norm;    // its norm / key_norm
  double outlier_spread;  // log-spread of its amplitude over tokens; 0: exactly constant
  double token_spread;    // log-spread of the size of tokens
  double key_norm;        // of the bulk, without the outlier direction
  double value_norm;
  double sink_key;           // norm of the first key / median norm
  double sink_value;         // size of the first value / that of the others
  bool independent = false;  // all numbers independent Gaussians; only the norms above count
};

inline constexpr std::array kv_profiles{
    kv_profile{"A llama-like", 128, 5e5, 3, 3, 0.35, 0.25, 15, 3, 0.35, 0.02},
    kv_profile{"B qwen3-like", 128, 1e6, 2, 5, 0.5, 0.25, 15, 3, 0.35, 0.02},
    kv_profile{"C qwen2.5-bias", 128, 1e6, 6, 20, 0, 0.25, 15, 3, 0.8, 0.02},
    kv_profile{"D smol", 64, 1e5, 2, 2, 0.35, 0.25, 15, 3, 0.35, 0.02},
    kv_profile{"E control", 128, 5e5, 0, 0, 0, 0, 15, 3, 1, 1, true},
};

// Standard normal numbers: Box-Muller on std::mt19937_64, whose output the standard fixes.
class gaussian_source {
 public:
  explicit gaussian_source(std::uint64_t seed) : engine_(seed) {}

  // In [0, 1).
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  // In [0, count).
  int index(int count) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(count)); }

  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    const double angle = 2.0 * std::numbers::pi * uniform();
    has_spare_ = true;
    spare_ = radius * std::sin(angle);
    return radius * std::cos(angle);
  }

  // Student's t, scaled to unit variance. Precondition: degrees > 2.
  double student(int degrees) {
    const double numerator = normal();
    double chi_squared = 0;
    for (int i = 0; i < degrees; ++i) {
      const double x = normal();
      chi_squared += x * x;
    }
    return numerator * std::sqrt((degrees - 2) / chi_squared);
  }

 private:
  std::mt19937_64 engine_;
  bool has_spare_ = false;
  double spare_ = 0;
};

// Row-major [tokens][head_dim], keys after RoPE.
struct kv_sample {
  int tokens = 0;
  int head_dim = 0;
  std::vector<float> keys;
  std::vector<float> values;

  // The body behind `sink` exact tokens.
  std::span<const float> keys_from(int sink) const { return from(keys, sink); }
  std::span<const float> values_from(int sink) const { return from(values, sink); }

 private:
  std::span<const float> from(const std::vector<float>& all, int first) const {
    return std::span<const float>(all).subspan(static_cast<std::size_t>(first * head_dim));
  }
};

kv_sample make_kv_sample(const kv_profile& profile, int tokens, std::uint64_t seed);

// [count][head_dim] queries for the last `count` positions. Each looks for one earlier token: its
// logits (with softmax scale 1/sqrt(head_dim)) are -6 for the mean key, 1.5 for the sink and 2.5
// for that token, and among all such queries it has the smallest variance of logits over the keys.
// Precondition: count < tokens.
std::vector<float> make_queries(const kv_sample& sample, int count, std::uint64_t seed);

}  // namespace kvarn_test
