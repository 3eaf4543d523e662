// The alphabet of byte-level BPE: one printable character for every byte.
//
// From GPT-2's bytes_to_unicode: bytes that are printable in Latin-1 (21 to 7E, A1 to AC, AE to FF)
// stand for themselves; the 68 others, in order, are the characters from U+0100 on. All are below
// U+0800, so that UTF-8 takes at most two bytes for them.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace kvarn_engine {

// The bytes that a token or a part of a merge in a file stands for; nothing where it has a
// character outside of the alphabet.
std::optional<std::string> bytes_of_symbols(std::string_view symbols);

// The symbol of a byte, in UTF-8.
std::string symbol_of_byte(unsigned char byte);

// implementation

namespace detail {

inline constexpr unsigned alphabet_end = 0x100 + 68;

constexpr bool stands_for_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
}

// The byte of each code point, -1 where it has none.
constexpr std::array<int, alphabet_end> make_alphabet() {
  std::array<int, alphabet_end> bytes{};
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 0x100; ++byte) {
    bytes[byte] = stands_for_itself(byte) ? static_cast<int>(byte) : -1;
    if (!stands_for_itself(byte)) bytes[next++] = static_cast<int>(byte);
  }
  return bytes;
}

inline constexpr std::array<int, alphabet_end> alphabet = make_alphabet();

}  // namespace detail

inline std::optional<std::string> bytes_of_symbols(std::string_view symbols) {
  std::string bytes;
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    unsigned point = static_cast<unsigned char>(symbols[i]);
    if (point >= 0x80) {
      if (point < 0xc2 || point >= 0xe0 || ++i == symbols.size()) return std::nullopt;
      const unsigned next = static_cast<unsigned char>(symbols[i]);
      if (next < 0x80 || next >= 0xc0) return std::nullopt;
      point = (point & 0x1f) << 6 | (next & 0x3f);
    }
    if (point >= detail::alphabet_end || detail::alphabet[point] < 0) return std::nullopt;
    bytes += static_cast<char>(detail::alphabet[point]);
  }
  return bytes;
}

inline std::string symbol_of_byte(unsigned char byte) {
  unsigned point = byte;
  if (!detail::stands_for_itself(byte))
    for (point = 0x100; detail::alphabet[point] != byte;) ++point;
  if (point < 0x80) return {static_cast<char>(point)};
  return {static_cast<char>(0xc0 | point >> 6), static_cast<char>(0x80 | (point & 0x3f))};
}

}  // namespace kvarn_engine
