// Tiles with every habit that a codec must survive, in every element type and with any strides.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "kvarn/codec/tokens.hpp"
#include "support/tiles.hpp"

namespace kvarn_test {

enum class tile_input {
  ordinary,
  tiny,     // 1e-6 of ordinary
  huge,     // beyond FP16 here and there
  offsets,  // channels of large mean and small spread
  zeros,
  gaps,       // channels and tokens of zeros
  constant,   // every channel constant
  integers,   // many ties
  not_finite  // NaN and infinities in some tokens
};
inline constexpr tile_input tile_inputs[] = {
    tile_input::ordinary, tile_input::tiny,     tile_input::huge,
    tile_input::offsets,  tile_input::zeros,    tile_input::gaps,
    tile_input::constant, tile_input::integers, tile_input::not_finite};

inline std::vector<float> make_tile(tile_input kind, int tokens, int head_dim, std::uint64_t seed) {
  std::vector<float> values = random_tokens(tokens, head_dim, seed);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t t = i / static_cast<std::size_t>(head_dim);
    const std::size_t d = i % static_cast<std::size_t>(head_dim);
    float& x = values[i];
    switch (kind) {
      case tile_input::ordinary:
        break;
      case tile_input::tiny:
        x *= 1e-6f;
        break;
      case tile_input::huge:
        x *= 2e4f;
        break;
      case tile_input::offsets:
        x = 100.0f * std::sin(static_cast<float>(d)) + 0.01f * x;
        break;
      case tile_input::zeros:
        x = 0.0f;
        break;
      case tile_input::gaps:
        if (d % 7 == 3 || t % 31 == 5) x = 0.0f;
        break;
      case tile_input::constant:
        x = std::cos(static_cast<float>(d));
        break;
      case tile_input::integers:
        x = std::nearbyint(2 * x);
        break;
      case tile_input::not_finite:
        if (t % 50 == 7) x = std::numeric_limits<float>::infinity() * (d % 3 == 0 ? -1.0f : 1.0f);
        if (t % 60 == 9 && d % 4 == 1) x = std::numeric_limits<float>::quiet_NaN();
        break;
    }
  }
  return values;
}

// Memory for head vectors of element type T with strides as tokens_view has them, at an address
// that is aligned to nothing, between bytes that nobody may touch.
template <class T>
class strided_tokens {
 public:
  strided_tokens(int tokens, int head_dim, std::ptrdiff_t channel_stride, std::ptrdiff_t gap)
      : channel_stride_(channel_stride),
        token_stride_(head_dim * std::abs(channel_stride) + gap),
        bytes_(static_cast<std::size_t>(token_stride_ * tokens + 2 * margin) * sizeof(T) + 1,
               std::byte{0xa5}),
        first_(margin + (channel_stride < 0 ? (head_dim - 1) * -channel_stride : 0)) {}

  template <class U>
  kvarn::tokens_view<U> view_as() {
    // One byte off: not even the element's own alignment.
    auto* const start = reinterpret_cast<T*>(bytes_.data() + 1);
    return {start + first_, token_stride_, channel_stride_};
  }
  kvarn::tokens_view<T> view() { return view_as<T>(); }
  kvarn::tokens_view<const T> const_view() { return view_as<const T>(); }

  // Rounds values as T does, which keeps infinities and NaN.
  void assign(const std::vector<float>& values, int tokens, int head_dim) {
    for (int t = 0; t < tokens; ++t)
      for (int d = 0; d < head_dim; ++d) {
        const auto value = static_cast<T>(values[static_cast<std::size_t>(t * head_dim + d)]);
        std::memcpy(static_cast<void*>(view().data + t * token_stride_ + d * channel_stride_),
                    &value, sizeof(T));
      }
  }

  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  static constexpr std::ptrdiff_t margin = 40;
  std::ptrdiff_t channel_stride_;
  std::ptrdiff_t token_stride_;
  std::vector<std::byte> bytes_;
  std::ptrdiff_t first_;
};

}  // namespace kvarn_test
