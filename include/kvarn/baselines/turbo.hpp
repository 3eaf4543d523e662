// TurboQuant, the variant of least squared error (Zandieh et al., arXiv 2504.19874): the direction
// of a token is rotated, so that its channels are nearly normal, and each is rounded to the
// Lloyd-Max levels of the normal distribution. The norm of the token is stored as FP16.
//
//   c[i] = the level nearest to sqrt(D) y[i] / |x|,  y = the rotated x
//   x^   = rotated back: |x| c / sqrt(D)        (turbo)
//                        |x| c / |c|            (turbo_nc: with norm correction)
//
// turbo_vllm is what vLLM runs: keys as turbo_nc, values per token between minimum and maximum and
// not rotated, no token exact, but the first two layers and the last two.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>

#include "../codec/hadamard.hpp"
#include "../config.hpp"
#include "baseline.hpp"
#include "lloyd_max.hpp"
#include "min_max_groups.hpp"
#include "rotation.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline double norm_of(std::span<const float> x) {
  double sum = 0;
  for (const float a : x) sum = std::fma(static_cast<double>(a), static_cast<double>(a), sum);
  return std::sqrt(sum);
}

inline void turbo_token(std::span<float> x, int bits, bool correct_norm) {
  const scalar_codebook& book = normal_codebook(bits);
  const auto head_dim = static_cast<int>(x.size());
  const double norm = norm_of(x);
  if (!(norm > 0)) return;
  const double root = std::sqrt(static_cast<double>(head_dim));
  const auto to_unit = static_cast<float>(root / norm);
  hadamard(x.data(), head_dim);
  for (float& a : x) a = book.nearest(a * to_unit);
  const auto stored = static_cast<double>(stored_float16(static_cast<float>(norm)));
  const auto factor = static_cast<float>(stored / (correct_norm ? norm_of(x) : root));
  for (float& a : x) a = a * factor;
  hadamard(x.data(), head_dim);
}

template <bool correct_norm>
void turbo_round_trip(const baseline_settings& settings, std::span<float> kv) {
  const auto row = static_cast<std::size_t>(settings.head_dim);
  for (std::size_t first = 0; first < kv.size(); first += row)
    turbo_token(kv.subspan(first, row), settings.bits, correct_norm);
}

inline double turbo_bits_per_element(const baseline_settings& settings) {
  return settings.bits + 16.0 / settings.head_dim;
}

inline void turbo_vllm_round_trip(const baseline_settings& settings, std::span<float> kv) {
  settings.kind == tile_kind::key ? turbo_round_trip<true>(settings, kv)
                                  : round_trip_per_token(settings, kv);
}

inline double turbo_vllm_bits_per_element(const baseline_settings& settings) {
  return settings.kind == tile_kind::key ? turbo_bits_per_element(settings)
                                         : bits_per_token_group(settings);
}

// vLLM's turboquant_3bit_nc, turboquant_k3v4_nc and turboquant_4bit_nc.
inline constexpr kv_bits turbo_vllm_widths[] = {{3, 3}, {3, 4}, {4, 4}};

inline constexpr baseline turbo{
    .name = "turbo",
    .summary = "TurboQuant: rotation, levels of the normal distribution, one norm per token",
    .widths = two_to_four_bits,
    .native = {},
    .tokens_together = one_token,
    .round_trip = turbo_round_trip<false>,
    .bits_per_element = turbo_bits_per_element,
    .check = require_rotation,
};

inline constexpr baseline turbo_nc{
    .name = "turbo_nc",
    .summary = "TurboQuant with norm correction",
    .widths = two_to_four_bits,
    .native = {},
    .tokens_together = one_token,
    .round_trip = turbo_round_trip<true>,
    .bits_per_element = turbo_bits_per_element,
    .check = require_rotation,
};

inline constexpr baseline turbo_vllm{
    .name = "turbo_vllm",
    .summary = "TurboQuant in vLLM: keys with norm correction, values one range per token",
    .widths = turbo_vllm_widths,
    .native = {.keys = {}, .values = {}, .edge_layers = 2},
    .tokens_together = one_token,
    .round_trip = turbo_vllm_round_trip,
    .bits_per_element = turbo_vllm_bits_per_element,
    .check = require_rotation,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
