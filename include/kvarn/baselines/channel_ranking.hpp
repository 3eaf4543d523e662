// The channels of a group of tokens in which the largest numbers stand, for the methods that keep
// some of them apart.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "../config.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// Marks the `count` channels with the largest sums of measure(x) over tokens; of equal sums those
// with the smaller index. tokens: [any][head_dim]. Precondition: count <= head_dim.
template <class Measure>
std::vector<bool> largest_channels(std::span<const float> tokens, int head_dim, int count,
                                   const Measure& measure) {
  std::vector<double> sums(static_cast<std::size_t>(head_dim));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    sums[i % sums.size()] += measure(static_cast<double>(tokens[i]));
  std::vector<std::size_t> order(sums.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return sums[a] > sums[b]; });
  std::vector<bool> marked(sums.size());
  for (int i = 0; i < count; ++i) marked[order[static_cast<std::size_t>(i)]] = true;
  return marked;
}

// Bits of a number below `count`: which of so many channels.
constexpr int index_bits(int count) {
  int bits = 0;
  while ((1 << bits) < count) ++bits;
  return bits;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
