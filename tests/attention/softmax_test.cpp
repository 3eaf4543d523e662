// Powers, logarithms and joins of a softmax against double precision.
#include "kvarn/attention/softmax.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "support/profiles.hpp"

namespace {

using kvarn::exp2_of;
using kvarn::log_of;
constexpr float infinity = std::numeric_limits<float>::infinity();

TEST(Exp2, ErrorOverTheWholeRange) {
  double largest = 0;
  long count = 0;
  const auto measure = [&](float x) {
    const double exact = std::exp2(static_cast<double>(x));
    largest = (std::max)(largest, std::abs(static_cast<double>(exp2_of(x)) / exact - 1));
    ++count;
  };
  // Every 61st number of both signs from 2^-40 on: all binades, all low bits.
  for (std::uint32_t bits = kvarn::bits_of(0x1p-40f); bits < kvarn::bits_of(128.0f); bits += 61) {
    const float x = kvarn::float_of_bits(bits);
    measure(x);
    if (x <= 125.0f) measure(-x);
  }
  measure(-125.0f);
  EXPECT_GT(count, 10'000'000);
  EXPECT_LT(largest, 2.3e-7);
  EXPECT_GT(largest, 6e-8);  // half a unit in the last place, which no binary32 result undercuts
}

TEST(Exp2, ExactWhereItCanBe) {
  for (int n = -125; n <= 127; ++n) EXPECT_EQ(exp2_of(static_cast<float>(n)), std::ldexp(1.0f, n));
  EXPECT_EQ(exp2_of(128.0f), infinity);
  EXPECT_EQ(exp2_of(-0.0f), 1.0f);
}

TEST(Exp2, NothingBelowItsRange) {
  for (const float x : {std::nextafter(-125.0f, -infinity), -126.0f, -150.0f, -1e30f, -infinity,
                        std::numeric_limits<float>::quiet_NaN()})
    EXPECT_EQ(kvarn::bits_of(exp2_of(x)), 0u) << x;
}

// Weights relative to a maximum never exceed 1.
TEST(Exp2, AtMostOneForNegativeNumbers) {
  for (std::uint32_t bits = 1; bits < kvarn::bits_of(4.0f); bits += 997)
    ASSERT_LE(exp2_of(-kvarn::float_of_bits(bits)), 1.0f) << kvarn::float_of_bits(bits);
}

TEST(Log, IsTheNearestFloat) {
  kvarn_test::gaussian_source random(1);
  long rounded_elsewhere = 0;
  constexpr long count = 1'000'000;
  for (long i = 0; i < count; ++i) {
    const auto x = static_cast<float>(std::exp2(-100 + 200 * random.uniform()));
    // Ordinary maxima, none at all, and such that the result nearly cancels.
    float exponent = 0.0f;
    if (i % 3 == 1) exponent = static_cast<float>(1000 * (random.uniform() - 0.5));
    if (i % 3 == 2) exponent = -std::round(std::log2(x));
    const double exact = std::log(static_cast<double>(x)) +
                         static_cast<double>(exponent) * 0.693147180559945309417232;
    const float got = log_of(x, exponent);
    const auto nearest = static_cast<float>(exact);
    if (got == nearest) continue;
    ++rounded_elsewhere;
    const bool adjacent =
        got == std::nextafter(nearest, infinity) || got == std::nextafter(nearest, -infinity);
    ASSERT_TRUE(adjacent || std::abs(exact) < 1e-9) << x << " " << exponent;
  }
  EXPECT_LT(rounded_elsewhere, count / 10000);
}

TEST(Log, ExactWhereItCanBe) {
  EXPECT_EQ(log_of(1.0f, 0.0f), 0.0f);
  EXPECT_EQ(log_of(1024.0f, -10.0f), 0.0f);
  EXPECT_EQ(log_of(std::numeric_limits<float>::min(), 126.0f), 0.0f);
  EXPECT_EQ(log_of(1.0f, 1.0f), std::log(2.0f));
}

TEST(JoinMaxima, WeighsBothSides) {
  const auto join = kvarn::join_maxima(3.0f, 5.0f);
  EXPECT_EQ(join.maximum, 5.0f);
  EXPECT_EQ(join.first, 0.25f);
  EXPECT_EQ(join.second, 1.0f);
  const auto swapped = kvarn::join_maxima(5.0f, 3.0f);
  EXPECT_EQ(swapped.maximum, 5.0f);
  EXPECT_EQ(swapped.first, 1.0f);
  EXPECT_EQ(swapped.second, 0.25f);
  const auto from_nothing = kvarn::join_maxima(-infinity, -7.0f);
  EXPECT_EQ(from_nothing.maximum, -7.0f);
  EXPECT_EQ(from_nothing.first, 0.0f);
  EXPECT_EQ(from_nothing.second, 1.0f);
  EXPECT_EQ(kvarn::join_maxima(1e30f, -1e30f).second, 0.0f);
}

}  // namespace
