// Small floating-point formats in double precision: every number from its definition, every
// rounding by a search over all numbers. For tests; shares no code with the library.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace kvarn_test::oracle {

// A binary format by its widths, the sign apart. Codes count up from 0; an exponent of 0 holds the
// subnormal numbers, the bias is 2^(exponent_bits - 1) - 1 as in IEEE 754.
struct small_float {
  int exponent_bits;
  int mantissa_bits;
  int max_code;  // of the largest finite number

  // Numbers of max_code + 1 go on as if that exponent were an ordinary one.
  double value(int code) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
};

inline constexpr small_float binary16{5, 10, 0x7bff};
inline constexpr small_float brain16{8, 7, 0x7f7f};
inline constexpr small_float unsigned_e5m3{5, 3, 0xf7};
inline constexpr small_float ocp_e4m3{4, 3, 0x7e};

// The code of the nearest number to |value|, ties to the even code: 0 .. max_code, or max_code + 1
// where the value lies nearer to the number that would follow.
class rounding {
 public:
  explicit rounding(const small_float& format) {
    for (int code = 0; code <= format.max_code + 1; ++code) numbers_.push_back(format.value(code));
  }

  int operator()(double value) const {
    const double magnitude = std::abs(value);
    const auto above = std::lower_bound(numbers_.begin(), numbers_.end(), magnitude);
    if (above == numbers_.end()) return static_cast<int>(numbers_.size()) - 1;
    const auto code = static_cast<int>(above - numbers_.begin());
    if (code == 0) return 0;
    const double up = *above - magnitude;
    const double down = magnitude - *(above - 1);
    if (up != down) return up < down ? code : code - 1;
    return code % 2 == 0 ? code : code - 1;
  }

  // Without the number behind the largest.
  int saturated(double value) const {
    return (std::min)((*this)(value), static_cast<int>(numbers_.size()) - 2);
  }

  double number(int code) const { return numbers_[static_cast<std::size_t>(code)]; }

 private:
  std::vector<double> numbers_;
};

inline const rounding& round_binary16() {
  static const rounding instance(binary16);
  return instance;
}

// The nearest binary16 number, saturated.
inline double to_binary16(double value) {
  const rounding& round = round_binary16();
  return std::copysign(round.number(round.saturated(value)), value);
}

// The code of an FP8 step or scale, clamped to 1 .. max_code. UE5M3 goes by way of binary16, as its
// definition has it.
inline int fp8_code(double value, bool e4m3) {
  static const rounding to_e4m3(ocp_e4m3);
  static const rounding to_ue5m3(unsigned_e5m3);
  if (!(value > 0)) return 1;
  const int code = e4m3 ? to_e4m3.saturated(value)
                        : to_ue5m3.saturated(round_binary16().number(round_binary16()(value)));
  return (std::max)(code, 1);
}

inline double fp8_value(int code, bool e4m3) {
  return e4m3 ? ocp_e4m3.value(code) : unsigned_e5m3.value(code);
}

}  // namespace kvarn_test::oracle
