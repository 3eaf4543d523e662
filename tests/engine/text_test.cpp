// UTF-8 and the alphabet of bytes, completely.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "../examples/engine/byte_alphabet.hpp"
#include "../examples/engine/utf8.hpp"

namespace {

using kvarn_engine::first_character;

std::string utf8_of(unsigned point) {
  if (point < 0x80) return {static_cast<char>(point)};
  std::string text;
  for (; point >= (text.empty() ? 0x80u : 0x40u >> text.size()); point >>= 6)
    text.insert(text.begin(), static_cast<char>(0x80 | (point & 0x3f)));
  const unsigned mark = 0xff00u >> (text.size() + 1) & 0xff;
  text.insert(text.begin(), static_cast<char>(mark | point));
  return text;
}

TEST(Utf8, EveryCodePoint) {
  ASSERT_EQ(utf8_of(0xe9), "\u00e9");
  ASSERT_EQ(utf8_of(0x20ac), "\u20ac");
  ASSERT_EQ(utf8_of(0x1f600), "\U0001f600");
  for (unsigned point = 0; point < 0x120000; ++point) {
    const std::string text = utf8_of(point);
    const bool good = point < 0x110000 && (point < 0xd800 || point > 0xdfff);
    const auto found = first_character(text + "\x80");
    ASSERT_EQ(found.length, good ? text.size() : 0) << point;
    ASSERT_FALSE(found.incomplete);
    for (std::size_t length = 1; length < text.size() && good; ++length) {
      ASSERT_TRUE(first_character(text.substr(0, length)).incomplete) << point;
      ASSERT_EQ(kvarn_engine::incomplete_suffix("x" + text.substr(0, length)), length) << point;
    }
    if (good) {
      ASSERT_EQ(kvarn_engine::incomplete_suffix("x" + text), 0u);
    }
  }
}

TEST(Utf8, OverlongAndStrayBytes) {
  for (const char* const text :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf",
        "\xf5\x80\x80\x80", "\xff", "\xc3(", "\xe2\x82("}) {
    EXPECT_EQ(first_character(text).length, 0u);
    EXPECT_FALSE(first_character(text).incomplete);
  }
  EXPECT_EQ(kvarn_engine::well_formed_prefix("a\u00e9\xff"
                                             "b"),
            3u);
  EXPECT_EQ(kvarn_engine::well_formed_prefix("a\u00e9"), 3u);
  EXPECT_EQ(kvarn_engine::well_formed_prefix(""), 0u);
}

TEST(ByteAlphabet, HasASymbolForEveryByte) {
  std::set<std::string> symbols;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string symbol = kvarn_engine::symbol_of_byte(static_cast<unsigned char>(byte));
    EXPECT_EQ(first_character(symbol).length, symbol.size());
    EXPECT_EQ(kvarn_engine::bytes_of_symbols(symbol), std::string(1, static_cast<char>(byte)));
    symbols.insert(symbol);
  }
  EXPECT_EQ(symbols.size(), 256u);
  // As in every vocabulary of this kind.
  EXPECT_EQ(kvarn_engine::symbol_of_byte(' '), "\u0120");
  EXPECT_EQ(kvarn_engine::symbol_of_byte('\n'), "\u010a");
  EXPECT_EQ(kvarn_engine::symbol_of_byte('a'), "a");
}

TEST(ByteAlphabet, OtherCharactersAreNone) {
  for (const char* const text :
       {" ", "\n", "\x7f", "\u00a0", "\u00ad", "\u0144", "\u20ac", "\xc3", "\xff", "a\u2581"})
    EXPECT_FALSE(kvarn_engine::bytes_of_symbols(text).has_value()) << text;
  EXPECT_EQ(kvarn_engine::bytes_of_symbols(""), "");
}

}  // namespace
