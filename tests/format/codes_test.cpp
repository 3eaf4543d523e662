// Packing of planes of 1, 2 and 4 bits: the place of every bit, and nothing outside the plane.
#include "kvarn/format/codes.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace {

static_assert(kvarn::packed_bytes(128, 2) == 128 * 2 / 8);
static_assert(kvarn::packed_bytes(80, 3) == 80 * 3 / 8);
static_assert(kvarn::packed_bytes(0, 4) == 0);

constexpr std::array<std::byte, 1> pack_four() {
  const std::uint8_t codes[] = {1, 2, 3, 0};
  std::array<std::byte, 1> plane{};
  kvarn::pack_plane(codes, 4, 2, 0, plane.data());
  return plane;
}
static_assert(pack_four()[0] == std::byte{0b00'11'10'01});
static_assert(kvarn::packed_element(pack_four().data(), 2, 2) == 3);

TEST(Codes, EveryBitStandsAtItsPlace) {
  std::mt19937 random(3);
  for (const int width : {1, 2, 4})
    for (const int count : {8, 16, 24, 64, 80, 96, 112, 128, 160, 192, 256, 512})
      for (int shift = 0; shift + width <= 4; ++shift) {
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(count));
        for (auto& code : codes) code = static_cast<std::uint8_t>(random() & 0xf);
        const std::size_t bytes = kvarn::packed_bytes(count, width);
        ASSERT_EQ(bytes * 8, static_cast<std::size_t>(count * width));
        constexpr std::byte canary{0xa5};
        std::vector<std::byte> memory(bytes + 2, canary);
        kvarn::pack_plane(codes.data(), count, width, shift, memory.data() + 1);
        ASSERT_EQ(memory.front(), canary);
        ASSERT_EQ(memory.back(), canary);
        for (int i = 0; i < count; ++i)
          for (int b = 0; b < width; ++b) {
            const int position = i * width + b;
            const unsigned byte =
                static_cast<unsigned>(memory[1 + static_cast<std::size_t>(position / 8)]);
            const unsigned expected = codes[static_cast<std::size_t>(i)] >> (shift + b) & 1u;
            ASSERT_EQ(byte >> (position % 8) & 1u, expected) << width << " " << count << " " << i;
          }
      }
}

TEST(Codes, UnpackIsTheInverse) {
  std::mt19937 random(4);
  for (const int width : {1, 2, 4})
    for (const int shift : {0, 2}) {
      if (width + shift > 8) continue;
      constexpr int count = 96;
      std::vector<std::byte> plane(kvarn::packed_bytes(count, width));
      for (auto& byte : plane) byte = static_cast<std::byte>(random() & 0xff);
      std::vector<std::uint8_t> codes(count + 2, 0);
      codes.front() = codes.back() = 0x55;
      kvarn::unpack_plane(plane.data(), count, width, shift, codes.data() + 1);
      EXPECT_EQ(codes.front(), 0x55);
      EXPECT_EQ(codes.back(), 0x55);
      for (int i = 0; i < count; ++i)
        ASSERT_EQ(codes[static_cast<std::size_t>(i) + 1],
                  kvarn::packed_element(plane.data(), width, i) << shift);
      std::vector<std::byte> again(plane.size());
      kvarn::pack_plane(codes.data() + 1, count, width, shift, again.data());
      EXPECT_EQ(again, plane);
    }
}

TEST(Codes, UnpackOrsIntoWhatIsThere) {
  const std::uint8_t high[] = {1, 0, 1, 1, 0, 0, 1, 0};
  std::array<std::byte, 1> plane{};
  kvarn::pack_plane(high, 8, 1, 0, plane.data());
  std::uint8_t codes[] = {3, 2, 1, 0, 3, 2, 1, 0};
  kvarn::unpack_plane(plane.data(), 8, 1, 2, codes);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(codes[i], (3 - i % 4) | high[i] << 2);
}

}  // namespace
