// The quantisers that the demo compares, and what each makes of a head.
//
// Those of the library go through packed records: tokens to bytes with encode_tile, bytes to tokens
// with decode_tile. The others (kvarn/baselines) quantise and reconstruct without packing and state
// the size that their packed form would have.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "heads.hpp"
#include "kvarn/baselines/baselines.hpp"
#include "kvarn/codec/encoder.hpp"
#include "kvarn/codec/query_moment.hpp"
#include "kvarn/codec/tile_codec.hpp"

namespace kvarn_demo {

struct method {
  std::string name;
  int key_bits = 2;
  int value_bits = 2;
  const kvarn::baseline* baseline = nullptr;  // null: packed, by the recipes
  kvarn::encoder_recipe key_recipe = {};
  kvarn::encoder_recipe value_recipe = {};
  bool is_ours = false;  // an encoder that this library adds
};

// In the order of the table: by bits, then baselines, then from the simplest to the best.
std::vector<method> all_methods();

// Whether the method can serve the head dimensions of the head.
kvarn::status check(const head& h, const method& m);

// One of the library's encoders; the name is `encoder`_kXvY.
method packed_method(std::string_view name, kvarn::encoder encoder, int key_bits, int value_bits);

struct stored_size {
  double bytes = 0;     // as stored
  double elements = 0;  // that they hold

  double bits_per_element() const { return 8 * bytes / elements; }
  double fp16_bytes() const { return 2 * elements; }

  friend stored_size operator+(const stored_size& a, const stored_size& b) {
    return {a.bytes + b.bytes, a.elements + b.elements};
  }
};

struct quantised_head {
  std::vector<float> keys;    // all tokens, the quantised ones replaced by their reconstruction
  std::vector<float> values;  // the same
  stored_size key_size;       // of the quantised tokens
  stored_size value_size;
  // Microseconds to encode a tile, mean over those of keys and of values; none without packing.
  std::optional<double> encode_us_per_tile;
};

// Every tile is encoded `repeats` times and the fastest counts. The time of keys with error
// feedback includes the factorisation of the query moment, not its accumulation.
quantised_head quantise(const head& h, const method& m, int repeats);

// implementation

inline method packed_method(std::string_view name, kvarn::encoder encoder, int key_bits,
                            int value_bits) {
  return {.name = std::string(name) + "_k" + std::to_string(key_bits) + "v" +
                  std::to_string(value_bits),
          .key_bits = key_bits,
          .value_bits = value_bits,
          .key_recipe = kvarn::recipe_of(encoder, kvarn::tile_kind::key, key_bits),
          .value_recipe = kvarn::recipe_of(encoder, kvarn::tile_kind::value, value_bits),
          .is_ours = encoder != kvarn::encoder::paper};
}

inline std::vector<method> all_methods() {
  // The smallest squared error of all: least squares on the normalised tile.
  constexpr kvarn::encoder_recipe refit{
      .scaling = kvarn::row_scaling::dual_axis_equivariant, .iterations = 1, .refits = 3};

  std::vector<method> methods;
  for (const kvarn::baseline& b : kvarn::baselines)
    for (const kvarn::kv_bits& bits : b.widths)
      methods.push_back({.name = kvarn::variant_name(b, bits),
                         .key_bits = bits.key,
                         .value_bits = bits.value,
                         .baseline = &b});
  for (const kvarn::kv_bits& bits : {kvarn::kv_bits{2, 2}, {4, 2}, {3, 3}, {4, 4}}) {
    methods.push_back(packed_method("paper", kvarn::encoder::paper, bits.key, bits.value));
    if (bits.key == 2)
      methods.push_back({.name = "refit_k2v2", .key_recipe = refit, .value_recipe = refit});
    methods.push_back(packed_method("tuned", kvarn::encoder::tuned, bits.key, bits.value));
    methods.push_back(
        packed_method("query_aware", kvarn::encoder::query_aware, bits.key, bits.value));
  }
  std::stable_sort(methods.begin(), methods.end(), [](const method& a, const method& b) {
    const int total_a = a.key_bits + a.value_bits;
    const int total_b = b.key_bits + b.value_bits;
    return total_a != total_b ? total_a < total_b : a.key_bits > b.key_bits;
  });
  return methods;
}

namespace detail {

// Keys or values of one head on their way through a method.
struct tensor {
  kvarn::tile_kind kind;
  std::size_t dim;
  int bits;
  const std::vector<float>& exact;
  std::vector<float>& approximate;  // exact on entry
};

inline kvarn::baseline_settings settings_of(kvarn::tile_kind kind, int bits, std::size_t dim) {
  return {.kind = kind,
          .bits = bits,
          .head_dim = static_cast<int>(dim),
          .token_group = static_cast<int>(group)};
}

inline stored_size quantise_baseline(const head& h, const kvarn::baseline& baseline,
                                     const tensor& t) {
  const auto settings = settings_of(t.kind, t.bits, t.dim);
  const auto exact = h.quantised_part(t.exact, t.dim);
  const auto approximate = std::span(t.approximate).subspan(sink * t.dim, exact.size());
  kvarn::quantize_dequantize(baseline, settings, exact, approximate).or_throw();
  const auto elements = static_cast<double>(exact.size());
  return {baseline.bits_per_element(settings) * elements / 8, elements};
}

// Adds the time of one encoding of every tile to `us`.
inline stored_size quantise_packed(const head& h, const kvarn::encoder_recipe& recipe,
                                   const tensor& t, int repeats, double& us) {
  using clock = std::chrono::steady_clock;
  const kvarn::tile_layout layout{.kind = t.kind,
                                  .head_dim = static_cast<int>(t.dim),
                                  .group = static_cast<int>(group),
                                  .bits = t.bits};
  kvarn::validate(layout).or_throw();
  std::vector<std::byte> record(layout.record_bytes());
  std::vector<float> workspace(kvarn::encode_workspace(layout));
  const auto stride = static_cast<std::ptrdiff_t>(t.dim);
  kvarn::query_moment moment(layout.head_dim);
  std::size_t queries_seen = 0;
  stored_size size;

  for (std::size_t g = 0; g < h.groups(); ++g) {
    const std::size_t first = sink + g * group;
    if (recipe.error_feedback) {  // the queries of all groups up to this one
      const std::size_t end = (first + group) * h.query_heads;
      moment.add(kvarn::tokens_view<const float>{h.queries.data() + queries_seen * t.dim, stride},
                 static_cast<int>(end - queries_seen));
      queries_seen = end;
    }
    const kvarn::tokens_view<const float> tokens{t.exact.data() + first * t.dim, stride};
    double fastest = 0;
    for (int i = 0; i < repeats; ++i) {
      const auto start = clock::now();
      std::optional<kvarn::query_factor> factor;
      if (recipe.error_feedback) factor.emplace(moment);
      kvarn::encode_tile(tokens, kvarn::tile_view{record.data(), layout}, recipe, true,
                         factor ? &*factor : nullptr, workspace.data());
      const double time = std::chrono::duration<double, std::micro>(clock::now() - start).count();
      fastest = i == 0 ? time : (std::min)(fastest, time);
    }
    us += fastest;
    size =
        size + stored_size{static_cast<double>(record.size()), static_cast<double>(group * t.dim)};
    kvarn::decode_tile(kvarn::const_tile_view{record.data(), layout},
                       kvarn::tokens_view<float>{t.approximate.data() + first * t.dim, stride});
  }
  return size;
}

}  // namespace detail

inline kvarn::status check(const head& h, const method& m) {
  if (m.baseline == nullptr) return {};  // load_head has seen that there is a record
  const auto keys = detail::settings_of(kvarn::tile_kind::key, m.key_bits, h.key_dim);
  const auto values = detail::settings_of(kvarn::tile_kind::value, m.value_bits, h.value_dim);
  const auto status = kvarn::validate(*m.baseline, keys);
  return status.ok() ? kvarn::validate(*m.baseline, values) : status;
}

inline quantised_head quantise(const head& h, const method& m, int repeats) {
  quantised_head out;
  out.keys = h.keys;
  out.values = h.values;
  const detail::tensor keys{kvarn::tile_kind::key, h.key_dim, m.key_bits, h.keys, out.keys};
  const detail::tensor values{kvarn::tile_kind::value, h.value_dim, m.value_bits, h.values,
                              out.values};
  if (m.baseline != nullptr) {
    out.key_size = detail::quantise_baseline(h, *m.baseline, keys);
    out.value_size = detail::quantise_baseline(h, *m.baseline, values);
  } else {
    double us = 0;
    out.key_size = detail::quantise_packed(h, m.key_recipe, keys, repeats, us);
    out.value_size = detail::quantise_packed(h, m.value_recipe, values, repeats, us);
    out.encode_us_per_tile = us / static_cast<double>(2 * h.groups());
  }
  return out;
}

}  // namespace kvarn_demo
