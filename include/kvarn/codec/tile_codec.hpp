// Encoding and decoding of tiles: what an engine calls.
#pragma once

#include <cstddef>
#include <vector>

#include "../config.hpp"
#include "../error.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
#include "../simd/on_target.hpp"
#include "encoder.hpp"
#include "query_moment.hpp"
#include "scalar_codec.hpp"
#include "tokens.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// What an encoder needs beside the tokens.
struct encode_options {
  encoder method = encoder::tuned;
  bool rotate = true;                    // false: the tokens are rotated already
  const query_factor* factor = nullptr;  // for keys of encoder::query_aware, else not used
};

// Encodes layout.group tokens into `out` with any recipe. `workspace`: encode_workspace(out.layout)
// floats; its contents do not matter. Every byte of the record is written. The bytes are the same
// on every target. Preconditions: validate(out.layout) is ok; `tokens` has group tokens of head_dim
// channels; `factor` is not null and of the same head_dim where the recipe has error feedback
// (which is for keys).
template <class T>
encode_report encode_tile(tokens_view<T> tokens, tile_view out, const encoder_recipe& recipe,
                          bool rotate, const query_factor* factor, float* workspace,
                          target on = default_target()) {
  KVARN_ASSERT(!recipe.error_feedback ||
               (factor != nullptr && factor->head_dim() == out.layout.cols()));
  const float* const upper = recipe.error_feedback ? factor->upper() : nullptr;
  return on_target::elements<typename tokens_view<T>::element>::encode_tile(
      on, tokens, out, recipe, rotate, upper, workspace);
}

// The same with one of the library's encoders.
template <class T>
encode_report encode_tile(tokens_view<T> tokens, tile_view out, const encode_options& options,
                          float* workspace, target on = default_target()) {
  return encode_tile(tokens, out, recipe_of(options.method, out.layout.kind, out.layout.bits),
                     options.rotate, options.factor, workspace, on);
}

// Decodes row `row` of the tile (a token of keys, a channel of values) as stored, that is rotated:
// layout.cols() floats.
inline void decode_row(const_tile_view tile, int row, float* out, target on = default_target()) {
  on_target::decode_row(on, tile, row, out);
}

// Decodes `count` tokens from `first` on into out's tokens 0 .. count - 1. `rotate_back`: false
// leaves the vectors rotated. FP16 and BF16 output saturates. Precondition: 0 <= first, first +
// count <= layout.group.
template <class T>
void decode_tokens(const_tile_view tile, int first, int count, tokens_view<T> out,
                   bool rotate_back = true, target on = default_target()) {
  KVARN_ASSERT(first >= 0 && count >= 0 && first + count <= tile.layout.group);
  on_target::elements<T>::decode_tokens(on, tile, first, count, out, rotate_back);
}

// Decodes the whole tile.
template <class T>
void decode_tile(const_tile_view tile, tokens_view<T> out, bool rotate_back = true,
                 target on = default_target()) {
  decode_tokens(tile, 0, tile.layout.group, out, rotate_back, on);
}

// Rotates `count` tokens of `head_dim` channels, as attention expects those that are kept exact.
// `out` may be `in`. NaN counts as 0; infinities and values beyond FP16 saturate, before the
// rotation and after it, whatever O is (a bfloat16 then holds 65536). Precondition: head_dim is
// supported.
template <class T, class O>
replaced_values rotate_tokens(tokens_view<T> in, tokens_view<O> out, int count, int head_dim,
                              target on = default_target()) {
  return on_target::element_pairs<typename tokens_view<T>::element, O>::rotate_tokens(
      on, in, out, count, head_dim);
}

// An encoder with its own workspace and checked arguments, for use over many tiles of one layout.
class tile_encoder {
 public:
  static result<tile_encoder> make(const tile_layout& layout, const encode_options& options = {},
                                   target on = default_target()) {
    if (status s = validate(layout); !s.ok()) return s;
    if (status s = validate(options.method); !s.ok()) return s;
    const encoder_recipe recipe = recipe_of(options.method, layout.kind, layout.bits);
    if (recipe.error_feedback) {
      if (options.factor == nullptr)
        return failure(error_code::invalid_argument,
                       {"encoder query_aware needs a query_factor for keys; there is none"});
      if (options.factor->head_dim() != layout.head_dim)
        return failure(error_code::invalid_argument,
                       {"query_factor has head_dim ", options.factor->head_dim(), "; the tile has ",
                        layout.head_dim});
    }
    return tile_encoder(layout, options, on);
  }

  const tile_layout& layout() const noexcept { return layout_; }
  std::size_t record_bytes() const noexcept { return layout_.record_bytes(); }

  // Encodes layout().group tokens into `record`, record_bytes() bytes at any alignment.
  template <class T>
  encode_report operator()(tokens_view<T> tokens, std::byte* record) {
    return encode_tile(tokens, tile_view{record, layout_}, options_, workspace_.data(), on_);
  }

 private:
  tile_encoder(const tile_layout& layout, const encode_options& options, target on)
      : layout_(layout), options_(options), on_(on), workspace_(encode_workspace(layout)) {}

  tile_layout layout_;
  encode_options options_;
  target on_;
  std::vector<float> workspace_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
