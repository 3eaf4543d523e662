// Attention over keys and values in binary16, written once; included inside the region of each
// instruction set.
//
// As one would write it for speed: blocks of tokens with an online softmax, up to four queries that
// share each converted number, sums in registers, the next block prefetched while this one is
// worked on. Cold, it waits for memory.

// scores[h][t] = the inner product of query h and key t, for block_tokens tokens. Prefetches as
// many keys from `next` on.
template <int Rows>
void score_half(const kvarn::float16* keys, const kvarn::float16* next, int head_dim,
                const float* queries, float (*scores)[block_tokens]) {
  constexpr int tokens_per_fold = Rows == 1 ? 16 : Rows == 2 ? 8 : 4;
  constexpr int tokens_at_once = half_accumulators / (Rows == 3 ? 4 : Rows);
  constexpr int step = tokens_at_once < tokens_per_fold ? tokens_at_once : tokens_per_fold;
  f32 sums[16];
  for (f32& sum : sums) sum = set1(0.0f);
  for (int t = 0; t < block_tokens; t += tokens_per_fold) {
    for (int first = 0; first < tokens_per_fold; first += step) {
      const kvarn::float16* const key = keys + static_cast<std::ptrdiff_t>(t + first) * head_dim;
      const kvarn::float16* const ahead = next + static_cast<std::ptrdiff_t>(t + first) * head_dim;
      f32 sum[Rows][step];
      KVARN_UNROLL
      for (int h = 0; h < Rows; ++h) KVARN_UNROLL
      for (int i = 0; i < step; ++i) sum[h][i] = set1(0.0f);
      for (int d = 0; d < head_dim; d += 16) {
        // A few lines at a time: a burst would hold the fill buffers that loads need.
        prefetch_lines(ahead + step * d, 2 * step * 16);
        f32 x[step];
        KVARN_UNROLL
        for (int i = 0; i < step; ++i) x[i] = load_half(key + i * head_dim + d);
        KVARN_UNROLL
        for (int h = 0; h < Rows; ++h) {
          const f32 q = load(queries + h * head_dim + d);
          KVARN_UNROLL
          for (int i = 0; i < step; ++i) sum[h][i] = fma(q, x[i], sum[h][i]);
        }
      }
      KVARN_UNROLL
      for (int h = 0; h < Rows; ++h) KVARN_UNROLL
      for (int i = 0; i < step; ++i) sums[h * tokens_per_fold + first + i] = sum[h][i];
    }
    alignas(64) float folded[16];
    store(folded, fold_each(sums));
    for (int h = 0; h < Rows; ++h)
      std::memcpy(scores[h] + t, folded + h * tokens_per_fold, tokens_per_fold * sizeof(float));
  }
}

// values[h] = values[h] * rescale[h] + the sum over block_tokens tokens of weights[h][t] * value t.
// Prefetches as many values from `next` on.
template <int Rows, int Vectors>
void sum_half(const kvarn::float16* tokens, const kvarn::float16* next, int head_dim,
              const float (*weights)[block_tokens], const float* rescale, float* values) {
  for (int d = 0; d < head_dim; d += 16 * Vectors) {
    f32 sum[Rows][Vectors];
    KVARN_UNROLL
    for (int h = 0; h < Rows; ++h) KVARN_UNROLL
    for (int i = 0; i < Vectors; ++i) sum[h][i] = set1(0.0f);
    const kvarn::float16* value = tokens + d;
    for (int t = 0; t < block_tokens; ++t, value += head_dim) {
      prefetch_lines(next + static_cast<std::ptrdiff_t>(t) * head_dim + d,
                     std::ptrdiff_t{32} * Vectors);
      f32 x[Vectors];
      KVARN_UNROLL
      for (int i = 0; i < Vectors; ++i) x[i] = load_half(value + 16 * i);
      KVARN_UNROLL
      for (int h = 0; h < Rows; ++h) {
        const f32 weight = set1(weights[h][t]);
        KVARN_UNROLL
        for (int i = 0; i < Vectors; ++i) sum[h][i] = fma(weight, x[i], sum[h][i]);
      }
    }
    for (int h = 0; h < Rows; ++h) KVARN_UNROLL
    for (int i = 0; i < Vectors; ++i) {
      float* const at = values + h * head_dim + d + 16 * i;
      store(at, fma(load(at), set1(rescale[h]), sum[h][i]));
    }
  }
}

// Takes rows row .. row + Rows - 1 through the block at element `at`, and prefetches that at
// `next`.
template <int Rows>
void attend_half_block(const half_memory& memory, std::ptrdiff_t at, std::ptrdiff_t next, int row,
                       attention_state& state) {
  const int dim = memory.head_dim;
  alignas(64) float scores[Rows][block_tokens];
  float rescale[Rows];
  score_half<Rows>(memory.keys + at, memory.keys + next, dim, state.queries + row * dim, scores);
  for (int h = 0; h < Rows; ++h)
    weigh_block(scores[h], state.maximum[row + h], state.sum[row + h], rescale[h]);
  constexpr int vectors = half_accumulators / (Rows == 3 ? 4 : Rows);
  float* const values = state.values + row * dim;
  if constexpr (vectors > 4) {
    if (dim % 128 == 0)
      return sum_half<Rows, 8>(memory.values + at, memory.values + next, dim, scores, rescale,
                               values);
  }
  constexpr int few = vectors < 4 ? vectors : 4;
  sum_half<Rows, few>(memory.values + at, memory.values + next, dim, scores, rescale, values);
}

inline void attend_half(const half_memory& memory, const dense_queries& queries,
                        attention_state& state) {
  const int dim = memory.head_dim;
  const std::ptrdiff_t block = std::ptrdiff_t{block_tokens} * dim;
  const std::ptrdiff_t end = std::ptrdiff_t{memory.tokens} * dim;
  start_rows(queries, dim, state);
  for (std::ptrdiff_t at = 0; at < end; at += block) {
    const std::ptrdiff_t next = at + block < end ? at + block : at;
    for (int row = 0; row < queries.rows;) {
      const int left = queries.rows - row;
      if (left >= 4) {
        attend_half_block<4>(memory, at, next, row, state);
        row += 4;
      } else if (left == 3) {
        attend_half_block<3>(memory, at, next, row, state);
        row += 3;
      } else if (left == 2) {
        attend_half_block<2>(memory, at, next, row, state);
        row += 2;
      } else {
        attend_half_block<1>(memory, at, next, row, state);
        row += 1;
      }
    }
  }
  finish_rows(state, queries.rows, dim, queries.out);
}
