// The kernels as functions that take the target: all that the rest of the library knows of them.
//
// A file that includes this compiles every kernel that it calls, for every target. Where
// KVARN_COMPILED_KERNELS is defined, it finds declarations only, and one file of the program has
// all kernels: compiled_kernels.cpp. The CMake target kvarn::compiled does both.
#pragma once

#include <cstddef>

#include "../attention/attention.hpp"
#include "../codec/encoder.hpp"
#include "../codec/scalar_codec.hpp"
#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
#include "target.hpp"

namespace kvarn::on_target {
inline namespace KVARN_KERNELS_NAMESPACE {

// Preconditions of all: is_available(on), and those of the definitions of the same name in
// codec/scalar_codec.hpp, codec/query_sums.hpp and attention/scalar_attention.hpp.

// What depends on the type of an engine's elements: float, float16 or bfloat16.
template <class T>
struct elements {
  static encode_report encode_tile(target on, tokens_view<const T> tokens, tile_view out,
                                   const encoder_recipe& recipe, bool rotate, const float* upper,
                                   float* workspace);
  static void decode_tokens(target on, const_tile_view tile, int first, int count,
                            tokens_view<T> out, bool rotate_back);
  static replaced_values add_queries(target on, tokens_view<const T> queries, int count,
                                     bool rotate, int head_dim, float* sums);
  static void prepare_query(target on, tokens_view<const T> queries, int index, int head_dim,
                            const attention_options& options, float* query);
  static void attend_exact(target on, const cache_format& format, const exact_tokens<T>& tokens,
                           float cap, attention_row* rows, int row_count);
  static void finish_row(target on, const attention_row& row, int dim, bool rotate,
                         tokens_view<T> out, int index);
};

template <class In, class Out>
struct element_pairs {
  static replaced_values rotate_tokens(target on, tokens_view<const In> in, tokens_view<Out> out,
                                       int count, int head_dim);
};

KVARN_KERNELS_INLINE void decode_row(target on, const_tile_view tile, int row, float* out);
KVARN_KERNELS_INLINE void factorize(target on, float* matrix, int head_dim, float damping,
                                    float* workspace);
KVARN_KERNELS_INLINE void attend_sealed(target on, const cache_format& format,
                                        const sealed_run& run, float cap,
                                        operand_precision precision, attention_row* rows,
                                        int row_count);
KVARN_KERNELS_INLINE void join_row(target on, attention_row& row, const attention_row& later,
                                   int dim);
KVARN_KERNELS_INLINE void join_sink_logit(target on, attention_row& row, float logit, int dim);

}  // namespace KVARN_KERNELS_NAMESPACE
}  // namespace kvarn::on_target

#if !defined(KVARN_COMPILED_KERNELS)
#include "on_target.inl"
#endif
