// Folded operands and inner products with packed tiles against the decoded tile in double.
#include "kvarn/attention/tile_product.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "attention/scene.hpp"
#include "support/layouts.hpp"

namespace {

using kvarn::folded_operand;
using kvarn::operand_precision;
using kvarn::tile_layout;
using namespace kvarn_test;

constexpr operand_precision precisions[] = {operand_precision::int16, operand_precision::int8};

// Half a unit, and what the rounding of the unit and of the products adds at 127 * 256 units.
constexpr double half_unit = 0.5 + 127 * 256 * 4 * 0x1p-24;

// A rotated query for keys; for values softmax weights, some of them 0.
std::vector<float> random_operand(const tile_layout& layout, gaussian_source& random) {
  std::vector<float> a;
  for (int c = 0; c < layout.cols(); ++c)
    a.push_back(layout.kind == kvarn::tile_kind::key ? static_cast<float>(0.2 * random.normal())
                : c % 11 == 4                        ? 0.0f
                              : static_cast<float>(std::exp(-4 + 1.5 * random.normal())));
  return a;
}

// A record and what it stands for.
struct random_tile {
  random_tile(const tile_layout& shape, gaussian_source& random)
      : layout(shape),
        record(random_record(layout, layout.group, random)),
        fields(oracle::read_record(record.data(), layout)),
        numbers(oracle::decode(fields, layout)) {}

  kvarn::const_tile_view view() const { return {record.data(), layout}; }
  double step(int c) const {
    return oracle::fp8_value(fields.step_code[static_cast<std::size_t>(c)],
                             layout.scale == kvarn::scale_type::e4m3);
  }
  double scale(int r) const {
    return oracle::fp8_value(fields.scale_code[static_cast<std::size_t>(r)],
                             layout.scale == kvarn::scale_type::e4m3);
  }

  tile_layout layout;
  std::vector<std::byte> record;
  oracle::record_fields fields;
  oracle::matrix numbers;
};

TEST(FoldOperand, RoundsToTheNearestUnit) {
  gaussian_source random(1);
  for (const auto precision : precisions) {
    const int limit = precision == operand_precision::int16 ? 127 * 256 : 127;
    ASSERT_EQ(kvarn::max_operand(precision), limit);
    for (const tile_layout& layout : all_layouts()) {
      const random_tile tile(layout, random);
      const auto a = random_operand(layout, random);
      folded_operand operand;
      kvarn::fold_operand(tile.view(), a.data(), precision, operand);

      double largest_error = 0, largest = 0;
      int largest_value = 0;
      for (int c = 0; c < layout.cols(); ++c) {
        const double exact = static_cast<double>(a[static_cast<std::size_t>(c)]) * tile.step(c);
        const double unit = static_cast<double>(operand.unit);
        largest_error = (std::max)(largest_error, std::abs(operand.value[c] - exact / unit));
        largest = (std::max)(largest, std::abs(exact));
        largest_value = (std::max)(largest_value, std::abs(int{operand.value[c]}));
      }
      ASSERT_EQ(largest_value, limit) << name_of(layout);
      ASSERT_NEAR(static_cast<double>(operand.unit) * limit / largest, 1, 1e-6) << name_of(layout);
      ASSERT_LE(largest_error, half_unit) << name_of(layout);
      ASSERT_GE(largest_error, 0.3) << name_of(layout);
    }
  }
}

TEST(FoldOperand, SplitsIntoTwoBytes) {
  // value = 256 * high + low, both of 8 bits: so the kernels of two 8-bit products read it.
  const int limit = kvarn::max_operand(operand_precision::int16);
  for (int value = -limit; value <= limit; ++value) {
    const int high = (value + 128) >> 8;
    const int low = value - 256 * high;
    ASSERT_TRUE(high >= -128 && high <= 127 && low >= -128 && low <= 127) << value;
  }
  EXPECT_GT((limit + 256 + 128) >> 8, 127);  // and there is no room above
}

TEST(FoldOperand, ZeroAndTinyOperands) {
  gaussian_source random(2);
  for (const tile_layout& layout : {tile_layout{}, tile_layout{kvarn::tile_kind::value, 96, 64, 3}})
    for (const auto precision : precisions)
      for (const float size : {0.0f, -0.0f, 1e-38f, 0x1p-110f}) {
        const random_tile tile(layout, random);
        const std::vector<float> a(static_cast<std::size_t>(layout.cols()), size);
        folded_operand operand;
        kvarn::fold_operand(tile.view(), a.data(), precision, operand);
        EXPECT_EQ(operand.unit, 0.0f);
        for (int c = 0; c < layout.cols(); ++c) ASSERT_EQ(operand.value[c], 0);
        std::vector<float> product(static_cast<std::size_t>(layout.rows()), -1.0f);
        kvarn::tile_product(tile.view(), operand, layout.rows(), product.data());
        for (const float x : product) ASSERT_LE(std::abs(x), 1e-28f);
      }
}

TEST(FoldOperand, OperandsOfAnySize) {
  gaussian_source random(3);
  const random_tile tile({}, random);
  const auto a = random_operand({}, random);
  for (const float size : {1e-25f, 1e-10f, 1.0f, 1e10f, 1e25f}) {
    std::vector<float> scaled;
    for (const float x : a) scaled.push_back(x * size);
    folded_operand operand;
    kvarn::fold_operand(tile.view(), scaled.data(), operand_precision::int16, operand);
    std::vector<float> product(128);
    kvarn::tile_product(tile.view(), operand, 128, product.data());
    const oracle::vector want =
        tile.numbers * Eigen::Map<const Eigen::VectorXf>(scaled.data(), 128).cast<double>();
    for (int r = 0; r < 128; ++r)
      ASSERT_NEAR(product[static_cast<std::size_t>(r)] / want.norm(), want[r] / want.norm(), 1e-4);
  }
}

TEST(TileProduct, AgreesWithTheDecodedTile) {
  gaussian_source random(4);
  constexpr double epsilon = 0x1p-24;
  double largest_of_bound = 0;
  for (const auto precision : precisions)
    for (const tile_layout& layout : all_layouts()) {
      const random_tile tile(layout, random);
      const auto a = random_operand(layout, random);
      folded_operand operand;
      kvarn::fold_operand(tile.view(), a.data(), precision, operand);
      constexpr float canary = 4711.0f;
      std::vector<float> product(static_cast<std::size_t>(layout.rows()) + 1, canary);
      kvarn::tile_product(tile.view(), operand, layout.rows(), product.data());
      ASSERT_EQ(product.back(), canary);

      for (int r = 0; r < layout.rows(); ++r) {
        double want = 0, magnitude = 0, codes = 0;
        for (int c = 0; c < layout.cols(); ++c) {
          const auto col = static_cast<std::size_t>(c);
          const int code = tile.fields.codes[static_cast<std::size_t>(r * layout.cols() + c)];
          const double from_middle = code - static_cast<double>(kvarn::middle_code(layout));
          const double term = static_cast<double>(a[col]) * tile.numbers(r, c);
          const double folded =
              static_cast<double>(a[col]) * tile.step(c) * from_middle * tile.scale(r);
          want += term;
          magnitude += std::abs(folded) + std::abs(term - folded);
          codes += std::abs(from_middle);
        }
        // Every operand off by half a unit; a few roundings of all terms.
        const double bound = tile.scale(r) * operand.unit * half_unit * codes +
                             (layout.cols() / 16.0 + 8) * epsilon * magnitude;
        const double error = std::abs(product[static_cast<std::size_t>(r)] - want);
        ASSERT_LE(error, bound) << name_of(layout) << " row " << r;
        largest_of_bound = (std::max)(largest_of_bound, error / bound);
      }
    }
  EXPECT_GT(largest_of_bound, 0.1);
}

TEST(TileProduct, WritesTheRowsThatWereAskedFor) {
  gaussian_source random(5);
  const random_tile tile({}, random);
  const auto a = random_operand({}, random);
  folded_operand operand;
  kvarn::fold_operand(tile.view(), a.data(), operand_precision::int16, operand);
  std::vector<float> all(128);
  kvarn::tile_product(tile.view(), operand, 128, all.data());
  for (const int rows : {0, 1, 17, 127}) {
    constexpr float canary = 4711.0f;
    std::vector<float> product(128, canary);
    kvarn::tile_product(tile.view(), operand, rows, product.data());
    for (int r = 0; r < 128; ++r) {
      const auto i = static_cast<std::size_t>(r);
      ASSERT_EQ(product[i], r < rows ? all[i] : canary);
    }
  }
}

// The largest sum of codes and operands that there is stays within 32 bits.
TEST(TileProduct, LargestSum) {
  const tile_layout layout{kvarn::tile_kind::key, 512, 64, 4};
  oracle::record_fields fields;
  fields.codes.assign(512 * 64, 15);
  fields.zero_bits.assign(512, 0);
  fields.step_code.assign(512, oracle::fp8_code(1.0, false));
  fields.scale_code.assign(64, oracle::fp8_code(1.0, false));
  const auto record = oracle::write_record(fields, layout);
  for (const float sign : {1.0f, -1.0f}) {
    const std::vector<float> a(512, sign);
    folded_operand operand;
    kvarn::fold_operand({record.data(), layout}, a.data(), operand_precision::int16, operand);
    float product[64];
    kvarn::tile_product({record.data(), layout}, operand, 64, product);
    for (const float x : product) EXPECT_NEAR(x, sign * 15 * 512, 0.01);
  }
}

}  // namespace
