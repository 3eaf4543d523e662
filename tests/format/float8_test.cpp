// UE5M3 and E4M3: every number, every midpoint between neighbours, the clamps.
#include "kvarn/format/float8.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>

#include "support/oracle_numbers.hpp"

namespace {

using kvarn::e4m3;
using kvarn::float16;
using kvarn::float_of_bits;
using kvarn::ue5m3;
using kvarn_test::oracle::small_float;

static_assert(ue5m3(1.0f).bits == 15 << 3 && static_cast<float>(ue5m3::from_bits(15 << 3)) == 1.0f);
static_assert(e4m3(1.0f).bits == 7 << 3 && static_cast<float>(e4m3::from_bits(7 << 3)) == 1.0f);
static_assert(static_cast<float>(ue5m3::from_bits(ue5m3::max_code)) == 61440.0f);
static_assert(static_cast<float>(e4m3::from_bits(e4m3::max_code)) == 448.0f);
static_assert(static_cast<float>(ue5m3::from_bits(ue5m3::min_code)) == 0x1p-17f);
static_assert(static_cast<float>(e4m3::from_bits(e4m3::min_code)) == 0x1p-9f);
static_assert(ue5m3(0.0f).bits == ue5m3::min_code && e4m3(-1.0f).bits == e4m3::min_code);
static_assert(sizeof(ue5m3) == 1 && sizeof(e4m3) == 1);

template <class T>
struct expectation;
template <>
struct expectation<ue5m3> {
  static constexpr bool is_e4m3 = false;
  static constexpr small_float format = kvarn_test::oracle::unsigned_e5m3;
};
template <>
struct expectation<e4m3> {
  static constexpr bool is_e4m3 = true;
  static constexpr small_float format = kvarn_test::oracle::ocp_e4m3;
};

template <class T>
class Float8 : public testing::Test {};
using types = testing::Types<ue5m3, e4m3>;

class names {
 public:
  template <class T>
  static std::string GetName(int) {
    return std::is_same_v<T, ue5m3> ? "ue5m3" : "e4m3";
  }
};
TYPED_TEST_SUITE(Float8, types, names);

TYPED_TEST(Float8, DecodesEveryCode) {
  const small_float& format = expectation<TypeParam>::format;
  ASSERT_EQ(TypeParam::max_code, format.max_code);
  EXPECT_EQ(std::ilogb(format.value(format.max_code)), TypeParam::max_exponent);
  EXPECT_EQ(std::ilogb(format.value(1 << format.mantissa_bits)), TypeParam::min_normal_exponent);
  for (int code = 0; code <= format.max_code; ++code) {
    const auto number = TypeParam::from_bits(static_cast<std::uint8_t>(code));
    ASSERT_EQ(static_cast<double>(static_cast<float>(number)), format.value(code)) << code;
    ASSERT_TRUE(number.is_valid()) << code;
  }
  for (int code = format.max_code + 1; code < 256; ++code) {
    const auto number = TypeParam::from_bits(static_cast<std::uint8_t>(code));
    ASSERT_FALSE(number.is_valid()) << code;
    const auto value = static_cast<float>(number);
    ASSERT_TRUE(std::isnan(value) || std::isinf(value) || std::signbit(value)) << code;
  }
}

TEST(Float8E4m3, NegativeCodesMirrorThePositiveOnes) {
  for (int code = 0; code < 0x7f; ++code)
    ASSERT_EQ(static_cast<float>(e4m3::from_bits(static_cast<std::uint8_t>(code | 0x80))),
              -static_cast<float>(e4m3::from_bits(static_cast<std::uint8_t>(code))));
  EXPECT_TRUE(std::isnan(static_cast<float>(e4m3::from_bits(0x7f))));
  EXPECT_TRUE(std::isnan(static_cast<float>(e4m3::from_bits(0xff))));
}

TEST(Float8Ue5m3, IsTheUpperByteOfABinary16WithoutItsSign) {
  for (int code = 0; code < 256; ++code) {
    const auto wide = float16::from_bits(static_cast<std::uint16_t>(code << 7));
    const auto value = static_cast<float>(ue5m3::from_bits(static_cast<std::uint8_t>(code)));
    ASSERT_EQ(kvarn::bits_of(value), kvarn::bits_of(static_cast<float>(wide))) << code;
  }
}

// From every binary16: rounded once, ties to even, clamped.
TEST(Float8Ue5m3, RoundsEveryBinary16) {
  const kvarn_test::oracle::rounding nearest(kvarn_test::oracle::unsigned_e5m3);
  for (int pattern = 0; pattern <= float16::max_bits; ++pattern) {
    const auto value = static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(pattern)));
    const int code = (std::max)(nearest.saturated(static_cast<double>(value)), 1);
    ASSERT_EQ(ue5m3(value).bits, code) << pattern;
  }
}

TYPED_TEST(Float8, RoundsAroundEveryMidpoint) {
  const small_float& format = expectation<TypeParam>::format;
  for (int code = 0; code <= format.max_code; ++code) {
    const auto middle = static_cast<float>((format.value(code) + format.value(code + 1)) / 2);
    for (const float toward : {0.0f, middle, std::numeric_limits<float>::infinity()}) {
      const float value = std::nextafter(middle, toward);
      const int expected =
          kvarn_test::oracle::fp8_code(double{value}, expectation<TypeParam>::is_e4m3);
      ASSERT_EQ(TypeParam(value).bits, expected) << std::hexfloat << value;
    }
    // Away from the midpoint by more than a binary16 can lose, the nearest number it is, however
    // many roundings.
    if (code == 0 || code == format.max_code) continue;
    EXPECT_EQ(TypeParam(middle * 1.005f).bits, code + 1);
    EXPECT_EQ(TypeParam(middle * 0.995f).bits, code);
  }
}

TYPED_TEST(Float8, RoundsPositivePatterns) {
  std::mt19937 random(11);
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent)
    for (int i = 0; i < 1000; ++i) {
      const float value =
          float_of_bits((static_cast<std::uint32_t>(random()) & 0x007fffffu) | exponent << 23);
      const int expected =
          kvarn_test::oracle::fp8_code(double{value}, expectation<TypeParam>::is_e4m3);
      ASSERT_EQ(TypeParam(value).bits, expected) << std::hexfloat << value;
    }
}

TYPED_TEST(Float8, ClampsWhatHasNoCode) {
  for (const float value : {0.0f, -0.0f, -1.0f, -1e30f, -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::denorm_min(), 1e-30f})
    EXPECT_EQ(TypeParam(value).bits, TypeParam::min_code) << value;
  for (const float value :
       {62000.0f, 65504.0f, 65536.0f, 1e30f, (std::numeric_limits<float>::max)(),
        std::numeric_limits<float>::infinity()})
    EXPECT_EQ(TypeParam(value).bits, TypeParam::max_code) << value;
}

TYPED_TEST(Float8, EveryCodeSurvivesTheRoundTrip) {
  for (int code = TypeParam::min_code; code <= TypeParam::max_code; ++code) {
    const auto value = static_cast<float>(TypeParam::from_bits(static_cast<std::uint8_t>(code)));
    ASSERT_EQ(TypeParam(value).bits, code);
  }
}

}  // namespace
