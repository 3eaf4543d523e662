// What the dense attentions share: an online softmax over blocks of tokens. Included inside the
// region of each instruction set.

// Turns scores into weights 2^(score - maximum) and joins them into the running softmax; rescale is
// what earlier values are worth now.
inline void weigh_block(float* scores, float& maximum, float& sum, float& rescale) {
  f32 largest = load(scores);
  for (int t = 16; t < block_tokens; t += 16) largest = max(largest, load(scores + t));
  const float above = max_lane(largest);
  const float joined = maximum < above ? above : maximum;
  alignas(64) float rescales[16];
  store(rescales, exp2_of(set1(maximum - joined)));
  rescale = rescales[0];
  maximum = joined;
  f32 total = set1(0.0f);
  for (int t = 0; t < block_tokens; t += 16) {
    const f32 weight = exp2_of(sub(load(scores + t), set1(joined)));
    store(scores + t, weight);
    total = add(total, weight);
  }
  sum = sum * rescale + fold(total);
}

// The queries times softmax_scale * log2(e), and an empty softmax.
inline void start_rows(const dense_queries& in, int head_dim, attention_state& state) {
  const std::ptrdiff_t size = std::ptrdiff_t{in.rows} * head_dim;
  const f32 unit = set1(in.softmax_scale * kvarn::log2_e);
  for (std::ptrdiff_t i = 0; i < size; i += 16) {
    store(state.queries + i, mul(load(in.vectors + i), unit));
    store(state.values + i, set1(0.0f));
  }
  for (int h = 0; h < in.rows; ++h) {
    state.maximum[h] = -1e30f;
    state.sum[h] = 0.0f;
  }
}

inline void finish_rows(const attention_state& state, int rows, int head_dim, float* out) {
  for (int h = 0; h < rows; ++h) {
    const f32 norm = set1(1.0f / state.sum[h]);
    for (int d = 0; d < head_dim; d += 16) {
      const std::ptrdiff_t at = std::ptrdiff_t{h} * head_dim + d;
      store(out + at, mul(load(state.values + at), norm));
    }
  }
}
