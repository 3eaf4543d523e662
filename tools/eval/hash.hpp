// A hash that tells texts and models from one another in stored results.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

namespace kvarn_eval {

// FNV-1a, 64 bits, over values of at most 32 bits (bytes, ids of tokens), as hexadecimal digits.
// For accidents, not for adversaries.
template <class T>
std::string hash_of(std::span<const T> values) {
  static_assert(sizeof(T) <= sizeof(std::uint32_t));
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const T value : values) {
    hash ^= static_cast<std::uint32_t>(value);
    hash *= 0x100000001b3u;
  }
  char text[20];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace kvarn_eval
