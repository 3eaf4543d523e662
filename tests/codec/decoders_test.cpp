// Decoding of rows, tokens and tiles: against the oracle, and each way against the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kvarn/codec/tile_codec.hpp"
#include "support/layouts.hpp"
#include "support/oracle.hpp"
#include "support/oracle_numbers.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::bfloat16;
using kvarn::float16;
using kvarn::tile_kind;
using kvarn::tile_layout;
namespace oracle = kvarn_test::oracle;

// A record of random but valid bytes: moderate scales, every code.
std::vector<std::byte> random_record(const tile_layout& layout, unsigned seed) {
  std::mt19937 random(seed);
  const bool e4m3 = layout.scale == kvarn::scale_type::e4m3;
  const int one = oracle::fp8_code(1.0, e4m3);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  oracle::record_fields fields;
  const auto [rows, cols] = oracle::extent_of(layout);
  for (int i = 0; i < rows * cols; ++i) fields.codes.push_back(below(1 << layout.bits));
  for (int c = 0; c < cols; ++c)
    fields.zero_bits.push_back((below(2) << 15) + 0x3800 + below(0x800));
  for (int c = 0; c < cols; ++c) fields.step_code.push_back(one - 16 + below(24));
  for (int r = 0; r < rows; ++r) fields.scale_code.push_back(one - 16 + below(32));
  return oracle::write_record(fields, layout);
}

TEST(Decoders, AgreeWithTheOracle) {
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    SCOPED_TRACE(kvarn_test::name_of(layout));
    const auto record = random_record(layout, 91);
    const kvarn::const_tile_view tile{record.data(), layout};
    const oracle::matrix y = oracle::decode(oracle::read_record(record.data(), layout), layout);

    // Rows, to the last bit of two roundings.
    const auto [rows, cols] = oracle::extent_of(layout);
    std::vector<float> row(static_cast<std::size_t>(cols) + 1, 7.0f);
    for (int r = 0; r < rows; ++r) {
      kvarn::decode_row(tile, r, row.data());
      ASSERT_EQ(row.back(), 7.0f);
      const double unit =
          oracle::fp8_value(tile.scale_bits(r), layout.scale == kvarn::scale_type::e4m3);
      for (int c = 0; c < cols; ++c)
        ASSERT_NEAR(static_cast<double>(row[static_cast<std::size_t>(c)]), y(r, c),
                    1e-7 * (std::abs(y(r, c)) + unit));
    }

    // Whole tiles, rotated back or left.
    for (const bool rotate_back : {true, false}) {
      const auto decoded = kvarn_test::decode(layout, record, rotate_back);
      const oracle::matrix expected = oracle::tokens_of(y, layout, rotate_back);
      const oracle::matrix difference =
          oracle::tile_of(
              decoded, {.kind = tile_kind::key, .head_dim = layout.head_dim, .group = layout.group},
              false) -
          expected;
      ASSERT_LE(difference.norm(), 1e-6 * expected.norm());
      ASSERT_GT(expected.norm(), 1.0);
    }
  }
}

// Rows of keys are tokens, rows of values channels: what decode_row and decode_tile share is equal
// to the bit.
TEST(Decoders, RowsAreTokensOfKeysAndChannelsOfValues) {
  for (const tile_kind kind : kvarn_test::tile_kinds)
    for (const int head_dim : {64, 96}) {
      const tile_layout layout{.kind = kind, .head_dim = head_dim, .bits = 3};
      const auto record = random_record(layout, 92);
      const auto tokens = kvarn_test::decode(layout, record, false);
      std::vector<float> row(static_cast<std::size_t>(layout.cols()));
      for (int r = 0; r < layout.rows(); ++r) {
        kvarn::decode_row({record.data(), layout}, r, row.data());
        for (int c = 0; c < layout.cols(); ++c) {
          const int token = kind == tile_kind::key ? r : c;
          const int channel = kind == tile_kind::key ? c : r;
          ASSERT_EQ(row[static_cast<std::size_t>(c)],
                    tokens[static_cast<std::size_t>(token * head_dim + channel)]);
        }
      }
    }
}

TEST(Decoders, RangesOfTokensAreThoseOfTheTile) {
  for (const tile_kind kind : kvarn_test::tile_kinds)
    for (const bool rotate_back : {true, false}) {
      const tile_layout layout{.kind = kind, .head_dim = 80, .group = 64, .bits = 4};
      const auto record = random_record(layout, 93);
      const auto whole = kvarn_test::decode(layout, record, rotate_back);
      for (const auto& [first, count] : {std::pair(0, 64), std::pair(0, 0), std::pair(64, 0),
                                         std::pair(63, 1), std::pair(0, 1), std::pair(17, 30)}) {
        std::vector<float> part(static_cast<std::size_t>(count * 80) + 1, 7.0f);
        kvarn::decode_tokens({record.data(), layout}, first, count, kvarn_test::view(part, 80),
                             rotate_back);
        ASSERT_EQ(part.back(), 7.0f);
        ASSERT_TRUE(std::equal(part.begin(), part.end() - 1, whole.begin() + first * 80));
      }
    }
}

// FP16 and BF16 output is the FP32 output rounded; strides leave what lies between alone.
template <class T>
void expect_output(const tile_layout& layout, const std::vector<std::byte>& record,
                   bool rotate_back) {
  const auto exact = kvarn_test::decode(layout, record, rotate_back);
  const std::ptrdiff_t d = layout.head_dim;
  struct strides {
    std::ptrdiff_t token, channel, origin;
  };
  const std::ptrdiff_t g = layout.group;
  for (const auto& [token, channel, origin] :
       {strides{d, 1, 0}, strides{d + 3, 1, 2}, strides{1, g, 0}, strides{2 * d, 2, 1},
        strides{-d, 1, (g - 1) * d}}) {
    const T canary = T(-1.25f);
    std::vector<T> memory(static_cast<std::size_t>(2 * g * d + 4 * g), canary);
    auto expected = memory;
    kvarn::decode_tile(kvarn::const_tile_view{record.data(), layout},
                       kvarn::tokens_view<T>{memory.data() + origin, token, channel}, rotate_back);
    for (std::ptrdiff_t t = 0; t < g; ++t)
      for (std::ptrdiff_t c = 0; c < d; ++c) {
        const float value = exact[static_cast<std::size_t>(t * d + c)];
        T stored(value);
        if constexpr (!std::is_same_v<T, float>) stored = T::saturated(value);
        expected[static_cast<std::size_t>(origin + t * token + c * channel)] = stored;
      }
    for (std::size_t i = 0; i < memory.size(); ++i)
      ASSERT_EQ(static_cast<float>(memory[i]), static_cast<float>(expected[i])) << i;
  }
}

TEST(Decoders, OutputTypesAndStrides) {
  for (const tile_kind kind : kvarn_test::tile_kinds)
    for (const bool rotate_back : {true, false}) {
      const tile_layout layout{.kind = kind, .head_dim = 96, .group = 64};
      const auto record = random_record(layout, 94);
      expect_output<float>(layout, record, rotate_back);
      expect_output<float16>(layout, record, rotate_back);
      expect_output<bfloat16>(layout, record, rotate_back);
    }
}

// Unaligned output and records.
TEST(Decoders, UnalignedRecordsAndOutputs) {
  const tile_layout layout{.kind = tile_kind::value, .head_dim = 64, .group = 64, .bits = 3};
  const auto record = random_record(layout, 95);
  const auto exact = kvarn_test::decode(layout, record);
  for (std::size_t offset = 1; offset < 8; ++offset) {
    std::vector<std::byte> memory(record.size() + offset);
    std::copy(record.begin(), record.end(), memory.begin() + static_cast<std::ptrdiff_t>(offset));
    std::vector<float> out(exact.size());
    kvarn::decode_tile(kvarn::const_tile_view{memory.data() + offset, layout},
                       kvarn_test::view(out, 64));
    ASSERT_EQ(out, exact) << offset;
  }
}

}  // namespace
