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
