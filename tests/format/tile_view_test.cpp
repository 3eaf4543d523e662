// Views of records: any alignment and stride, nothing written outside, foreign bytes checked.
#include "kvarn/format/tile_view.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "support/layouts.hpp"
#include "support/oracle_numbers.hpp"
#include "support/oracle_record.hpp"

namespace {

using kvarn::error_code;
using kvarn::float16;
using kvarn::scale_type;
using kvarn::tile_kind;
using kvarn::tile_layout;
namespace oracle = kvarn_test::oracle;

static_assert(std::is_convertible_v<kvarn::tile_view, kvarn::const_tile_view>);
static_assert(!std::is_convertible_v<kvarn::const_tile_view, kvarn::tile_view>);

// A record can be written and read in a constant expression.
constexpr bool constexpr_round_trip() {
  constexpr tile_layout layout{tile_kind::value, 64, 64, 3, scale_type::e4m3};
  std::byte record[layout.record_bytes()] = {};
  const kvarn::tile_view tile{record, layout};
  std::uint8_t codes[64] = {};
  for (int c = 0; c < 64; ++c) codes[c] = static_cast<std::uint8_t>(c % 8);
  tile.pack_row(5, codes);
  tile.set_zero(63, float16(-1.5f));
  tile.set_step_bits(1, 0x38);
  tile.set_scale_bits(2, 0x40);
  return tile.code(5, 13) == 5 && tile.code(4, 13) == 0 && tile.zero(63).bits == 0xbe00 &&
         tile.step(1) == 1.0f && tile.scale(2) == 2.0f;
}
static_assert(constexpr_round_trip());

oracle::record_fields random_fields(const tile_layout& layout, std::mt19937& random) {
  oracle::record_fields fields;
  const auto [rows, cols] = oracle::extent_of(layout);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int i = 0; i < rows * cols; ++i) fields.codes.push_back(below(1 << layout.bits));
  for (int c = 0; c < cols; ++c) fields.zero_bits.push_back(below(1 << 16));
  for (int c = 0; c < cols; ++c) fields.step_code.push_back(below(256));
  for (int r = 0; r < rows; ++r) fields.scale_code.push_back(below(256));
  return fields;
}

void write_fields(const kvarn::tile_view& tile, const oracle::record_fields& fields) {
  const int cols = tile.layout.cols();
  std::vector<std::uint8_t> row(static_cast<std::size_t>(cols));
  for (int r = 0; r < tile.layout.rows(); ++r) {
    for (int c = 0; c < cols; ++c)
      row[static_cast<std::size_t>(c)] =
          static_cast<std::uint8_t>(fields.codes[static_cast<std::size_t>(r * cols + c)]);
    tile.pack_row(r, row.data());
    tile.set_scale_bits(r,
                        static_cast<std::uint8_t>(fields.scale_code[static_cast<std::size_t>(r)]));
  }
  for (int c = 0; c < cols; ++c) {
    const auto i = static_cast<std::size_t>(c);
    tile.set_zero(c, float16::from_bits(static_cast<std::uint16_t>(fields.zero_bits[i])));
    tile.set_step_bits(c, static_cast<std::uint8_t>(fields.step_code[i]));
  }
}

oracle::record_fields read_fields(const kvarn::const_tile_view& tile) {
  oracle::record_fields fields;
  std::vector<std::uint8_t> row(static_cast<std::size_t>(tile.layout.cols()) + 1, 0xee);
  for (int r = 0; r < tile.layout.rows(); ++r) {
    tile.unpack_row(r, row.data());
    EXPECT_EQ(row.back(), 0xee);
    for (int c = 0; c < tile.layout.cols(); ++c) {
      fields.codes.push_back(row[static_cast<std::size_t>(c)]);
      EXPECT_EQ(tile.code(r, c), row[static_cast<std::size_t>(c)]);
    }
    fields.scale_code.push_back(tile.scale_bits(r));
  }
  for (int c = 0; c < tile.layout.cols(); ++c) {
    fields.zero_bits.push_back(tile.zero(c).bits);
    fields.step_code.push_back(tile.step_bits(c));
  }
  return fields;
}

TEST(TileView, WritesAndReadsWhatTheFormatDescribes) {
  std::mt19937 random(1);
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    SCOPED_TRACE(kvarn_test::name_of(layout));
    const auto fields = random_fields(layout, random);
    const auto expected = oracle::write_record(fields, layout);
    ASSERT_EQ(expected.size(), layout.record_bytes());

    // Every byte of the record is written, whatever was there.
    std::vector<std::byte> record(layout.record_bytes(), std::byte{0xff});
    write_fields({record.data(), layout}, fields);
    ASSERT_EQ(record, expected);
    ASSERT_EQ(read_fields({record.data(), layout}), fields);
    ASSERT_EQ(oracle::read_record(record.data(), layout), fields);
  }
}

TEST(TileView, StepsAndScalesAreNumbersOfTheLayoutsType) {
  for (const scale_type scale : kvarn_test::scale_types) {
    const tile_layout layout{.scale = scale};
    const bool e4m3 = scale == scale_type::e4m3;
    std::vector<std::byte> record(layout.record_bytes());
    const kvarn::tile_view tile{record.data(), layout};
    for (int code = 0; code <= (e4m3 ? 0x7e : 0xf7); ++code) {
      const int at = code % layout.cols();
      tile.set_step_bits(at, static_cast<std::uint8_t>(code));
      tile.set_scale_bits(at, static_cast<std::uint8_t>(code));
      ASSERT_EQ(double{tile.step(at)}, oracle::fp8_value(code, e4m3)) << code;
      ASSERT_EQ(double{tile.scale(at)}, oracle::fp8_value(code, e4m3)) << code;
    }
  }
}

TEST(TileView, UnalignedStridedRecordsKeepTheirNeighbours) {
  std::mt19937 random(2);
  constexpr std::byte canary{0x5a};
  constexpr std::size_t count = 3;
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    if (layout.head_dim > 128 || layout.scale != scale_type::ue5m3) continue;
    const std::size_t record = layout.record_bytes();
    for (std::size_t offset = 1; offset <= 7; ++offset) {
      const std::size_t stride = record + offset;
      std::vector<std::byte> memory(offset + (count - 1) * stride + record + 8, canary);
      const auto tiles =
          kvarn::view_tiles(memory.data() + offset, memory.size() - offset, layout, stride, count);
      ASSERT_TRUE(tiles.ok()) << tiles.why().message();
      auto expected = memory;
      for (const std::size_t i : {1u, 0u, 2u}) {
        const auto fields = random_fields(layout, random);
        write_fields(tiles.value()[i], fields);
        const auto bytes = oracle::write_record(fields, layout);
        std::copy(bytes.begin(), bytes.end(),
                  expected.begin() + static_cast<std::ptrdiff_t>(offset + i * stride));
        ASSERT_EQ(read_fields(tiles.value()[i]), fields);
      }
      ASSERT_EQ(memory, expected) << kvarn_test::name_of(layout) << " + " << offset;
    }
  }
}

TEST(ViewTiles, RefusesBuffersThatAreTooShort) {
  const tile_layout layout{tile_kind::key, 80, 64, 3, scale_type::ue5m3};
  const std::size_t record = layout.record_bytes();
  std::vector<std::byte> memory(3 * record + 7);
  const auto view = [&](std::size_t size, std::size_t stride, std::size_t count) {
    return kvarn::view_tiles(memory.data(), size, layout, stride, count);
  };
  EXPECT_TRUE(view(record, record, 1).ok());
  EXPECT_TRUE(view(0, record, 0).ok());
  EXPECT_TRUE(view(3 * record, record, 3).ok());
  // The last record needs no padding behind it.
  EXPECT_TRUE(view(record + 2 * (record + 3), record + 3, 3).ok());

  for (const auto& refused :
       {view(0, record, 1), view(record - 1, record, 1), view(3 * record - 1, record, 3),
        view(record + 2 * (record + 3) - 1, record + 3, 3)}) {
    ASSERT_EQ(refused.why().code(), error_code::short_buffer);
    EXPECT_NE(refused.why().message().find(std::to_string(record)), std::string::npos);
  }
  const auto narrow = view(memory.size(), record - 1, 2);
  EXPECT_EQ(narrow.why().code(), error_code::invalid_argument);
  EXPECT_EQ(narrow.why().message(), "record stride is " + std::to_string(record - 1) +
                                        " bytes; it must be at least the record's " +
                                        std::to_string(record));
  EXPECT_EQ(kvarn::view_tiles<std::byte>(nullptr, record, layout, record, 1).why().code(),
            error_code::invalid_argument);
  EXPECT_TRUE(kvarn::view_tiles<std::byte>(nullptr, 0, layout, record, 0).ok());
  EXPECT_EQ(kvarn::view_tiles(memory.data(), memory.size(), tile_layout{.bits = 5}, record, 1)
                .why()
                .code(),
            error_code::invalid_format);
}

TEST(ViewTiles, RefusesProductsThatOverflow) {
  const tile_layout layout;
  const std::size_t record = layout.record_bytes();
  constexpr std::size_t largest = std::numeric_limits<std::size_t>::max();
  std::vector<std::byte> memory(2 * record);
  struct {
    std::size_t stride, count;
  } const cases[] = {{record, largest},
                     {largest, 2},
                     {largest, largest},
                     {largest / 2 + 1, 3},  // (count - 1) * stride wraps to 0
                     {std::size_t{1} << 32, (std::size_t{1} << 32) + 1},  // and here
                     {largest - record + 1, 2}};  // stride + record wraps to 0
  for (const auto& [stride, count] : cases)
    EXPECT_EQ(kvarn::view_tiles(memory.data(), memory.size(), layout, stride, count).why().code(),
              error_code::short_buffer)
        << stride << " " << count;
  EXPECT_TRUE(kvarn::view_tiles(memory.data(), memory.size(), layout, largest, 1).ok());
}

class ValidateRecord : public testing::TestWithParam<scale_type> {
 protected:
  ValidateRecord() : record(layout.record_bytes()), tile{record.data(), layout} {}

  kvarn::status check() const { return kvarn::validate_record(tile, record.size()); }
  void expect_refusal(const std::string& field, int index, unsigned bits) const {
    const kvarn::status status = check();
    ASSERT_EQ(status.code(), error_code::invalid_data) << field << " " << bits;
    EXPECT_EQ(status.message().find(field + " " + std::to_string(index) + " has bits " +
                                    std::to_string(bits) + "; it must be finite"),
              0u)
        << status.message();
  }

  tile_layout layout{tile_kind::value, 80, 64, 2, GetParam()};
  std::vector<std::byte> record;
  kvarn::tile_view tile;
  int max_code = GetParam() == scale_type::ue5m3 ? 0xf7 : 0x7e;
};

TEST_P(ValidateRecord, StepsAndScales) {
  for (int bits = 0; bits < 256; ++bits) {
    const auto pattern = static_cast<std::uint8_t>(bits);
    const auto expect = [&](const char* field, int index) {
      if (bits <= max_code)
        EXPECT_TRUE(check().ok()) << field << " " << bits;
      else
        expect_refusal(field, index, pattern);
    };
    for (const int row : {0, layout.rows() - 1}) {
      tile.set_scale_bits(row, pattern);
      expect("scale", row);
      tile.set_scale_bits(row, 1);
    }
    for (const int col : {0, layout.cols() - 1}) {
      tile.set_step_bits(col, pattern);
      expect("step", col);
      tile.set_step_bits(col, 1);
    }
  }
}

TEST_P(ValidateRecord, Zeros) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    tile.set_zero(63, float16::from_bits(static_cast<std::uint16_t>(bits)));
    if ((bits & 0x7fff) <= float16::max_bits) {
      ASSERT_TRUE(check().ok()) << bits;
    } else {
      expect_refusal("zero", 63, bits);
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(ValidateRecord, Sizes) {
  EXPECT_TRUE(check().ok());
  EXPECT_EQ(kvarn::validate_record(tile, record.size() - 1).code(), error_code::short_buffer);
  EXPECT_EQ(kvarn::validate_record({nullptr, layout}, record.size()).code(),
            error_code::invalid_argument);
  tile_layout foreign = layout;
  foreign.group = 65;
  EXPECT_EQ(kvarn::validate_record({record.data(), foreign}, record.size()).code(),
            error_code::invalid_format);
}

INSTANTIATE_TEST_SUITE_P(ScaleTypes, ValidateRecord, testing::ValuesIn(kvarn_test::scale_types),
                         [](const auto& instance) {
                           return instance.param == scale_type::ue5m3 ? "ue5m3" : "e4m3";
                         });

}  // namespace
