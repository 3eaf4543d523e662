// Sizes and offsets of every record and page, and the ids that name formats.
#include "kvarn/format/tile_layout.hpp"

#include <gtest/gtest.h>

#include <climits>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "support/layouts.hpp"

namespace {

using kvarn::cache_format;
using kvarn::error_code;
using kvarn::scale_type;
using kvarn::tile_kind;
using kvarn::tile_layout;

static_assert(tile_layout{.bits = 2}.bits_per_element() == 2.25);
static_assert(tile_layout{.bits = 4}.bits_per_element() == 4.25);
static_assert(tile_layout{.kind = tile_kind::key, .head_dim = 64}.bits_per_element() == 2.3125);
static_assert(tile_layout{.kind = tile_kind::value, .head_dim = 64}.bits_per_element() == 2.4375);
static_assert(cache_format{}.page_bytes(8) == 8 * (4608 + 4608));
static_assert(tile_layout{} == cache_format{}.key_layout());

TEST(TileLayout, FieldsFollowOneAnother) {
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    SCOPED_TRACE(kvarn_test::name_of(layout));
    const auto d = static_cast<std::size_t>(layout.head_dim);
    const auto g = static_cast<std::size_t>(layout.group);
    const auto bits = static_cast<std::size_t>(layout.bits);
    const bool is_key = layout.kind == tile_kind::key;
    const std::size_t rows = is_key ? g : d;
    const std::size_t cols = is_key ? d : g;
    ASSERT_EQ(static_cast<std::size_t>(layout.rows()), rows);
    ASSERT_EQ(static_cast<std::size_t>(layout.cols()), cols);
    ASSERT_EQ(layout.max_code(), bits == 2 ? 3 : bits == 3 ? 7 : 15);

    std::size_t offset = 0;
    int shift = 0;
    ASSERT_EQ(layout.planes(), bits == 3 ? 2 : 1);
    for (int plane = 0; plane < layout.planes(); ++plane) {
      const std::size_t plane_bits = bits != 3 ? bits : plane == 0 ? 2 : 1;
      ASSERT_EQ(layout.plane_offset(plane), offset);
      ASSERT_EQ(static_cast<std::size_t>(layout.plane_bits(plane)), plane_bits);
      ASSERT_EQ(layout.plane_shift(plane), shift);
      ASSERT_EQ(layout.plane_row_bytes(plane), cols * plane_bits / 8);
      for (std::size_t row = 0; row < rows; ++row)
        ASSERT_EQ(layout.code_offset(plane, static_cast<int>(row)),
                  offset + row * cols * plane_bits / 8);
      offset += rows * cols * plane_bits / 8;
      shift += static_cast<int>(plane_bits);
    }
    ASSERT_EQ(layout.zero_offset(), offset);
    ASSERT_EQ(layout.step_offset(), offset + 2 * cols);
    ASSERT_EQ(layout.scale_offset(), offset + 3 * cols);
    ASSERT_EQ(layout.record_bytes(), d * g * bits / 8 + 3 * cols + rows);
    ASSERT_DOUBLE_EQ(layout.bits_per_element(), static_cast<double>(bits) +
                                                    24.0 / static_cast<double>(rows) +
                                                    8.0 / static_cast<double>(cols));
    for (const std::size_t aligned :
         {layout.plane_offset(layout.planes() - 1), layout.zero_offset(), layout.step_offset(),
          layout.scale_offset(), layout.record_bytes()})
      ASSERT_EQ(aligned % 16, 0u);
    ASSERT_TRUE(kvarn::validate(layout).ok());
  }
}

TEST(CacheFormat, PagesHoldKeyThenValueOfEachHead) {
  for (const cache_format& format : kvarn_test::all_formats()) {
    const std::size_t key = format.key_layout().record_bytes();
    const std::size_t value = format.value_layout().record_bytes();
    ASSERT_EQ(format.head_bytes(), key + value);
    for (const int heads : {0, 1, 3, 8}) {
      const auto n = static_cast<std::size_t>(heads);
      ASSERT_EQ(format.key_offset(heads), n * (key + value));
      ASSERT_EQ(format.value_offset(heads), n * (key + value) + key);
      ASSERT_EQ(format.page_bytes(heads), n * (key + value));
    }
    ASSERT_EQ(format.key_layout().kind, tile_kind::key);
    ASSERT_EQ(format.value_layout().kind, tile_kind::value);
    ASSERT_EQ(format.key_layout().head_dim, format.key_head_dim);
    ASSERT_EQ(format.value_layout().head_dim, format.value_head_dim);
    ASSERT_EQ(format.key_layout().bits, format.key_bits);
    ASSERT_EQ(format.value_layout().bits, format.value_bits);
  }
}

TEST(FormatId, EveryFormatSurvivesTheRoundTrip) {
  std::set<kvarn::format_id> ids;
  const auto formats = kvarn_test::all_formats();
  for (const cache_format& format : formats) {
    ASSERT_TRUE(kvarn::validate(format).ok());
    ids.insert(format.id());
    const auto parsed = kvarn::parse_format_id(format.id());
    ASSERT_TRUE(parsed.ok()) << parsed.why().message();
    ASSERT_EQ(parsed.value(), format);
  }
  EXPECT_EQ(ids.size(), formats.size());
  EXPECT_EQ(formats.size(), 9u * 9 * 2 * 3 * 3 * 2);
}

// A refusal must say which field, which value, and everything that is allowed.
void expect_refusal(const kvarn::status& status, const std::string& field, long long value,
                    const std::vector<int>& allowed) {
  ASSERT_EQ(status.code(), error_code::invalid_format) << field << " " << value;
  const std::string& message = status.message();
  const std::string start = field + " is " + std::to_string(value) + "; allowed";
  EXPECT_EQ(message.substr(0, start.size()), start);
  for (const int each : allowed)
    EXPECT_NE(message.find(" " + std::to_string(each), start.size()), std::string::npos)
        << message << " lacks " << each;
}

const std::vector<int> head_dims(std::begin(kvarn::supported_head_dims),
                                 std::end(kvarn::supported_head_dims));
const std::vector<int> groups(std::begin(kvarn::supported_groups),
                              std::end(kvarn::supported_groups));
const std::vector<int> widths(std::begin(kvarn::supported_bits), std::end(kvarn::supported_bits));
constexpr int bad_head_dims[] = {INT_MIN, -64, -1,  0,   1,    32,    63,     65,
                                 72,      100, 129, 144, 1024, 65535, INT_MAX};
constexpr int bad_groups[] = {INT_MIN, -128, 0, 1, 32, 63, 96, 127, 129, 256, 65535, INT_MAX};
constexpr int bad_bits[] = {INT_MIN, -2, 0, 1, 5, 8, 15, INT_MAX};
constexpr int bad_types[] = {2, 3, 15, 255};

TEST(TileLayout, RefusalsNameTheFieldAndWhatIsAllowed) {
  for (const int value : bad_head_dims)
    expect_refusal(validate(tile_layout{.head_dim = value}), "head_dim", value, head_dims);
  for (const int value : bad_groups)
    expect_refusal(validate(tile_layout{.group = value}), "group", value, groups);
  for (const int value : bad_bits)
    expect_refusal(validate(tile_layout{.bits = value}), "bits", value, widths);
  for (const int value : bad_types) {
    expect_refusal(validate(tile_layout{.scale = static_cast<scale_type>(value)}), "scale type",
                   value, {0, 1});
    expect_refusal(validate(tile_layout{.kind = static_cast<tile_kind>(value)}), "tile kind", value,
                   {0, 1});
  }
}

TEST(CacheFormat, RefusalsNameTheFieldAndWhatIsAllowed) {
  for (const int value : bad_head_dims) {
    expect_refusal(validate(cache_format{.key_head_dim = value}), "key head_dim", value, head_dims);
    expect_refusal(validate(cache_format{.value_head_dim = value}), "value head_dim", value,
                   head_dims);
  }
  for (const int value : bad_groups)
    expect_refusal(validate(cache_format{.group = value}), "group", value, groups);
  for (const int value : bad_bits) {
    expect_refusal(validate(cache_format{.key_bits = value}), "key bits", value, widths);
    expect_refusal(validate(cache_format{.value_bits = value}), "value bits", value, widths);
  }
  for (const int value : bad_types)
    expect_refusal(validate(cache_format{.scale = static_cast<scale_type>(value)}), "scale type",
                   value, {0, 1});
}

TEST(FormatId, RefusalsNameTheFieldAndWhatIsAllowed) {
  struct field {
    const char* name;
    int shift;
    int width;
    std::vector<int> allowed;
  };
  const field fields[] = {{"key head_dim", 0, 16, head_dims},
                          {"value head_dim", 16, 16, head_dims},
                          {"group", 32, 16, groups},
                          {"key bits", 48, 4, widths},
                          {"value bits", 52, 4, widths},
                          {"scale type", 56, 4, {0, 1}},
                          {"record layout version", 60, 4, {1}}};
  const kvarn::format_id good = cache_format{}.id();
  for (const field& f : fields) {
    const auto mask = ((kvarn::format_id{1} << f.width) - 1) << f.shift;
    const std::set<int> allowed(f.allowed.begin(), f.allowed.end());
    std::size_t accepted = 0;
    for (int value = 0; value < 1 << f.width; ++value) {
      const auto id = (good & ~mask) | static_cast<kvarn::format_id>(value) << f.shift;
      const auto parsed = kvarn::parse_format_id(id);
      ASSERT_EQ(parsed.ok(), allowed.count(value) == 1) << f.name << " " << value;
      if (parsed.ok())
        ++accepted;
      else
        expect_refusal(parsed.why(), f.name, value, f.allowed);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(accepted, allowed.size()) << f.name;
  }
  EXPECT_FALSE(kvarn::parse_format_id(0).ok());
  EXPECT_FALSE(kvarn::parse_format_id(~kvarn::format_id{0}).ok());
}

}  // namespace
