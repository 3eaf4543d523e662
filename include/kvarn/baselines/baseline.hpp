// The competing quantisers in one harness: what a baseline is, and how to run one.
//
// A baseline quantises and reconstructs the keys or the values of one KV head, without packing. Its
// result is what attention would see, and it states the bits that its packed form would take. The
// list of all baselines is in baselines.hpp; a new one is a file beside this one and a line there.
//
// Data: row-major [tokens][head_dim], keys after RoPE. Tokens come in whole groups: what a cache
// keeps exact (sink, tail) is the caller's and stays outside the span.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "../config.hpp"
#include "../error.hpp"
#include "../format/float16.hpp"
#include "../format/tile_layout.hpp"

namespace kvarn {

struct baseline_settings {
  tile_kind kind = tile_kind::key;
  int bits = 2;  // per code: 2, 3 or 4
  int head_dim = 128;
  int token_group = 128;  // tokens that share the step of a channel
  int channel_group = 0;  // channels that share the step of a token; 0: head_dim

  KVARN_INLINE constexpr int channels_per_group() const {
    return channel_group == 0 ? head_dim : channel_group;
  }
};

struct baseline {
  std::string_view name;
  std::string_view summary;

  // Replaces [tokens][head_dim] numbers by their reconstruction. Precondition: `check` accepts the
  // settings, the tokens are whole groups, and the numbers are finite and within FP16.
  void (*round_trip)(const baseline_settings& settings, std::span<float> kv);

  // Stored bits / elements, metadata included.
  double (*bits_per_element)(const baseline_settings& settings);

  // Refuses settings that this baseline in particular cannot serve.
  status (*check)(const baseline_settings& settings);
};

inline namespace KVARN_ISA_NAMESPACE {

// Whether any baseline, and this one, can serve the settings.
status validate(const baseline& method, const baseline_settings& settings);

// out = what is left of `in` after quantisation. NaN counts as 0; infinities and values beyond FP16
// saturate. Both spans are [tokens][head_dim], tokens a multiple of token_group; out is `in` itself
// or does not overlap it.
status quantize_dequantize(const baseline& method, const baseline_settings& settings,
                           std::span<const float> in, std::span<float> out);

// For `check` of a baseline without limits of its own.
inline status accept_all_settings(const baseline_settings&) { return {}; }

// NaN to 0, everything else into the finite range of FP16.
void saturate_to_float16(std::span<float> values);

// implementation

inline status validate(const baseline& method, const baseline_settings& settings) {
  const auto bad = [](const char* what, int value, const std::string& allowed) {
    return status{error_code::invalid_argument, std::string("baseline: ") + what + " is " +
                                                    std::to_string(value) + "; it must be " +
                                                    allowed};
  };
  if (settings.bits < 2 || settings.bits > 4) return bad("bits", settings.bits, "2, 3 or 4");
  if (settings.head_dim <= 0) return bad("head_dim", settings.head_dim, "positive");
  if (settings.token_group <= 0) return bad("token_group", settings.token_group, "positive");
  if (settings.channel_group < 0 || settings.head_dim % settings.channels_per_group() != 0)
    return bad("channel_group", settings.channel_group,
               "0 or a divisor of head_dim " + std::to_string(settings.head_dim));
  return method.check(settings);
}

inline void saturate_to_float16(std::span<float> values) {
  constexpr float max = static_cast<float>(float16::from_bits(float16::max_bits));
  for (float& value : values) {
    const bool is_nan = (std::bit_cast<std::uint32_t>(value) & 0x7fffffffu) > 0x7f800000u;
    value = is_nan ? 0.0f : std::clamp(value, -max, max);
  }
}

inline status quantize_dequantize(const baseline& method, const baseline_settings& settings,
                                  std::span<const float> in, std::span<float> out) {
  if (status s = validate(method, settings); !s.ok()) return s;
  const std::size_t group =
      static_cast<std::size_t>(settings.head_dim) * static_cast<std::size_t>(settings.token_group);
  if (in.size() % group != 0)
    return {error_code::invalid_argument,
            "baseline: the input has " + std::to_string(in.size()) +
                " numbers; it must be whole groups of head_dim * token_group = " +
                std::to_string(group)};
  if (out.size() != in.size())
    return {error_code::invalid_argument, "baseline: the output has " + std::to_string(out.size()) +
                                              " numbers; it must have as many as the input, " +
                                              std::to_string(in.size())};
  if (out.data() != in.data()) std::copy(in.begin(), in.end(), out.begin());
  saturate_to_float16(out);
  method.round_trip(settings, out);
  return {};
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
