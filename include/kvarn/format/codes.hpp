// Packing of small integers: element i of a plane of width w sits at bit w*i, least significant
// first.
//
// Planes are 1, 2 or 4 bits wide, so no element straddles a byte. Codes of 3 bits are two planes:
// the low 2 bits of every code, then the high bit of every code (see tile_layout.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../config.hpp"

namespace kvarn {

// Bytes of `count` elements of `width` bits. Precondition: count * width is a multiple of 8.
KVARN_INLINE constexpr std::size_t packed_bytes(int count, int width) {
  return static_cast<std::size_t>(count) * static_cast<std::size_t>(width) / 8;
}

// Element `index` of a packed plane.
KVARN_INLINE constexpr std::uint8_t packed_element(const std::byte* plane, int width, int index) {
  const auto bit = static_cast<std::size_t>(index) * static_cast<std::size_t>(width);
  const auto byte = static_cast<unsigned>(plane[bit / 8]);
  return static_cast<std::uint8_t>((byte >> (bit % 8)) & ((1u << width) - 1u));
}

// Writes bits [shift, shift + width) of each of `count` codes to a plane. Every byte of the plane
// is written. Precondition: width is 1, 2 or 4 and count * width is a multiple of 8.
KVARN_INLINE constexpr void pack_plane(const std::uint8_t* codes, int count, int width, int shift,
                                       std::byte* plane) {
  const int per_byte = 8 / width;
  const unsigned mask = (1u << width) - 1u;
  for (int first = 0; first < count; first += per_byte) {
    unsigned byte = 0;
    for (int i = 0; i < per_byte; ++i)
      byte |= ((static_cast<unsigned>(codes[first + i]) >> shift) & mask) << (i * width);
    plane[first / per_byte] = static_cast<std::byte>(byte);
  }
}

// The inverse of pack_plane: ors each element, shifted left by `shift`, into `codes`.
KVARN_INLINE constexpr void unpack_plane(const std::byte* plane, int count, int width, int shift,
                                         std::uint8_t* codes) {
  for (int i = 0; i < count; ++i)
    codes[i] = static_cast<std::uint8_t>(codes[i] | (packed_element(plane, width, i) << shift));
}

}  // namespace kvarn
