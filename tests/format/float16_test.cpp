// binary16 and bfloat16: every number, every midpoint between neighbours, random binary32 patterns.
#include "kvarn/format/float16.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>

#include "support/oracle_numbers.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

using kvarn::bfloat16;
using kvarn::bits_of;
using kvarn::float16;
using kvarn::float_of_bits;
using kvarn_test::oracle::rounding;
using kvarn_test::oracle::small_float;

static_assert(float16(1.0f).bits == 0x3c00);
static_assert(static_cast<float>(float16::from_bits(0x3555)) == 0x1.554p-2f);
static_assert(float16(65520.0f).bits == 0x7c00 && float16::saturated(65520.0f).bits == 0x7bff);
static_assert(!float16(1e6f).is_finite() && float16::saturated(-1e6f).bits == 0xfbff);
static_assert(bfloat16(1.0f).bits == 0x3f80);
static_assert(bfloat16::saturated(3.4e38f).bits == bfloat16::max_bits);
static_assert(static_cast<float>(bfloat16::from_bits(0xc000)) == -2.0f);
static_assert(sizeof(float16) == 2 && sizeof(bfloat16) == 2);
static_assert(std::is_trivially_copyable_v<float16> && std::is_trivially_copyable_v<bfloat16>);

template <class T>
const small_float& description() {
  return std::is_same_v<T, float16> ? kvarn_test::oracle::binary16 : kvarn_test::oracle::brain16;
}

template <class T>
const rounding& rounding_of() {
  static const rounding instance(description<T>());
  return instance;
}

// What the constructor and `saturated` must give for a binary32 that is not NaN.
template <class T>
void expect_rounding(float value) {
  const unsigned sign = std::signbit(value) ? 0x8000u : 0u;
  const auto code = static_cast<unsigned>(rounding_of<T>()(static_cast<double>(value)));
  ASSERT_EQ(T(value).bits, sign | code) << std::hexfloat << value;
  const auto limited = static_cast<unsigned>(rounding_of<T>().saturated(double{value}));
  ASSERT_EQ(T::saturated(value).bits, sign | limited) << std::hexfloat << value;
}

bool is_nan(float value) { return (bits_of(value) & 0x7fffffffu) > 0x7f800000u; }

template <class T>
class Float16 : public testing::Test {};
using types = testing::Types<float16, bfloat16>;

class names {
 public:
  template <class T>
  static std::string GetName(int) {
    return std::is_same_v<T, float16> ? "binary16" : "bfloat16";
  }
};
TYPED_TEST_SUITE(Float16, types, names);

TYPED_TEST(Float16, DecodesEveryPattern) {
  const small_float& format = description<TypeParam>();
  ASSERT_EQ(TypeParam::max_bits, format.max_code);
  int finite = 0;
  for (int pattern = 0; pattern < 0x10000; ++pattern) {
    const auto number = TypeParam::from_bits(static_cast<std::uint16_t>(pattern));
    const auto value = static_cast<float>(number);
    const int magnitude = pattern & 0x7fff;
    ASSERT_EQ(number.is_finite(), magnitude <= format.max_code) << pattern;
    ASSERT_EQ(std::signbit(value), pattern >= 0x8000) << pattern;
    if (magnitude <= format.max_code) {
      ++finite;
      ASSERT_EQ(std::abs(static_cast<double>(value)), format.value(magnitude)) << pattern;
    } else if (magnitude == format.max_code + 1) {
      ASSERT_TRUE(std::isinf(value)) << pattern;
    } else {
      ASSERT_TRUE(is_nan(value)) << pattern;
    }
  }
  EXPECT_EQ(finite, 2 * (format.max_code + 1));
}

TYPED_TEST(Float16, EveryPatternSurvivesTheRoundTrip) {
  for (int pattern = 0; pattern < 0x10000; ++pattern) {
    const auto number = TypeParam::from_bits(static_cast<std::uint16_t>(pattern));
    const auto value = static_cast<float>(number);
    const int magnitude = pattern & 0x7fff;
    if (magnitude <= description<TypeParam>().max_code + 1) {
      ASSERT_EQ(TypeParam(value).bits, pattern);
      continue;
    }
    // NaN: stays one, keeps its sign and payload, becomes quiet.
    const int quiet = 1 << (description<TypeParam>().mantissa_bits - 1);
    ASSERT_EQ(TypeParam(value).bits, pattern | quiet);
  }
}

TYPED_TEST(Float16, RoundsToNearestEvenAroundEveryMidpoint) {
  const small_float& format = description<TypeParam>();
  for (int code = 0; code <= format.max_code; ++code) {
    const double midpoint = (format.value(code) + format.value(code + 1)) / 2;
    const auto middle = static_cast<float>(midpoint);
    ASSERT_EQ(static_cast<double>(middle), midpoint) << code;
    for (const float sign : {1.0f, -1.0f})
      for (const float toward : {0.0f, middle, std::numeric_limits<float>::infinity()})
        expect_rounding<TypeParam>(sign * std::nextafter(middle, toward));
  }
}

TYPED_TEST(Float16, RoundsRandomPatterns) {
  std::mt19937 random(20240601);
  int nan = 0;
  for (int i = 0; i < 1000000; ++i) {
    const auto pattern = static_cast<std::uint32_t>(random());
    const float value = float_of_bits(pattern);
    if (!is_nan(value)) {
      expect_rounding<TypeParam>(value);
      if (this->HasFatalFailure()) return;
      continue;
    }
    ++nan;
    const TypeParam number(value);
    ASSERT_TRUE(is_nan(static_cast<float>(number))) << std::hex << pattern;
    ASSERT_EQ(number.bits >> 15, pattern >> 31) << std::hex << pattern;
  }
  EXPECT_GT(nan, 1000000 / 256 / 2);
  EXPECT_LT(nan, 1000000 / 256 * 2);
}

// Random patterns seldom hit the range of binary16, so its exponents again, with random mantissas.
TYPED_TEST(Float16, RoundsRandomMantissasOfEveryExponent) {
  std::mt19937 random(7);
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent)
    for (int i = 0; i < 2000; ++i) {
      const auto draw = static_cast<std::uint32_t>(random());
      expect_rounding<TypeParam>(float_of_bits((draw & 0x807fffffu) | exponent << 23));
      if (this->HasFatalFailure()) return;
    }
}

TYPED_TEST(Float16, SpecialValues) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const auto max_code = description<TypeParam>().max_code;
  EXPECT_EQ(TypeParam(infinity).bits, max_code + 1);
  EXPECT_EQ(TypeParam(-infinity).bits, 0x8000 | (max_code + 1));
  EXPECT_EQ(TypeParam::saturated(infinity).bits, max_code);
  EXPECT_EQ(TypeParam::saturated(-infinity).bits, 0x8000 | max_code);
  EXPECT_EQ(TypeParam(0.0f).bits, 0);
  EXPECT_EQ(TypeParam(-0.0f).bits, 0x8000);
  expect_rounding<TypeParam>(std::numeric_limits<float>::denorm_min());
  expect_rounding<TypeParam>(-std::numeric_limits<float>::denorm_min());
  expect_rounding<TypeParam>((std::numeric_limits<float>::max)());
  // A NaN whose payload lies below the bits that are kept must not become an infinity.
  EXPECT_TRUE(is_nan(static_cast<float>(TypeParam(float_of_bits(0x7f800001u)))));
  EXPECT_TRUE(is_nan(static_cast<float>(TypeParam(float_of_bits(0xff800001u)))));
}

#if defined(__SSE2__)
// Inference engines set these flags; the subnormal numbers of binary16 must not notice.
TEST(Float16Environment, FlushingSubnormalsChangesNothing) {
  const unsigned saved = _mm_getcsr();
  constexpr unsigned flush_to_zero = 0x8000u;
  constexpr unsigned denormals_are_zero = 0x0040u;
  int wrong = 0;
  _mm_setcsr(saved | flush_to_zero | denormals_are_zero);
  for (unsigned pattern = 0; pattern <= float16::max_bits; ++pattern) {
    const auto value = static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(pattern)));
    wrong += float16(value).bits != pattern;
  }
  const std::uint32_t smallest =
      bits_of(static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(1))));
  _mm_setcsr(saved);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(smallest, bits_of(0x1p-24f));
}
#endif

}  // namespace
