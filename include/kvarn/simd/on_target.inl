// The definitions of on_target.hpp: each calls the kernel of the same name of the chosen target.
#pragma once

#include "dispatch.hpp"
#include "on_target.hpp"

namespace kvarn::on_target {
inline namespace KVARN_KERNELS_NAMESPACE {

template <class T>
encode_report elements<T>::encode_tile(target on, tokens_view<const T> tokens, tile_view out,
                                       const encoder_recipe& recipe, bool rotate,
                                       const float* upper, float* workspace) {
  return with_kernels(on, [&](auto kernels) {
    return kernels.encode_tile(tokens, out, recipe, rotate, upper, workspace);
  });
}

template <class T>
void elements<T>::decode_tokens(target on, const_tile_view tile, int first, int count,
                                tokens_view<T> out, bool rotate_back) {
  with_kernels(on,
               [&](auto kernels) { kernels.decode_tokens(tile, first, count, out, rotate_back); });
}

template <class T>
replaced_values elements<T>::add_queries(target on, tokens_view<const T> queries, int count,
                                         bool rotate, int head_dim, float* sums) {
  return with_kernels(on, [&](auto kernels) {
    return kernels.add_queries(queries, count, rotate, head_dim, sums);
  });
}

template <class T>
void elements<T>::prepare_query(target on, tokens_view<const T> queries, int index, int head_dim,
                                const attention_options& options, float* query) {
  with_kernels(
      on, [&](auto kernels) { kernels.prepare_query(queries, index, head_dim, options, query); });
}

template <class T>
void elements<T>::attend_exact(target on, const cache_format& format, const exact_tokens<T>& tokens,
                               float cap, attention_row* rows, int row_count) {
  with_kernels(on,
               [&](auto kernels) { kernels.attend_exact(format, tokens, cap, rows, row_count); });
}

template <class T>
void elements<T>::finish_row(target on, const attention_row& row, int dim, bool rotate,
                             tokens_view<T> out, int index) {
  with_kernels(on, [&](auto kernels) { kernels.finish_row(row, dim, rotate, out, index); });
}

template <class In, class Out>
replaced_values element_pairs<In, Out>::rotate_tokens(target on, tokens_view<const In> in,
                                                      tokens_view<Out> out, int count,
                                                      int head_dim) {
  return with_kernels(
      on, [&](auto kernels) { return kernels.rotate_tokens(in, out, count, head_dim); });
}

KVARN_KERNELS_INLINE void decode_row(target on, const_tile_view tile, int row, float* out) {
  with_kernels(on, [&](auto kernels) { kernels.decode_row(tile, row, out); });
}

KVARN_KERNELS_INLINE void factorize(target on, float* matrix, int head_dim, float damping,
                                    float* workspace) {
  with_kernels(on, [&](auto kernels) { kernels.factorize(matrix, head_dim, damping, workspace); });
}

KVARN_KERNELS_INLINE void attend_sealed(target on, const cache_format& format,
                                        const sealed_run& run, float cap,
                                        operand_precision precision, attention_row* rows,
                                        int row_count) {
  with_kernels(on, [&](auto kernels) {
    kernels.attend_sealed(format, run, cap, precision, rows, row_count);
  });
}

KVARN_KERNELS_INLINE void join_row(target on, attention_row& row, const attention_row& later,
                                   int dim) {
  with_kernels(on, [&](auto kernels) { kernels.join_row(row, later, dim); });
}

KVARN_KERNELS_INLINE void join_sink_logit(target on, attention_row& row, float logit, int dim) {
  with_kernels(on, [&](auto kernels) { kernels.join_sink_logit(row, logit, dim); });
}

}  // namespace KVARN_KERNELS_NAMESPACE
}  // namespace kvarn::on_target
