// Head vectors of consecutive tokens as an engine holds them: FP32, FP16 or BF16, any strides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../config.hpp"
#include "../format/float16.hpp"

namespace kvarn {

// Channel d of token t stands at data[t * token_stride + d * channel_stride]. Strides count
// elements and may be negative; the data need not be aligned. `T` is float, float16 or bfloat16,
// const for vectors that are only read.
template <class T>
struct tokens_view {
  T* data = nullptr;
  std::ptrdiff_t token_stride = 0;
  std::ptrdiff_t channel_stride = 1;

  using element = std::remove_const_t<T>;
  static_assert(std::is_same_v<element, float> || std::is_same_v<element, float16> ||
                std::is_same_v<element, bfloat16>);

  KVARN_INLINE float load(int token, int channel) const {
    element value;
    std::memcpy(&value, data + offset(token, channel), sizeof(value));
    return static_cast<float>(value);
  }

  KVARN_INLINE operator tokens_view<const T>() const requires(!std::is_const_v<T>) {
    return {data, token_stride, channel_stride};
  }

  // Rounds to nearest even; values beyond the type's range become its largest finite value.
  KVARN_INLINE void store(int token, int channel, float value) const requires(!std::is_const_v<T>) {
    if constexpr (std::is_same_v<element, float>) {
      std::memcpy(data + offset(token, channel), &value, sizeof(value));
    } else {
      const T rounded = T::saturated(value);
      std::memcpy(data + offset(token, channel), &rounded, sizeof(rounded));
    }
  }

  // The same vectors from token `first` on.
  KVARN_INLINE tokens_view from(int first) const {
    return {data + first * token_stride, token_stride, channel_stride};
  }

 private:
  KVARN_INLINE std::ptrdiff_t offset(int token, int channel) const {
    return token * token_stride + channel * channel_stride;
  }
};

// What was not stored as it came.
struct replaced_values {
  int nan = 0;        // counted as 0
  int saturated = 0;  // infinities and values beyond FP16, clamped to +-65504

  friend constexpr bool operator==(const replaced_values&, const replaced_values&) = default;
};

inline namespace KVARN_ISA_NAMESPACE {

// `value` if an FP16 can hold it, else its replacement. Decides on the bits.
KVARN_HOST_DEVICE inline float sanitize(float value, replaced_values& replaced) {
  constexpr float largest = 65504.0f;
  const std::uint32_t pattern = bits_of(value);
  const std::uint32_t magnitude = pattern & 0x7fffffffu;
  if (magnitude <= bits_of(largest)) return value;
  if (magnitude > 0x7f800000u) {
    ++replaced.nan;
    return 0.0f;
  }
  ++replaced.saturated;
  return (pattern >> 31) != 0 ? -largest : largest;
}

// Loads the `head_dim` channels of one token, sanitized.
template <class T>
KVARN_NOINLINE void load_token(tokens_view<T> tokens, int token, int head_dim, float* x,
                               replaced_values& replaced) {
  for (int d = 0; d < head_dim; ++d) x[d] = sanitize(tokens.load(token, d), replaced);
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
