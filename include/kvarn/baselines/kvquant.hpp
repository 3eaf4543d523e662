// KVQuant (Hooper et al., arXiv 2401.18079) without its calibration, twice: as the KVarN paper
// describes what it compares, and dense-and-sparse as the original is.
//
// kvquant_channels: of every group of tokens the 1 % of channels (at least one) with the largest
// energy stays FP16; the others are rounded as KIVI does. Stored beside: their indices.
//
// kvquant_sparse: of every vector (keys: a channel of a group of tokens; values: a token) the 0.5 %
// lowest and the 0.5 % highest numbers (at least one each) stay FP16; the others are rounded
// between their own minimum and maximum. The quantiles are those of the vector itself, chosen by
// rank: equal numbers cannot make more outliers than that, so a vector has no count. An outlier
// takes 16 bits and, as published, an index of 16. The original's thresholds and codebook come from
// calibration, its keys from before RoPE.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "../config.hpp"
#include "baseline.hpp"
#include "channel_ranking.hpp"
#include "kivi.hpp"
#include "min_max_groups.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

inline int kvquant_exact_channels(int head_dim) { return (std::max)(1, (head_dim + 50) / 100); }

inline void kvquant_channels_round_trip(const baseline_settings& settings, std::span<float> kv) {
  const auto row = static_cast<std::size_t>(settings.head_dim);
  const auto channel_group = static_cast<std::size_t>(settings.channels_per_group());
  const std::size_t size = row * static_cast<std::size_t>(settings.token_group);
  std::vector<float> exact(size);
  for (std::size_t first = 0; first < kv.size(); first += size) {
    const auto group = kv.subspan(first, size);
    std::transform(group.begin(), group.end(), exact.begin(), stored_float16);
    const std::vector<bool> is_exact =
        largest_channels(group, settings.head_dim, kvquant_exact_channels(settings.head_dim),
                         [](double x) { return x * x; });
    // A copy of a neighbour in their place leaves the ranges of tokens to the others.
    for (std::size_t c = 0; c < row; c += channel_group) {
      std::size_t other = c;
      while (other < c + channel_group && is_exact[other]) ++other;
      if (other == c + channel_group) continue;
      for (std::size_t i = 0; i < size; i += row)
        for (std::size_t e = c; e < c + channel_group; ++e)
          if (is_exact[e]) group[i + e] = group[i + other];
    }
    kivi_round_trip(settings, group);
    for (std::size_t i = 0; i < size; ++i)
      if (is_exact[i % row]) group[i] = exact[i];
  }
}

// Keys: an exact channel has no range. Values: every token has one.
inline double kvquant_channels_bits_per_element(const baseline_settings& settings) {
  const double d = settings.head_dim;
  const double share = kvquant_exact_channels(settings.head_dim) / d;
  const double index = index_bits(settings.head_dim) / double(settings.token_group);
  if (settings.kind == tile_kind::key)
    return (1 - share) * bits_per_channel_group(settings) + share * (16 + index);
  return (1 - share) * settings.bits + share * (16 + index) +
         double{min_max_group_bits} / settings.channels_per_group();
}

// Outliers on each side of a vector of `count` numbers; some must be left.
inline int kvquant_outliers_per_side(int count) {
  return (std::min)((std::max)(1, (count + 100) / 200), (count - 1) / 2);
}

inline void round_dense_and_sparse(float* values, int count, std::ptrdiff_t stride, int bits) {
  const int side = kvquant_outliers_per_side(count);
  std::vector<int> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return values[a * stride] < values[b * stride]; });
  std::vector<int> outliers(order.begin(), order.begin() + side);
  outliers.insert(outliers.end(), order.end() - side, order.end());
  std::vector<float> exact;
  const float inlier = values[order[static_cast<std::size_t>(side)] * stride];
  for (const int i : outliers) {
    exact.push_back(stored_float16(values[i * stride]));
    values[i * stride] = inlier;
  }
  round_min_max_group(values, count, stride, bits);
  for (std::size_t i = 0; i < outliers.size(); ++i) values[outliers[i] * stride] = exact[i];
}

inline void kvquant_sparse_round_trip(const baseline_settings& settings, std::span<float> kv) {
  const auto row = static_cast<std::size_t>(settings.head_dim);
  if (settings.kind == tile_kind::value) {
    const int group = settings.channels_per_group();
    for (std::size_t first = 0; first < kv.size(); first += static_cast<std::size_t>(group))
      round_dense_and_sparse(&kv[first], group, 1, settings.bits);
    return;
  }
  const std::size_t size = row * static_cast<std::size_t>(settings.token_group);
  for (std::size_t first = 0; first < kv.size(); first += size)
    for (std::size_t channel = 0; channel < row; ++channel)
      round_dense_and_sparse(&kv[first + channel], settings.token_group, settings.head_dim,
                             settings.bits);
}

inline double kvquant_sparse_bits_per_element(const baseline_settings& settings) {
  const int count =
      settings.kind == tile_kind::key ? settings.token_group : settings.channels_per_group();
  // An outlier has a code too, which is not used.
  return kivi_bits_per_element(settings) +
         2.0 * kvquant_outliers_per_side(count) * (16 + 16) / count;
}

inline constexpr baseline kvquant_channels{
    .name = "kvquant_channels",
    .summary = "KVQuant as the KVarN paper describes it: KIVI, 1 % of the channels FP16",
    .widths = two_to_four_bits,
    .native = equal_for_all(128, 128, 128),
    .tokens_together = token_group_together,
    .round_trip = kvquant_channels_round_trip,
    .bits_per_element = kvquant_channels_bits_per_element,
    .check = accept_all_settings,
};

inline constexpr baseline kvquant_sparse{
    .name = "kvquant_sparse",
    .summary = "KVQuant dense and sparse: KIVI, 1 % of the numbers of each vector FP16",
    .widths = two_to_four_bits,
    .native = {.keys = {.sink = 1}, .values = {.sink = 1}},
    .tokens_together = key_groups_together,
    .round_trip = kvquant_sparse_round_trip,
    .bits_per_element = kvquant_sparse_bits_per_element,
    .check = accept_all_settings,
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
