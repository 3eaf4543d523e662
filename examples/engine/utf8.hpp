// Where characters of UTF-8 begin and end, in bytes that may be anything.
#pragma once

#include <cstddef>
#include <string_view>

namespace kvarn_engine {

struct utf8_character {
  std::size_t length = 0;   // bytes of the well-formed character in front; 0 where there is none
  bool incomplete = false;  // all of the text is the beginning of a well-formed character
};

// Well-formed as in the Unicode Standard, table 3-7: no surrogates, nothing overlong, up to 10FFFF.
// Precondition: the text is not empty.
constexpr utf8_character first_character(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {.length = 1};
  if (lead < 0xc2 || lead > 0xf4) return {};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The bounds of the second byte; of later ones 80 to BF.
  unsigned least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  unsigned most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {.incomplete = true};
    const auto next = static_cast<unsigned char>(text[i]);
    if (next < least || next > most) return {};
    least = 0x80;
    most = 0xbf;
  }
  return {.length = length};
}

// Bytes of well-formed text in front.
constexpr std::size_t well_formed_prefix(std::string_view text) {
  std::size_t end = 0;
  while (end < text.size()) {
    const std::size_t length = first_character(text.substr(end)).length;
    if (length == 0) break;
    end += length;
  }
  return end;
}

// Bytes of an incomplete character at the end: 0 to 3.
constexpr std::size_t incomplete_suffix(std::string_view text) {
  for (std::size_t count = text.size() < 3 ? text.size() : 3; count > 0; --count)
    if (first_character(text.substr(text.size() - count)).incomplete) return count;
  return 0;
}

}  // namespace kvarn_engine
