// Error feedback, the second moment of the queries and its factor, written once; included inside
// the region and namespace of each instruction set. The definitions: codec/scalar_codec.hpp,
// codec/query_sums.hpp.

// Columns that feedback rounds one after another before their errors go to the columns behind.
inline constexpr int feedback_block = 8;
inline constexpr int feedback_rows = 128;  // rows at a time

// target[b][...] += or -= sum over i < count, in this order, of vectors[stride * i + ...] *
// coefficients[i][b], from the rows at `target` on: Count vectors of rows, `apart` rows from each
// other; 0: the same rows, for a count of rows that is no multiple of 16 * Count.
template <int Count, bool Subtract>
KVARN_NOINLINE void accumulate_panel(const float* vectors, std::ptrdiff_t stride, int count,
                                     const float* coefficients, std::ptrdiff_t next, float* target,
                                     std::ptrdiff_t target_stride, std::ptrdiff_t apart) {
  f32 sum[feedback_block][Count];
  KVARN_UNROLL
  for (int b = 0; b < feedback_block; ++b) KVARN_UNROLL
  for (int k = 0; k < Count; ++k) sum[b][k] = load(target + target_stride * b + apart * k);
  for (int i = 0; i < count; ++i) {
    f32 v[Count];
    KVARN_UNROLL
    for (int k = 0; k < Count; ++k) v[k] = load(vectors + stride * i + apart * k);
    KVARN_UNROLL
    for (int b = 0; b < feedback_block; ++b) {
      const f32 factor = set1(coefficients[next * i + b]);
      KVARN_UNROLL
      for (int k = 0; k < Count; ++k)
        sum[b][k] = Subtract ? fnma(v[k], factor, sum[b][k]) : fma(v[k], factor, sum[b][k]);
    }
  }
  KVARN_UNROLL
  for (int b = 0; b < feedback_block; ++b) KVARN_UNROLL
  for (int k = 0; k < Count; ++k) store(target + target_stride * b + apart * k, sum[b][k]);
}

// The same for `length` rows, a multiple of 16.
template <bool Subtract>
KVARN_ALWAYS_INLINE void accumulate_products(const float* vectors, std::ptrdiff_t stride, int count,
                                             const float* coefficients, std::ptrdiff_t next,
                                             float* target, std::ptrdiff_t target_stride,
                                             int length) {
  for (int r = 0; r < length; r += 32)
    accumulate_panel<2, Subtract>(vectors + r, stride, count, coefficients, next, target + r,
                                  target_stride, r + 16 < length ? 16 : 0);
}

// Column b of a block: adds the errors of the block's earlier columns to what is to be rounded,
// leaves the code in its place as raw_code gives it, and the error in that of the deviation. `x`
// and `target`: of the block's first column; coefficients[i][b]: from its column i to its column b.
KVARN_NOINLINE void round_column(const encode_state& state, int c, int b, int count,
                                 const float (*coefficients)[feedback_block], float* x,
                                 float (*target)[feedback_rows]) {
  const f32 step = set1(state.step[c + b]);
  const f32 inverse_range = set1(state.inverse_range[c + b]);
  const f32 max_code = set1(static_cast<float>(state.max_code));
  for (int r = 0; r < count; r += 32) {
    const std::ptrdiff_t apart = r + 16 < count ? 16 : 0;  // as in accumulate_panel
    float* const deviation = x + state.stride * b + r;
    f32 sum[2];
    f32 t[2];
    KVARN_UNROLL
    for (int k = 0; k < 2; ++k) {
      sum[k] = load(target[b] + r + apart * k);
      t[k] = load(deviation + apart * k);
    }
    for (int i = 0; i < b; ++i) {
      const float* const error = x + state.stride * i + r;
      const f32 coefficient = set1(coefficients[i][b]);
      KVARN_UNROLL
      for (int k = 0; k < 2; ++k) sum[k] = fma(load(error + apart * k), coefficient, sum[k]);
    }
    KVARN_UNROLL
    for (int k = 0; k < 2; ++k) {
      const f32 code = raw_code(sum[k], inverse_range, max_code);
      store(target[b] + r + apart * k, code);
      store(deviation + apart * k, fnma(sub(code, set1(integer_shift)), step, t[k]));
    }
  }
}

// Codes with error feedback of rows first .. first + count - 1, a multiple of 16 up to
// feedback_rows. Errors take the place of the columns.
KVARN_NOINLINE void encode_with_feedback(encode_state& state, const float* upper, int first,
                                         int count) {
  alignas(64) float coefficients[max_head_dim][feedback_block];
  alignas(64) float raw[16][feedback_rows];  // of 16 columns
  for (int c = 0; c < state.cols; c += feedback_block) {
    for (std::ptrdiff_t i = 0; i < c + feedback_block; ++i)
      std::memcpy(coefficients[i], upper + i * state.cols + c, sizeof(coefficients[i]));
    float(*const target)[feedback_rows] = raw + c % 16;
    float* const block = state.column(c) + first;
    for (int b = 0; b < feedback_block; ++b) {
      float* const x = block + state.stride * b;
      const f32 zero = set1(state.zero[c + b]);
      for (int r = 0; r < count; r += 16) {
        const f32 t = fms(load(x + r), load(state.inverse_scale + first + r), zero);
        store(x + r, t);
        store(target[b] + r, t);
      }
    }
    accumulate_products<false>(state.x + first, state.stride, c, coefficients[0], feedback_block,
                               target[0], feedback_rows, count);
    for (int b = 0; b < feedback_block; ++b)
      round_column(state, c, b, count, coefficients + c, block, target);
    if (c % 16 == 0) continue;
    for (int r = 0; r < count; r += 16) {
      i32 word[2] = {set1_i32(0), set1_i32(0)};
      for (int i = 7; i >= 0; --i) {
        word[0] = append<4>(word[0], bits(load(raw[i] + r)));
        word[1] = append<4>(word[1], bits(load(raw[i + 8] + r)));
      }
      keep_words(state, c - feedback_block, first + r, word[0], word[1]);
    }
  }
}

alignas(64) inline constexpr std::int32_t lane_index[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                            8, 9, 10, 11, 12, 13, 14, 15};

// Adds the products q[i] q[j], j >= i, of `count` vectors of head_dim floats, one after another, to
// sums, head_dim x head_dim.
KVARN_NOINLINE void accumulate_moment(const float* queries, int head_dim, int count, float* sums) {
  const std::ptrdiff_t n = head_dim;
  const i32 lane = load_i32(lane_index);
  for (std::ptrdiff_t row = 0; row < n; row += feedback_block) {
    std::ptrdiff_t col = row / 16 * 16;
    // What lies below the diagonal stays as it is.
    alignas(64) float below[feedback_block][16];
    for (int b = 0; b < feedback_block; ++b) store(below[b], load(sums + (row + b) * n + col));
    accumulate_panel<1, false>(queries + col, n, count, queries + row, n, sums + row * n + col, n,
                               0);
    for (int b = 0; b < feedback_block; ++b) {
      float* const p = sums + (row + b) * n + col;
      const i32 diagonal = set1_i32(static_cast<std::int32_t>(row + b - col));
      store(p, from_bits(select_less(lane, diagonal, bits(load(below[b])), bits(load(p)))));
    }
    col += 16;
    accumulate_products<false>(queries + col, n, count, queries + row, n, sums + row * n + col, n,
                               static_cast<int>(n - col));
  }
}

// As scalar::add_queries.
template <class T>
replaced_values add_queries(tokens_view<T> queries, int count, bool rotate, int head_dim,
                            float* sums) {
  constexpr int at_once = 32;
  alignas(64) float vectors[at_once * max_head_dim];
  const float norm = hadamard_norm(head_dim);
  const tokens_view<const std::remove_const_t<T>> read{queries.data, queries.token_stride,
                                                       queries.channel_stride};
  replaced_values replaced;
  for (int first = 0; first < count; first += at_once) {
    const int several = count - first < at_once ? count - first : at_once;
    const auto rows = load_rows(read, first, several, head_dim, vectors, replaced);
    for (std::ptrdiff_t i = 0; i < several; ++i)
      load_rotated(rows.x + rows.stride * i, head_dim, rotate, norm, vectors + i * head_dim);
    accumulate_moment(vectors, head_dim, several, sums);
  }
  return replaced;
}

// As scalar::factorize.
KVARN_NOINLINE void factorize(float* matrix, int head_dim, float damping, float* workspace) {
  const std::ptrdiff_t n = head_dim;
  // lower[k][i], i <= k, is the element (i, k) of what is left of the matrix: the update of a row j
  // by pivot k subtracts factor[k][0 .. j] * lower[k][j]. The factor stands in `matrix`,
  // transposed.
  float* const lower = aligned(workspace);
  for (std::ptrdiff_t i = 0; i < n; i += 16)
    for (std::ptrdiff_t k = i; k < n; k += 16)
      transpose_block(matrix + i * n + k, n, lower + k * n + i, n);
  f32 diagonal = set1(0.0f);
  for (std::ptrdiff_t i = 0; i < n; i += 16) {
    alignas(64) float entries[16];
    for (std::ptrdiff_t l = 0; l < 16; ++l) entries[l] = matrix[(i + l) * (n + 1)];
    diagonal = add(diagonal, load(entries));
  }
  const float lambda = std::fma(fold(diagonal), damping / static_cast<float>(n), 1e-20f);
  for (std::ptrdiff_t i = 0; i < n; ++i) lower[i * (n + 1)] = lower[i * (n + 1)] + lambda;

  for (std::ptrdiff_t block = n - feedback_block; block >= 0; block -= feedback_block) {
    const auto length = static_cast<int>((block + feedback_block + 15) / 16 * 16);
    float* const rows = lower + block * n;
    // Pivots n - 1 down to block + feedback_block.
    accumulate_products<true>(matrix + (n - 1) * n, -n,
                              static_cast<int>(n - feedback_block - block),
                              lower + (n - 1) * n + block, -n, rows, n, length);
    for (int b = feedback_block - 1; b >= 0; --b) {
      const float* const pivot = rows + b * n;
      const f32 inverse_pivot = set1(1.0f / pivot[block + b]);
      float* const factor = matrix + (block + b) * n;
      for (int i = 0; i < length; i += 16) {
        const f32 u = mul(load(pivot + i), inverse_pivot);
        store(factor + i, u);
        for (int j = 0; j < b; ++j) {
          float* const row = rows + j * n + i;
          store(row, fnma(u, set1(pivot[block + j]), load(row)));
        }
      }
    }
  }
  for (std::ptrdiff_t i = 0; i < n; i += 16) {
    for (std::ptrdiff_t k = i + 16; k < n; k += 16) {
      transpose_block(matrix + k * n + i, n, matrix + i * n + k, n);
      for (std::ptrdiff_t l = 0; l < 16; ++l) store(matrix + (k + l) * n + i, set1(0.0f));
    }
    float* const diagonal_block = matrix + i * (n + 1);
    transpose_block(diagonal_block, n, diagonal_block, n);
    for (std::int32_t l = 0; l < 16; ++l) {
      float* const row = diagonal_block + l * n;
      const i32 above =
          select_less(set1_i32(l), load_i32(lane_index), bits(load(row)), set1_i32(0));
      store(row, from_bits(above));
    }
  }
}
