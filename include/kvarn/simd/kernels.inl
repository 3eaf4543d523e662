// What a target offers to callers outside its region: its kernels, as static functions of a type.
// Included at the end of each target's namespace, of which `here` is an alias.
struct kernels {
  static void hadamard_unnormalized(float* x, int n) { here::hadamard_unnormalized(x, n); }
  static void hadamard(float* x, int n) { here::hadamard(x, n); }
  static void hadamard(float* x, int n, int count, std::ptrdiff_t stride) {
    here::hadamard(x, n, count, stride);
  }

  // Floats of workspace of this target's variance_normalize.
  static constexpr std::size_t normalize_workspace(int rows, int cols) {
    return here::normalize_workspace(rows, cols);
  }
  static normalize_report variance_normalize(const float* x, int rows, int cols, float unit,
                                             const normalize_options& options, float* row_scale,
                                             float* col_scale, float* workspace) {
    return here::variance_normalize(x, rows, cols, unit, options, row_scale, col_scale, workspace);
  }

  template <class T>
  static encode_report encode_tile(tokens_view<T> tokens, tile_view out,
                                   const encoder_recipe& recipe, bool rotate,
                                   const float* upper_factor, float* workspace) {
    return here::encode_tile(tokens, out, recipe, rotate, upper_factor, workspace);
  }

  static void decode_row(const_tile_view tile, int row, float* out) {
    here::decode_row(tile, row, out);
  }

  template <class T>
  static void decode_tokens(const_tile_view tile, int first, int count, tokens_view<T> out,
                            bool rotate_back) {
    here::decode_tokens(tile, first, count, out, rotate_back);
  }

  template <class T, class O>
  static replaced_values rotate_tokens(tokens_view<T> in, tokens_view<O> out, int count,
                                       int head_dim) {
    return here::rotate_tokens(in, out, count, head_dim);
  }

  template <class T>
  static replaced_values add_queries(tokens_view<T> queries, int count, bool rotate, int head_dim,
                                     float* sums) {
    return here::add_queries(queries, count, rotate, head_dim, sums);
  }

  static void factorize(float* matrix, int head_dim, float damping, float* workspace) {
    here::factorize(matrix, head_dim, damping, workspace);
  }

  template <class T>
  static void prepare_query(tokens_view<T> queries, int index, int head_dim,
                            const attention_options& options, float* query) {
    here::prepare_query(queries, index, head_dim, options, query);
  }

  static void attend_sealed(const cache_format& format, const sealed_run& run, float cap,
                            operand_precision precision, attention_row* rows, int row_count) {
    here::attend_sealed(format, run, cap, precision, rows, row_count);
  }

  template <class T>
  static void attend_exact(const cache_format& format, const exact_tokens<T>& tokens, float cap,
                           attention_row* rows, int row_count) {
    here::attend_exact(format, tokens, cap, rows, row_count);
  }

  static void join_row(attention_row& row, const attention_row& later, int dim) {
    here::join_row(row, later, dim);
  }

  static void join_sink_logit(attention_row& row, float logit, int dim) {
    here::join_sink_logit(row, logit, dim);
  }

  template <class T>
  static void finish_row(const attention_row& row, int dim, bool rotate, tokens_view<T> out,
                         int index) {
    here::finish_row(row, dim, rotate, out, index);
  }
};
