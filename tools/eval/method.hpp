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
};

// What a group of tokens is, and what stays exact.
struct layout {
  int sink = 128;
  int group = 128;
};

// "fp16"; an encoder or a baseline with bits, as "tuned_k2v2" or "kivi_k4v4"; a baseline alone,
// with 2 bits. Throws std::runtime_error that lists what there is.
method find_method(std::string_view name);

// The names that --methods all stands for: from the simplest to the best, then with more bits.
std::vector<std::string> all_method_names();

// What a baseline is told. Precondition: m is one.
kvarn::baseline_settings settings_of(const method& m, const layout& l, int head_dim,
                                     kvarn::tile_kind kind);

// Bits that a quantised element takes, metadata included; keys and values of equal count.
double bits_per_element(const method& m, const layout& l, int head_dim);

}  // namespace kvarn_eval
