// Encoding of one tile, written once; included inside the region and namespace of each instruction
// set. The definition: codec/scalar_codec.hpp and codec/round_columns.hpp.
//
// The tile is column-major: a lane is a row. The tokens of values are its columns as they come,
// error feedback goes from column to column, and codes of one row that are packed into one word
// meet in one lane. Columns are worked on 16 at a time, so that they stay in the L1 cache; what
// belongs to 16 columns (zero, step, sums) has a lane for each.

inline constexpr float code_magic = 12582912.0f;  // 1.5 * 2^23: kvarn::round_code

// What the steps of an encoding share.
struct encode_state {
  float* x;               // rows x cols, column c at x + stride * c
  std::ptrdiff_t stride;  // column_stride(rows)
  tile_view out;
  int rows;
  int cols;
  int max_code;
  float weight_sum;  // of row_weight, in the order of kvarn::lane_sum
  alignas(64) float inverse_scale[max_head_dim];
  alignas(64) float row_weight[max_head_dim];
  // The grid by which codes are made.
  alignas(64) float zero[max_head_dim];
  alignas(64) float step[max_head_dim];
  alignas(64) float inverse_range[max_head_dim];
  // Packed codes: word w of row r at words[rows * w + r]; the plane of high bits after the other.
  alignas(64) std::int32_t words[max_head_dim * max_group * 4 / 32];

  KVARN_ALWAYS_INLINE float* column(int c) const { return x + stride * c; }
};

// Loads channels 0 .. head_dim - 1 of a token as floats, sanitized, and rotates them, without the
// factor, where it says so.
template <class T>
void load_vector(tokens_view<T> tokens, int token, int head_dim, bool rotate, float* x,
                 replaced_values& replaced) {
  const i32 largest_allowed = set1_i32(largest_storable);
  if (tokens.channel_stride == 1) {
    const T* const in = tokens.data + token * tokens.token_stride;
    if (rotate && head_dim == 64 && !any_less(largest_allowed, rotate_registers<4>(in, x, 1.0f)))
      return;
    if (rotate && head_dim == 128 && !any_less(largest_allowed, rotate_registers<8>(in, x, 1.0f)))
      return;
    for (int d = 0; d < head_dim; d += 16) store(x + d, load_channels(in + d));
  } else {
    for (int d = 0; d < head_dim; ++d) x[d] = tokens.load(token, d);
  }
  i32 largest = magnitude_bits(load(x));
  for (int d = 16; d < head_dim; d += 16) largest = max(largest, magnitude_bits(load(x + d)));
  if (any_less(largest_allowed, largest))
    for (int d = 0; d < head_dim; d += 16) store(x + d, sanitize(load(x + d), replaced));
  if (rotate) hadamard_unnormalized(x, head_dim);
}

// Sixteen channels of 16 tokens: r[i] has channel + i of token + lane.
template <class T>
KVARN_ALWAYS_INLINE void load_columns(tokens_view<T> tokens, int token, int channel, f32 (&r)[16],
                                      replaced_values& replaced) {
  if (tokens.channel_stride == 1) {
    const T* in = tokens.data + token * tokens.token_stride + channel;
    KVARN_UNROLL
    for (int i = 0; i < 16; ++i) r[i] = load_channels(in + i * tokens.token_stride);
  } else {
    for (int i = 0; i < 16; ++i) {
      alignas(64) float x[16];
      for (int d = 0; d < 16; ++d) x[d] = tokens.load(token + i, channel + d);
      r[i] = load(x);
    }
  }
  i32 largest = magnitude_bits(r[0]);
  KVARN_UNROLL
  for (int i = 1; i < 16; ++i) largest = max(largest, magnitude_bits(r[i]));
  if (any_less(set1_i32(largest_storable), largest))
    for (int i = 0; i < 16; ++i) r[i] = sanitize(r[i], replaced);
  transpose(r);
}

// kvarn::fold of 16 sums in each lane, into s[0].
template <int Half>
KVARN_ALWAYS_INLINE void fold_registers(f32 (&s)[16]) {
  KVARN_UNROLL
  for (int i = 0; i < Half; ++i) s[i] = add(s[i], s[i + Half]);
  if constexpr (Half > 1) fold_registers<Half / 2>(s);
}

// The sum of the squares of each row, where Weighted of its columns times `weight`.
template <bool Weighted>
[[gnu::noinline]] void sum_row_squares(const float* x, std::ptrdiff_t stride, int rows, int cols,
                                       const float* weight, float* squares) {
  for (int r = 0; r < rows; r += 16) {
    f32 s[16];
    KVARN_UNROLL
    for (int i = 0; i < 16; ++i) s[i] = set1(0.0f);
    for (int c = 0; c < cols; c += 16) {
      const float* p = x + stride * c + r;
      KVARN_UNROLL
      for (int i = 0; i < 16; ++i) {
        f32 value = load(p + stride * i);
        if constexpr (Weighted) value = mul(value, set1(weight[c + i]));
        s[i] = fma(value, value, s[i]);
      }
    }
    fold_registers<8>(s);
    store(squares + r, s[0]);
  }
}

// The root mean square of each column, in units of `unit`.
[[gnu::noinline]] inline void find_column_rms(const float* x, std::ptrdiff_t stride, int rows,
                                              int cols, float unit, float* rms) {
  const f32 inverse_rows = set1(1.0f / static_cast<float>(rows));
  for (int c = 0; c < cols; c += 16) {
    f32 squares[16];
    for (int first = 0; first < 16; first += 4) {
      f32 s[4];
      KVARN_UNROLL
      for (int i = 0; i < 4; ++i) s[i] = set1(0.0f);
      for (int r = 0; r < rows; r += 16) KVARN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const f32 value = load(x + stride * (c + first + i) + r);
        s[i] = fma(value, value, s[i]);
      }
      KVARN_UNROLL
      for (int i = 0; i < 4; ++i) squares[first + i] = s[i];
    }
    store(rms + c, mul(sqrt(mul(fold_each(squares), inverse_rows)), set1(unit)));
  }
}

inline constexpr float least_rms = 0x1p-100f;

// As scalar::typical; n is a multiple of 16.
inline float typical(const float* values, int n) {
  i32 sums = set1_i32(0);
  i32 counts = set1_i32(0);
  const i32 least = bits(set1(least_rms));
  for (int i = 0; i < n; i += 16) {
    const i32 pattern = bits(load(values + i));
    sums = add(sums, select_less(pattern, least, set1_i32(0), shift_right<10>(pattern)));
    counts = add(counts, select_less(pattern, least, set1_i32(0), set1_i32(1)));
  }
  alignas(64) std::int32_t sum[16];
  alignas(64) std::int32_t count[16];
  store_i32(sum, sums);
  store_i32(count, counts);
  std::uint32_t total = 0;
  std::uint32_t counted = 0;
  for (int l = 0; l < 16; ++l) {
    total += static_cast<std::uint32_t>(sum[l]);
    counted += static_cast<std::uint32_t>(count[l]);
  }
  return counted == 0 ? 0.0f : float_of_bits((total / counted) << 10);
}

// Multiplies row scales so that the typical one becomes the power of two at or below `level`;
// `level` 0: at or below itself.
inline void center_scales(float* row_scale, int rows, float level) {
  const float row_level = typical(row_scale, rows);
  if (row_level == 0.0f) return;
  const float to = power_of_two(exponent_of(level == 0.0f ? row_level : level));
  const f32 common = set1(to / row_level);
  for (int r = 0; r < rows; r += 16) store(row_scale + r, mul(load(row_scale + r), common));
}

// As scalar::rms_scales, from the sums of the squares of the rows, which row_scale holds.
inline void rms_scales(int rows, int cols, float unit, float* row_scale) {
  const f32 inverse_n = set1(1.0f / static_cast<float>(cols));
  for (int r = 0; r < rows; r += 16)
    store(row_scale + r, mul(sqrt(mul(load(row_scale + r), inverse_n)), set1(unit)));
  center_scales(row_scale, rows, 0.0f);
}

// As scalar::equalized_rms_scales.
inline void equalized_rms_scales(const float* x, std::ptrdiff_t stride, int rows, int cols,
                                 float unit, float* row_scale) {
  alignas(64) float col_rms[max_head_dim];
  find_column_rms(x, stride, rows, cols, unit, col_rms);
  const float level = typical(col_rms, cols);
  float* const weight = col_rms;
  for (int c = 0; c < cols; c += 16) {
    const f32 rms = load(col_rms + c);
    store(weight + c, select_less(rms, set1(least_rms), set1(0.0f), div(set1(1.0f), rms)));
  }
  sum_row_squares<true>(x, stride, rows, cols, weight, row_scale);
  const f32 inverse_cols = set1(1.0f / static_cast<float>(cols));
  for (int r = 0; r < rows; r += 16)
    store(row_scale + r, sqrt(mul(load(row_scale + r), inverse_cols)));
  center_scales(row_scale, rows, level);
}

// kvarn::detail::load_tile into a column-major tile of that stride; `squares` receives the sums of
// the squares of the rows, unless it is null.
template <class T>
void load_tile(tokens_view<T> tokens, const tile_layout& layout, bool rotate, float* x,
               std::ptrdiff_t stride, float* squares, replaced_values& replaced) {
  const int head_dim = layout.head_dim;
  if (layout.kind == tile_kind::value) {
    for (int t = 0; t < layout.group; ++t) {
      float* const column = x + stride * t;
      load_vector(tokens, t, head_dim, rotate, column, replaced);
    }
    if (squares != nullptr)
      sum_row_squares<false>(x, stride, head_dim, layout.group, nullptr, squares);
    return;
  }
  const int block = head_dim / hadamard_core(head_dim);
  alignas(64) float columns[16 * max_head_dim];
  for (int t = 0; t < layout.group; t += 16) {
    for (int d = 0; d < head_dim; d += 16) {
      f32 r[16];
      load_columns(tokens, t, d, r, replaced);
      if (rotate) {
        first_column_stages(r, block);
        // Where rotate_columns stores in a burst.
        for (int i = 0; i < 16; ++i)
          prefetch(reinterpret_cast<const std::byte*>(x + stride * (d + i) + t));
      }
      float* const to = rotate ? columns + 16 * d : x + stride * d + t;
      const std::ptrdiff_t next = rotate ? 16 : stride;
      KVARN_UNROLL
      for (int i = 0; i < 16; ++i) store(to + next * i, r[i]);
    }
    if (rotate) rotate_columns(columns, head_dim, x + t, stride);
    if (squares != nullptr)
      sum_row_squares<false>(x + t, stride, 16, head_dim, nullptr, squares + t);
  }
}

// Rounds and stores the row scales; what divides and weighs the rows.
inline void round_row_scales(const float* row_scale, float unit, encode_state& state) {
  const tile_layout& layout = state.out.layout;
  f32 largest = load(row_scale);
  for (int r = 16; r < state.rows; r += 16) largest = max(largest, load(row_scale + r));
  const float largest_scale = max_lane(largest);
  const int exponent = layout.scale == scale_type::ue5m3
                           ? kvarn::detail::scale_shift<ue5m3>(largest_scale)
                           : kvarn::detail::scale_shift<e4m3>(largest_scale);
  const f32 shift = set1(power_of_two(-exponent));
  f32 weights = set1(0.0f);
  for (int r = 0; r < state.rows; r += 16) {
    const i32 code = round_scales(mul(load(row_scale + r), shift), layout.scale);
    const f32 scale = decode_scales(code, layout.scale);
    const f32 weight = mul(scale, scale);
    store_u8(state.out.data + layout.scale_offset() + r, code);
    store(state.inverse_scale + r, div(set1(unit), scale));
    store(state.row_weight + r, weight);
    weights = add(weights, weight);
  }
  state.weight_sum = fold(weights);
}

// Zeros and steps of 16 columns, as stored and as numbers.
struct grid_vectors {
  i32 zero_bits;
  i32 step_bits;
  f32 zero;
  f32 step;
};
KVARN_ALWAYS_INLINE void set_zeros(grid_vectors& grid, i32 zero_bits) {
  grid.zero_bits = zero_bits;
  grid.zero = half_to_float(zero_bits);
}
KVARN_ALWAYS_INLINE void set_steps(grid_vectors& grid, i32 step_bits, scale_type type) {
  grid.step_bits = step_bits;
  grid.step = decode_scales(step_bits, type);
}
KVARN_ALWAYS_INLINE f32 inverse_ranges(f32 step, int max_code) {
  return div(set1(1.0f), mul(set1(static_cast<float>(max_code)), step));
}

// Minimum and maximum of the 16 columns from c on, each still in 16 lanes.
struct column_ranges {
  f32 low[16];
  f32 high[16];
};
[[gnu::noinline]] inline void find_ranges(const encode_state& state, int c, column_ranges& out) {
  for (int first = 0; first < 16; first += 4) {
    f32 low[4];
    f32 high[4];
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      low[i] = set1(0x1p126f);
      high[i] = set1(-0x1p126f);
    }
    const float* const x = state.column(c + first);
    for (int r = 0; r < state.rows; r += 16) {
      const f32 inverse = load(state.inverse_scale + r);
      KVARN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const f32 y = mul(load(x + state.stride * i + r), inverse);
        low[i] = min(low[i], y);
        high[i] = max(high[i], y);
      }
    }
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      out.low[first + i] = low[i];
      out.high[first + i] = high[i];
    }
  }
}

// kvarn::fit_range of 16 columns.
KVARN_ALWAYS_INLINE grid_vectors fit_ranges(const column_ranges& ranges, float range, bool cover,
                                            int max_code, scale_type type) {
  const f32 low = min_each(ranges.low);
  const f32 width = sub(max_each(ranges.high), low);
  const f32 start = fma(set1(0.5f * (1.0f - range)), width, low);
  grid_vectors grid;
  set_zeros(grid, cover ? zeros_below(start) : nearest_zeros(start));
  const f32 reach =
      cover ? sub(fma(set1(range), width, start), grid.zero) : mul(set1(range), width);
  const f32 inverse_count = set1(1.0f / static_cast<float>(max_code));
  set_steps(grid, round_scales(mul(reach, inverse_count), type), type);
  return grid;
}

// Makes `grid` that by which the codes of the 16 columns from c on are made.
KVARN_ALWAYS_INLINE void use_grid(encode_state& state, int c, const grid_vectors& grid) {
  store(state.zero + c, grid.zero);
  store(state.step + c, grid.step);
  store(state.inverse_range + c, inverse_ranges(grid.step, state.max_code));
}

// The deviation of 16 rows from a zero, and their code, of which code_magic is not yet subtracted.
KVARN_ALWAYS_INLINE f32 raw_code(f32 deviation, f32 inverse_range, f32 max_code) {
  const f32 unit = min(max(mul(deviation, inverse_range), set1(0.0f)), set1(1.0f));
  return fma(unit, max_code, set1(code_magic));
}

// kvarn::refit for the 16 columns from c on, whose grid is in use.
[[gnu::noinline]] inline void refit_columns(const encode_state& state, int c, grid_vectors& grid) {
  f32 wc[16];
  f32 wcc[16];
  f32 wt[16];
  f32 wct[16];
  const f32 max_code = set1(static_cast<float>(state.max_code));
  for (int first = 0; first < 16; first += 2) {
    f32 s[2][4];
    KVARN_UNROLL
    for (int i = 0; i < 2; ++i) KVARN_UNROLL
    for (int k = 0; k < 4; ++k) s[i][k] = set1(0.0f);
    const float* const x = state.column(c + first);
    for (int r = 0; r < state.rows; r += 16) {
      const f32 inverse = load(state.inverse_scale + r);
      const f32 weight = load(state.row_weight + r);
      KVARN_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int col = c + first + i;
        const f32 t = fms(load(x + state.stride * i + r), inverse, set1(state.zero[col]));
        const f32 raw = raw_code(t, set1(state.inverse_range[col]), max_code);
        const f32 code = sub(raw, set1(code_magic));
        const f32 weighted = mul(weight, code);
        s[i][0] = fma(weight, code, s[i][0]);
        s[i][1] = fma(weighted, code, s[i][1]);
        s[i][2] = fma(weight, t, s[i][2]);
        s[i][3] = fma(weighted, t, s[i][3]);
      }
    }
    KVARN_UNROLL
    for (int i = 0; i < 2; ++i) {
      wc[first + i] = s[i][0];
      wcc[first + i] = s[i][1];
      wt[first + i] = s[i][2];
      wct[first + i] = s[i][3];
    }
  }
  const f32 w = set1(state.weight_sum);
  const f32 codes = fold_each(wc);
  const f32 deviations = fold_each(wt);
  const f32 scaled = mul(w, fold_each(wcc));
  const f32 determinant = fnma(codes, codes, scaled);
  const f32 numerator = fnma(codes, deviations, mul(w, fold_each(wct)));
  const scale_type type = state.out.layout.scale;
  const i32 fitted = round_scales(div(numerator, determinant), type);
  const f32 step = select_less(mul(set1(1e-6f), scaled), determinant, from_bits(fitted),
                               from_bits(grid.step_bits));
  set_steps(grid, bits(step), type);
  const f32 shift = div(fnma(grid.step, codes, deviations), w);
  set_zeros(grid, nearest_zeros(add(grid.zero, shift)));
}

// Codes of 16 columns in the making, the last column first: 4 bits each, of the first and of the
// last 8 columns.
struct code_words {
  i32 w[2];
};
KVARN_ALWAYS_INLINE void append_code(code_words& words, int column, f32 raw) {
  words.w[column / 8] = append<4>(words.w[column / 8], bits(raw));
}

// The low 2 bits of 8 fields of 4 bits, and their bit 2, side by side.
KVARN_ALWAYS_INLINE i32 gather_low_bits(i32 word) {
  i32 x = bit_and(word, set1_i32(0x33333333));
  x = bit_and(bit_or(x, shift_right<2>(x)), set1_i32(0x0f0f0f0f));
  x = bit_and(bit_or(x, shift_right<4>(x)), set1_i32(0x00ff00ff));
  return bit_and(bit_or(x, shift_right<8>(x)), set1_i32(0x0000ffff));
}
KVARN_ALWAYS_INLINE i32 gather_high_bits(i32 word) {
  i32 x = bit_and(shift_right<2>(word), set1_i32(0x11111111));
  x = bit_and(bit_or(x, shift_right<3>(x)), set1_i32(0x03030303));
  x = bit_and(bit_or(x, shift_right<6>(x)), set1_i32(0x000f000f));
  return bit_and(bit_or(x, shift_right<12>(x)), set1_i32(0x000000ff));
}

// Puts the codes of the 16 columns from c on, rows r .. r + 15, into their place in the planes.
KVARN_ALWAYS_INLINE void keep_words(encode_state& state, int c, int r, const code_words& words) {
  const int code_bits = state.out.layout.bits;
  if (code_bits == 4) {
    std::int32_t* const to = state.words + state.rows * (c / 8) + r;
    store_i32(to, words.w[0]);
    store_i32(to + state.rows, words.w[1]);
    return;
  }
  store_i32(state.words + state.rows * (c / 16) + r,
            bit_or(gather_low_bits(words.w[0]), shift_left<16>(gather_low_bits(words.w[1]))));
  if (code_bits == 3) {
    const i32 tops =
        bit_or(gather_high_bits(words.w[0]), shift_left<8>(gather_high_bits(words.w[1])));
    std::int32_t* const to = state.words + state.rows * (state.cols / 16 + c / 32) + r;
    store_i32(to, c % 32 == 0 ? tops : bit_or(load_i32(to), shift_left<16>(tops)));
  }
}

// Codes of the 16 columns from c on, whose grid is in use.
[[gnu::noinline]] inline void encode_columns(encode_state& state, int c) {
  const f32 max_code = set1(static_cast<float>(state.max_code));
  for (int r = 0; r < state.rows; r += 16) {
    const f32 inverse = load(state.inverse_scale + r);
    const float* const x = state.column(c) + r;
    code_words words{{set1_i32(0), set1_i32(0)}};
    KVARN_UNROLL
    for (int i = 15; i >= 0; --i) {
      const f32 t = fms(load(x + state.stride * i), inverse, set1(state.zero[c + i]));
      append_code(words, i, raw_code(t, set1(state.inverse_range[c + i]), max_code));
    }
    keep_words(state, c, r, words);
  }
}

// The same, and kvarn::unbias of the grid.
[[gnu::noinline]] inline void encode_and_unbias(encode_state& state, int c, grid_vectors& grid) {
  f32 wc[16];
  f32 wt[16];
  f32 wct[16];
  f32 wtt[16];
  code_words words[max_head_dim / 16];
  const f32 max_code = set1(static_cast<float>(state.max_code));
  for (int r = 0; r < state.rows; r += 16) words[r / 16] = {{set1_i32(0), set1_i32(0)}};
  for (int first = 14; first >= 0; first -= 2) {
    f32 s[2][4];
    KVARN_UNROLL
    for (int i = 0; i < 2; ++i) KVARN_UNROLL
    for (int k = 0; k < 4; ++k) s[i][k] = set1(0.0f);
    const float* const x = state.column(c + first);
    for (int r = 0; r < state.rows; r += 16) {
      const f32 inverse = load(state.inverse_scale + r);
      KVARN_UNROLL
      for (int i = 1; i >= 0; --i) {
        const int col = c + first + i;
        const f32 t = fms(load(x + state.stride * i + r), inverse, set1(state.zero[col]));
        const f32 raw = raw_code(t, set1(state.inverse_range[col]), max_code);
        append_code(words[r / 16], first + i, raw);
        const f32 code = sub(raw, set1(code_magic));
        s[i][0] = add(s[i][0], code);
        s[i][1] = add(s[i][1], t);
        s[i][2] = fma(code, t, s[i][2]);
        s[i][3] = fma(t, t, s[i][3]);
      }
    }
    KVARN_UNROLL
    for (int i = 0; i < 2; ++i) {
      wc[first + i] = s[i][0];
      wt[first + i] = s[i][1];
      wct[first + i] = s[i][2];
      wtt[first + i] = s[i][3];
    }
  }
  for (int r = 0; r < state.rows; r += 16) keep_words(state, c, r, words[r / 16]);

  const f32 inverse_n = set1(1.0f / static_cast<float>(state.rows));
  const f32 codes = fold_each(wc);
  const f32 deviations = fold_each(wt);
  const f32 variance = fnma(mul(deviations, inverse_n), deviations, fold_each(wtt));
  const f32 covariance = fnma(mul(codes, inverse_n), deviations, fold_each(wct));
  const scale_type type = state.out.layout.scale;
  const f32 unbiased = min(div(variance, covariance), mul(set1(2.0f), grid.step));
  const f32 fitted = from_bits(round_scales(unbiased, type));
  const f32 kept = from_bits(grid.step_bits);
  const f32 zero = set1(0.0f);
  const f32 step = select_less(zero, variance, select_less(zero, covariance, fitted, kept), kept);
  set_steps(grid, bits(step), type);
  const f32 shift = mul(fnma(grid.step, codes, deviations), inverse_n);
  set_zeros(grid, nearest_zeros(add(shift, grid.zero)));
}
