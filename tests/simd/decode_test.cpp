// Decoding with vector instructions against the definition: records of random bytes in every
// layout, any range of tokens, every output type and stride, byte for byte.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kvarn/codec/tile_codec.hpp"
#include "support/layouts.hpp"
#include "support/targets.hpp"
#include "support/tile_inputs.hpp"

namespace {

using kvarn::tile_layout;

// Any valid record: random codes, and numbers of every size.
std::vector<std::byte> random_record(const tile_layout& layout, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> record(layout.record_bytes());
  for (std::byte& b : record) b = static_cast<std::byte>(random() & 0xff);
  const kvarn::tile_view tile{record.data(), layout};
  const auto max_code =
      layout.scale == kvarn::scale_type::ue5m3 ? kvarn::ue5m3::max_code : kvarn::e4m3::max_code;
  const auto valid = [&](std::uint8_t bits) {
    return static_cast<std::uint8_t>(bits % (max_code + 1));
  };
  for (int c = 0; c < layout.cols(); ++c) {
    tile.set_step_bits(c, valid(tile.step_bits(c)));
    if (!tile.zero(c).is_finite())
      tile.set_zero(c, kvarn::float16::from_bits(tile.zero(c).bits & 0x83ff));
  }
  for (int r = 0; r < layout.rows(); ++r) tile.set_scale_bits(r, valid(tile.scale_bits(r)));
  return record;
}

template <class T>
void expect_equal_tokens(const kvarn::const_tile_view tile, int first, int count,
                         std::ptrdiff_t channel_stride, bool rotate, const std::string& what) {
  const tile_layout& layout = tile.layout;
  kvarn_test::strided_tokens<T> expected(layout.group, layout.head_dim, channel_stride, 1);
  const auto untouched = expected.bytes();
  kvarn::scalar::decode_tokens(tile, first, count, expected.view(), rotate);
  ASSERT_TRUE(count == 0 || expected.bytes() != untouched) << what;
  kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
    kvarn_test::strided_tokens<T> got(layout.group, layout.head_dim, channel_stride, 1);
    kernels.decode_tokens(tile, first, count, got.view(), rotate);
    EXPECT_TRUE(expected.bytes() == got.bytes()) << kvarn::name_of(target) << " " << what;
  });
}

class DecodeLayouts : public testing::TestWithParam<int> {};

TEST_P(DecodeLayouts, TokensEqualTheDefinition) {
  std::mt19937_64 random(5);
  int turn = GetParam();
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    if (layout.head_dim != GetParam()) continue;
    const auto record = random_record(layout, 100 + static_cast<std::uint64_t>(turn));
    const kvarn::const_tile_view tile{record.data(), layout};
    ASSERT_TRUE(kvarn::validate_record(tile, record.size()).ok());
    for (int repeat = 0; repeat < 4; ++repeat, ++turn) {
      const auto group = static_cast<std::uint64_t>(layout.group);
      const int first = repeat == 0 ? 0 : static_cast<int>(random() % group);
      const int count =
          repeat == 0 ? layout.group
          : repeat == 1
              ? 1
              : static_cast<int>(random() % (group - static_cast<std::uint64_t>(first) + 1));
      const std::ptrdiff_t stride = turn % 4 == 1 ? 3 : turn % 4 == 2 ? -1 : 1;
      const bool rotate = turn % 3 != 1;
      const std::string what = kvarn_test::name_of(layout) + " from " + std::to_string(first) +
                               ", " + std::to_string(count) + ", stride " + std::to_string(stride) +
                               (rotate ? " rotated" : "");
      expect_equal_tokens<float>(tile, first, count, stride, rotate, what);
      expect_equal_tokens<kvarn::float16>(tile, first, count, stride, rotate, what + " float16");
      expect_equal_tokens<kvarn::bfloat16>(tile, first, count, stride, rotate, what + " bfloat16");
      if (HasFailure()) return;
    }
  }
}

TEST_P(DecodeLayouts, RowsEqualTheDefinition) {
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    if (layout.head_dim != GetParam()) continue;
    const auto record = random_record(layout, 200);
    const kvarn::const_tile_view tile{record.data(), layout};
    const auto cols = static_cast<std::size_t>(layout.cols());
    std::vector<float> expected(cols + 2, 7.0f);
    for (int row = 0; row < layout.rows(); ++row) {
      kvarn::scalar::decode_row(tile, row, expected.data() + 1);
      kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
        std::vector<float> got(cols + 2, 7.0f);
        kernels.decode_row(tile, row, got.data() + 1);
        EXPECT_EQ(std::memcmp(expected.data(), got.data(), sizeof(float) * got.size()), 0)
            << kvarn::name_of(target) << " " << kvarn_test::name_of(layout) << " row " << row;
      });
      if (HasFailure()) return;
    }
  }
}

TEST_P(DecodeLayouts, WholeTilesEqualTheDefinition) {
  for (const auto kind : kvarn_test::tile_kinds) {
    const tile_layout layout{.kind = kind, .head_dim = GetParam()};
    const auto record = random_record(layout, 300);
    const kvarn::const_tile_view tile{record.data(), layout};
    std::vector<float> expected(static_cast<std::size_t>(layout.rows() * layout.cols()));
    kvarn::scalar::decode_tokens(tile, 0, layout.group, kvarn_test::view(expected, layout.head_dim),
                                 true);
    kvarn_test::for_each_target([&](kvarn::target target, auto kernels) {
      std::vector<float> got(expected.size());
      kernels.decode_tokens(tile, 0, layout.group, kvarn_test::view(got, layout.head_dim), true);
      EXPECT_EQ(std::memcmp(expected.data(), got.data(), sizeof(float) * got.size()), 0)
          << kvarn::name_of(target) << " " << kvarn_test::name_of(layout);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, DecodeLayouts, testing::ValuesIn(kvarn::supported_head_dims),
                         [](const auto& info) { return "D" + std::to_string(info.param); });

}  // namespace
