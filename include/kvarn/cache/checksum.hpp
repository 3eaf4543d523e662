// XXH64 (Yann Collet's xxHash, seed 0): the checksum of cache files. Faster than any disk; damage
// goes unnoticed with a probability near 2^-64.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../config.hpp"

namespace kvarn {

static_assert(std::endian::native == std::endian::little,
              "cache files are little endian, and are read and written as they stand in memory");

inline namespace KVARN_ISA_NAMESPACE {

class checksum {
 public:
  void add(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    total_ += size;
    if (pending_ > 0) {
      const std::size_t part = size < stripe - pending_ ? size : stripe - pending_;
      std::memcpy(buffer_ + pending_, bytes, part);
      pending_ += part;
      bytes += part;
      size -= part;
      if (pending_ < stripe) return;
      consume(buffer_, stripe);
      pending_ = 0;
    }
    const std::size_t whole = size / stripe * stripe;
    consume(bytes, whole);
    pending_ = size - whole;
    if (pending_ > 0) std::memcpy(buffer_, bytes + whole, pending_);
  }

  // Of all bytes so far.
  std::uint64_t value() const {
    std::uint64_t hash = prime5;
    if (total_ >= stripe) {
      hash = std::rotl(lane_[0], 1) + std::rotl(lane_[1], 7) + std::rotl(lane_[2], 12) +
             std::rotl(lane_[3], 18);
      for (const std::uint64_t lane : lane_) hash = (hash ^ round(0, lane)) * prime1 + prime4;
    }
    hash += total_;
    std::size_t i = 0;
    for (; i + 8 <= pending_; i += 8)
      hash = std::rotl(hash ^ round(0, word(buffer_ + i, 8)), 27) * prime1 + prime4;
    if (i + 4 <= pending_) {
      hash = std::rotl(hash ^ word(buffer_ + i, 4) * prime1, 23) * prime2 + prime3;
      i += 4;
    }
    for (; i < pending_; ++i) hash = std::rotl(hash ^ buffer_[i] * prime5, 11) * prime1;
    hash = (hash ^ hash >> 33) * prime2;
    hash = (hash ^ hash >> 29) * prime3;
    return hash ^ hash >> 32;
  }

 private:
  static constexpr std::size_t stripe = 32;
  static constexpr std::uint64_t prime1 = 0x9e3779b185ebca87u;
  static constexpr std::uint64_t prime2 = 0xc2b2ae3d27d4eb4fu;
  static constexpr std::uint64_t prime3 = 0x165667b19e3779f9u;
  static constexpr std::uint64_t prime4 = 0x85ebca77c2b2ae63u;
  static constexpr std::uint64_t prime5 = 0x27d4eb2f165667c5u;

  static std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
    return std::rotl(lane + input * prime2, 31) * prime1;
  }
  // Little endian, 4 or 8 bytes.
  static std::uint64_t word(const unsigned char* bytes, std::size_t size) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes, size);
    return value;
  }

  void consume(const unsigned char* bytes, std::size_t size) {
    for (std::size_t i = 0; i < size; i += stripe)
      for (std::size_t l = 0; l < 4; ++l) lane_[l] = round(lane_[l], word(bytes + i + 8 * l, 8));
  }

  std::uint64_t lane_[4] = {prime1 + prime2, prime2, 0, 0 - prime1};
  std::uint64_t total_ = 0;
  unsigned char buffer_[stripe] = {};
  std::size_t pending_ = 0;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
