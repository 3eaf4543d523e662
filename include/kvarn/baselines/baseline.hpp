// The competing quantisers in one harness: what a baseline is, and how to run one.
//
// A baseline quantises and reconstructs the keys or the values of one KV head, without packing. Its
// result is what attention would see, and it states the bits that its packed form would take. The
// list of all baselines is in baselines.hpp; a new one is a file beside this one and a line there.
//
// Data: row-major [tokens][head_dim], keys after RoPE.
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
#include "exact_rule.hpp"

namespace kvarn {

struct baseline_settings {
  tile_kind kind = tile_kind::key;
  int bits = 2;  // of a code; what a method allows: baseline::widths
  int head_dim = 128;
  int token_group = 128;  // tokens that share the step of a channel
  int channel_group = 0;  // channels that share the step of a token; 0: head_dim

  KVARN_INLINE constexpr int channels_per_group() const {
    return channel_group == 0 ? head_dim : channel_group;
  }
};

// Bits of the codes of keys and of values.
struct kv_bits {
  int key = 2;
  int value = 2;

  KVARN_INLINE constexpr int of(tile_kind kind) const {
    return kind == tile_kind::key ? key : value;
  }
};

struct baseline {
  std::string_view name;
  std::string_view summary;

  // The pairs that are compared; the plain name stands for the first. Keys may have the bits that
  // they have in any pair, and so may values.
  std::span<const kv_bits> widths;

  // What stays exact where the method is run as published. To compare methods, use one policy for
  // all (equal_for_all).
  exact_policy native;

  // How many consecutive tokens are quantised at once: a token alone, or a group of them.
  int (*tokens_together)(const baseline_settings& settings);

  // Replaces [tokens][head_dim] numbers by their reconstruction. Precondition: `validate` accepts
  // the settings, the tokens are a multiple of tokens_together, and the numbers are finite and
  // within FP16.
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
// saturate. Both spans are [tokens][head_dim], tokens a multiple of tokens_together; out is `in`
// itself or does not overlap it.
status quantize_dequantize(const baseline& method, const baseline_settings& settings,
                           std::span<const float> in, std::span<float> out);

// The same for a sequence of any length, of which some tokens stay exact: those are copied.
status quantize_sequence(const baseline& method, const baseline_settings& settings,
                         const exact_rule& exact, std::span<const float> in, std::span<float> out);

// Stored bits / elements of such a sequence, exact tokens counted as FP16.
// Precondition: tokens > 0, exact.step > 0, `validate` accepts the settings.
double sequence_bits_per_element(const baseline& method, const baseline_settings& settings,
                                 const exact_rule& exact, std::size_t tokens);

// The name of a method at one pair of widths: the plain name, or name_kXvY.
std::string variant_name(const baseline& method, kv_bits bits);

// Parts of which methods are made.

inline constexpr kv_bits two_to_four_bits[] = {{2, 2}, {3, 3}, {4, 4}};

inline int one_token(const baseline_settings&) { return 1; }
inline int token_group_together(const baseline_settings& settings) { return settings.token_group; }
inline int key_groups_together(const baseline_settings& settings) {
  return settings.kind == tile_kind::key ? settings.token_group : 1;
}

// For `check` of a baseline without limits of its own.
inline status accept_all_settings(const baseline_settings&) { return {}; }

// For `check` of one that cuts head_dim into blocks.
status require_multiple_of(int divisor, const baseline_settings& settings);

// NaN to 0, everything else into the finite range of FP16.
void saturate_to_float16(std::span<float> values);

// A number as FP16 stores it.
inline float stored_float16(float value) { return static_cast<float>(float16::saturated(value)); }

// implementation

namespace detail {

inline status bad_baseline(const char* what, int value, const std::string& allowed) {
  return failure(error_code::invalid_argument,
                 {"baseline: ", what, " is ", value, "; it must be ", allowed.c_str()});
}

// "2, 3 or 4": the bits that a method has for keys or for values.
inline std::string allowed_bits(const baseline& method, tile_kind kind) {
  constexpr int most = 16;
  int left = 0;
  bool allowed[most + 1] = {};
  for (const kv_bits& pair : method.widths) {
    left += allowed[pair.of(kind)] ? 0 : 1;
    allowed[pair.of(kind)] = true;
  }
  std::string text;
  for (int bits = 0; bits <= most; ++bits)
    if (allowed[bits]) {
      --left;
      text += std::to_string(bits) + (left > 1 ? ", " : left == 1 ? " or " : "");
    }
  return text;
}

}  // namespace detail

inline status validate(const baseline& method, const baseline_settings& settings) {
  using detail::bad_baseline;
  const auto has_bits = [&](const kv_bits& pair) {
    return pair.of(settings.kind) == settings.bits;
  };
  if (std::none_of(method.widths.begin(), method.widths.end(), has_bits))
    return bad_baseline(
        "bits", settings.bits,
        detail::allowed_bits(method, settings.kind) +
            (settings.kind == tile_kind::key ? " for keys of " : " for values of ") +
            std::string(method.name));
  if (settings.head_dim <= 0) return bad_baseline("head_dim", settings.head_dim, "positive");
  if (settings.token_group <= 0)
    return bad_baseline("token_group", settings.token_group, "positive");
  if (settings.channel_group < 0 || settings.head_dim % settings.channels_per_group() != 0)
    return bad_baseline("channel_group", settings.channel_group,
                        "0 or a divisor of head_dim " + std::to_string(settings.head_dim));
  return method.check(settings);
}

inline status require_multiple_of(int divisor, const baseline_settings& settings) {
  if (settings.head_dim % divisor == 0) return {};
  return detail::bad_baseline("head_dim", settings.head_dim,
                              "a multiple of " + std::to_string(divisor));
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
  const int together = method.tokens_together(settings);
  const std::size_t unit =
      static_cast<std::size_t>(settings.head_dim) * static_cast<std::size_t>(together);
  if (in.size() % unit != 0)
    return failure(error_code::invalid_argument,
                   {"baseline: the input has ", in.size(), " numbers; it must be a multiple of ",
                    together, " tokens * head_dim = ", unit});
  if (out.size() != in.size())
    return failure(error_code::invalid_argument,
                   {"baseline: the output has ", out.size(),
                    " numbers; it must have as many as the input, ", in.size()});
  if (out.data() != in.data()) std::copy(in.begin(), in.end(), out.begin());
  saturate_to_float16(out);
  method.round_trip(settings, out);
  return {};
}

inline status quantize_sequence(const baseline& method, const baseline_settings& settings,
                                const exact_rule& exact, std::span<const float> in,
                                std::span<float> out) {
  if (status s = validate(method, settings); !s.ok()) return s;
  if (exact.step == 0) return detail::bad_baseline("step of exact tokens", 0, "positive");
  const auto row = static_cast<std::size_t>(settings.head_dim);
  if (in.size() % row != 0)
    return failure(error_code::invalid_argument,
                   {"baseline: the input has ", in.size(),
                    " numbers; it must be whole tokens of head_dim ", row});
  if (out.size() != in.size())
    return failure(error_code::invalid_argument,
                   {"baseline: the output has ", out.size(),
                    " numbers; it must have as many as the input, ", in.size()});
  if (out.data() != in.data()) std::copy(in.begin(), in.end(), out.begin());
  const auto together = static_cast<std::size_t>(method.tokens_together(settings));
  const token_range range = quantised_tokens(exact, together, in.size() / row);
  const auto quantised = out.subspan(range.first * row, range.count() * row);
  return quantize_dequantize(method, settings, quantised, quantised);
}

inline double sequence_bits_per_element(const baseline& method, const baseline_settings& settings,
                                        const exact_rule& exact, std::size_t tokens) {
  const auto together = static_cast<std::size_t>(method.tokens_together(settings));
  const auto quantised = static_cast<double>(quantised_tokens(exact, together, tokens).count());
  const auto all = static_cast<double>(tokens);
  return (quantised * method.bits_per_element(settings) + (all - quantised) * 16) / all;
}

inline std::string variant_name(const baseline& method, kv_bits bits) {
  std::string name(method.name);
  const kv_bits& plain = method.widths.front();
  if (bits.key == plain.key && bits.value == plain.value) return name;
  return name + "_k" + std::to_string(bits.key) + "v" + std::to_string(bits.value);
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
