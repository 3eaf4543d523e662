// What a target offers to callers outside its region: its kernels, told from those of other targets
// by their first argument. Included at the end of each target's namespace.
struct kernels {};

template <class T>
void prepare_query(kernels, tokens_view<T> queries, int index, int head_dim,
                   const attention_options& options, float* query) {
  prepare_query(queries, index, head_dim, options, query);
}

inline void attend_sealed(kernels, const cache_format& format, const sealed_group* groups,
                          std::size_t count, float cap, operand_precision precision,
                          attention_row* rows, int row_count) {
  attend_sealed(format, groups, count, cap, precision, rows, row_count);
}

template <class T>
void attend_exact(kernels, const cache_format& format, const exact_tokens<T>& tokens, float cap,
                  attention_row* rows, int row_count) {
  attend_exact(format, tokens, cap, rows, row_count);
}

inline void join_row(kernels, attention_row& row, const attention_row& later, int dim) {
  join_row(row, later, dim);
}

inline void join_sink_logit(kernels, attention_row& row, float logit, int dim) {
  join_sink_logit(row, logit, dim);
}

template <class T>
void finish_row(kernels, const attention_row& row, int dim, bool rotate, tokens_view<T> out,
                int index) {
  finish_row(row, dim, rotate, out, index);
}

// The codec. Names in parentheses: those of this target alone, not the definitions beside them.

inline void hadamard_unnormalized(kernels, float* x, int n) { (hadamard_unnormalized)(x, n); }

inline void hadamard(kernels, float* x, int n) { (hadamard)(x, n); }

inline void hadamard(kernels, float* x, int n, int count, std::ptrdiff_t stride) {
  (hadamard)(x, n, count, stride);
}

// Floats of workspace of variance_normalize, encode_tile and factorize of this target.
constexpr std::size_t normalize_workspace(kernels, int rows, int cols) {
  return (normalize_workspace)(rows, cols);
}
constexpr std::size_t encode_workspace(kernels, const tile_layout& layout) {
  return (encode_workspace)(layout);
}
constexpr std::size_t factor_workspace(kernels, int head_dim) {
  return (factor_workspace)(head_dim);
}

inline normalize_report variance_normalize(kernels, const float* x, int rows, int cols, float unit,
                                           const normalize_options& options, float* row_scale,
                                           float* col_scale, float* workspace) {
  return (variance_normalize)(x, rows, cols, unit, options, row_scale, col_scale, workspace);
}

template <class T>
encode_report encode_tile(kernels, tokens_view<T> tokens, tile_view out,
                          const encoder_recipe& recipe, bool rotate, const query_factor* factor,
                          float* workspace) {
  return (encode_tile)(tokens, out, recipe, rotate, factor, workspace);
}

inline void decode_row(kernels, const_tile_view tile, int row, float* out) {
  (decode_row)(tile, row, out);
}

template <class T>
void decode_tokens(kernels, const_tile_view tile, int first, int count, tokens_view<T> out,
                   bool rotate_back) {
  (decode_tokens)(tile, first, count, out, rotate_back);
}

template <class T>
void decode_tile(kernels, const_tile_view tile, tokens_view<T> out, bool rotate_back) {
  (decode_tile)(tile, out, rotate_back);
}

// query_moment::add for the sums of a moment, head_dim x head_dim.
template <class T>
replaced_values add_queries(kernels, tokens_view<T> queries, int count, bool rotate, int head_dim,
                            float* sums) {
  return (add_queries)(queries, count, rotate, head_dim, sums);
}

// The sums of a query_moment to the upper of its query_factor, in place.
inline void factorize(kernels, float* matrix, int head_dim, float damping, float* workspace) {
  (factorize)(matrix, head_dim, damping, workspace);
}
