// The ways to store keys and values that the evaluation compares, by name.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kvarn/baselines/baseline.hpp"
#include "kvarn/codec/encoder.hpp"

namespace kvarn_eval {

enum class storage {
  exact,     // a kvarn::kv_cache that keeps every token as FP16
  packed,    // a kvarn::kv_cache with one of the library's encoders
  baseline,  // exact rows, replaced by what a baseline reconstructs
};

struct method {
  std::string name;
  storage kind = storage::exact;
  kvarn::encoder encoder = kvarn::encoder::tuned;
  const kvarn::baseline* baseline = nullptr;
  int key_bits = 2;
  int value_bits = 2;
  bool int8 = false;    // an encoder, with attention's operands in one int8 part
  bool native = false;  // a baseline with its own rule of what stays exact
};

// What a group of tokens is, and what stays exact.
struct layout {
  int sink = 128;
  int group = 128;
};

// "fp16"; an encoder with bits, as "tuned_k2v2", or "tuned_k2v2_int8"; a baseline, with bits where
// it should not have its first widths, as "kivi" or "kivi_k4v4"; a baseline with "_native" behind
// it. Throws std::runtime_error that says what is allowed.
method find_method(std::string_view name);

// The names that "all" stands for: baselines from the simplest to the best, kivi and turbo_vllm
// once more with their own rules, then encoders with more and more bits.
std::vector<std::string> all_method_names();

// What stays exact under a baseline.
kvarn::exact_policy policy_of(const method& m, const layout& l);

// What a baseline is told. Precondition: m is one.
kvarn::baseline_settings settings_of(const method& m, const layout& l, int head_dim,
                                     kvarn::tile_kind kind);

// Bits that a quantised element takes, metadata included; keys and values of equal count. Where a
// baseline has its native rule, bits of all elements of a window of `tokens` tokens in all layers,
// exact ones counted as FP16: what stays exact is then a part of the method.
double bits_per_element(const method& m, const layout& l, int layers, int head_dim, int tokens);

}  // namespace kvarn_eval
