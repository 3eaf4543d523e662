// Vectors of several heads and consecutive tokens as an engine holds them.
#pragma once

#include <cstddef>

#include "../codec/tokens.hpp"
#include "../config.hpp"

namespace kvarn {

// Channel d of head h of token t stands at
// data[t * token_stride + h * head_stride + d * channel_stride]; else as tokens_view.
template <class T>
struct heads_view {
  T* data = nullptr;
  std::ptrdiff_t token_stride = 0;
  std::ptrdiff_t head_stride = 0;
  std::ptrdiff_t channel_stride = 1;

  // One head, all tokens.
  KVARN_INLINE tokens_view<T> head(int h) const {
    return {data + h * head_stride, token_stride, channel_stride};
  }
  // One token: its heads from `first_head` on count as tokens.
  KVARN_INLINE tokens_view<T> token(int t, int first_head = 0) const {
    return {data + t * token_stride + first_head * head_stride, head_stride, channel_stride};
  }
  // The same from token `first` on.
  KVARN_INLINE heads_view from(int first) const {
    return {data + first * token_stride, token_stride, head_stride, channel_stride};
  }
};

// [tokens][heads][head_dim], without gaps.
template <class T>
KVARN_INLINE heads_view<T> token_major(T* data, int heads, int head_dim) {
  return {data, std::ptrdiff_t{heads} * head_dim, head_dim, 1};
}

// [heads][tokens][head_dim], without gaps.
template <class T>
KVARN_INLINE heads_view<T> head_major(T* data, int tokens, int head_dim) {
  return {data, head_dim, std::ptrdiff_t{tokens} * head_dim, 1};
}

}  // namespace kvarn
