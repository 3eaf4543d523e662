// Turns a string of bytes into choices: what random tests and fuzzers share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvarn_test {

// Choices from bytes; zeros when they are used up.
class choices {
 public:
  explicit choices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  bool done() const { return next_ >= bytes_.size(); }
  int below(int n) {
    if (n <= 1) return 0;
    unsigned value = take();
    if (n > 200) value |= take() << 8;
    return static_cast<int>(value % static_cast<unsigned>(n));
  }
  template <class V, std::size_t N>
  V of(const V (&values)[N]) {
    return values[below(static_cast<int>(N))];
  }

 private:
  unsigned take() { return done() ? 0u : bytes_[next_++]; }
  std::span<const std::uint8_t> bytes_;
  std::size_t next_ = 0;
};

}  // namespace kvarn_test
