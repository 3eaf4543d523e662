// Encoding of one tile, written once; included inside the region and namespace of each instruction
// set. The definition: codec/scalar_codec.hpp and codec/round_columns.hpp.
//
// The tile is column-major: a lane is a row. The tokens of values are its columns as they come,
// error feedback goes from column to column, and codes of one row that are packed into one word
// meet in one lane. Columns are worked on 16 at a time, so that they stay in the L1 cache; what
// belongs to 16 columns (zero, step, sums) has a lane for each.

// What the steps of an encoding share.
struct encode_state {
  float* x;               // rows x cols, column c at x + stride * c
  std::ptrdiff_t stride;  // column_stride(rows)
  tile_view out;
  int rows;
  int cols;
  int max_code;
  float weight_sum;                             // of row_weight, in the order of kvarn::lane_sum
  alignas(64) float row_squares[max_head_dim];  // sums over the columns; for choose_scales
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

// Vectors one after another: channel d of token t at x + stride * t + d.
template <class T>
struct token_rows {
  const T* x;
  std::ptrdiff_t stride;
};

// Whether `count` tokens hold nothing that sanitize replaces.
template <class T>
KVARN_NOINLINE bool are_storable(token_rows<T> tokens, int count, int head_dim) {
  i32 largest = set1_i32(0);
  for (int t = 0; t < count; ++t, tokens.x += tokens.stride)
    for (int d = 0; d < head_dim; d += 16)
      largest = max(largest, magnitude_bits(load_channels(tokens.x + d)));
  return !any_less(set1_i32(largest_storable), largest);
}

// Sanitizes n floats, a multiple of 16.
KVARN_NOINLINE void sanitize(float* x, int n, replaced_values& replaced) {
  if (are_storable(token_rows<float>{x, n}, 1, n)) return;
  for (int i = 0; i < n; i += 16) store(x + i, sanitize(load(x + i), replaced));
}

// Tokens first .. first + count - 1 as floats, sanitized, in `x`, count * head_dim floats.
template <class T>
KVARN_NOINLINE token_rows<float> copy_rows(tokens_view<const T> tokens, int first, int count,
                                           int head_dim, float* x, replaced_values& replaced) {
  float* to = x;
  for (int t = first; t < first + count; ++t)
    for (int d = 0; d < head_dim; d += 16, to += 16) {
      if (tokens.channel_stride == 1)
        store(to, load_channels(tokens.data + t * tokens.token_stride + d));
      else
        for (int i = 0; i < 16; ++i) to[i] = tokens.load(t, d + i);
    }
  sanitize(x, count * head_dim, replaced);
  return {x, head_dim};
}

// The same, in place where they are floats one after another with nothing to replace.
template <class T>
KVARN_ALWAYS_INLINE token_rows<float> load_rows(tokens_view<const T> tokens, int first, int count,
                                                int head_dim, float* buffer,
                                                replaced_values& replaced) {
  if constexpr (std::is_same_v<T, float>)
    if (const token_rows<float> rows{tokens.data + first * tokens.token_stride,
                                     tokens.token_stride};
        tokens.channel_stride == 1 && are_storable(rows, count, head_dim))
      return rows;
  return copy_rows(tokens, first, count, head_dim, buffer, replaced);
}

// kvarn::fold of 16 sums in each lane, into s[0].
template <int Half>
KVARN_ALWAYS_INLINE void fold_registers(f32 (&s)[16]) {
  KVARN_UNROLL
  for (int i = 0; i < Half; ++i) s[i] = add(s[i], s[i + Half]);
  if constexpr (Half > 1) fold_registers<Half / 2>(s);
}

// The sum of the squares of each row, its columns times `weight`; null: ones.
KVARN_NOINLINE void sum_row_squares(const float* x, std::ptrdiff_t stride, int rows, int cols,
                                    const float* weight, float* squares) {
  alignas(64) float ones[max_head_dim];
  if (weight == nullptr) {
    fill(ones, cols, 1.0f);
    weight = ones;
  }
  for (int r = 0; r < rows; r += 16) {
    f32 sums[16];
    for (int first = 0; first < 16; first += 4) {
      f32 s[4];
      KVARN_UNROLL
      for (f32& sum : s) sum = set1(0.0f);
      for (int c = first; c < cols; c += 16) KVARN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const f32 value = mul(load(x + stride * (c + i) + r), set1(weight[c + i]));
        s[i] = fma(value, value, s[i]);
      }
      KVARN_UNROLL
      for (int i = 0; i < 4; ++i) sums[first + i] = s[i];
    }
    fold_registers<8>(sums);
    store(squares + r, sums[0]);
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
      for (f32& sum : s) sum = set1(0.0f);
      for (int r = 0; r < rows; r += 16) KVARN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const f32 value = load(x + stride * (c + first + i) + r);
        s[i] = fma(value, value, s[i]);
      }
      KVARN_UNROLL
      for (int i = 0; i < 4; ++i) squares[first + i] = s[i];
    }
    store(rms + c, mul(sqrt(mul(fold_columns(squares), inverse_rows)), set1(unit)));
  }
}

// As scalar::typical; n is a multiple of 16.
KVARN_NOINLINE float typical(const float* values, int n) {
  i32 sums = set1_i32(0);
  i32 counts = set1_i32(0);
  const i32 least = bits(set1(least_magnitude));
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
KVARN_NOINLINE void center_scales(float* row_scale, int rows, float level) {
  const float row_level = typical(row_scale, rows);
  if (row_level == 0.0f) return;
  const float to = power_of_two(exponent_of(level == 0.0f ? row_level : level));
  const f32 common = set1(to / row_level);
  for (int r = 0; r < rows; r += 16) store(row_scale + r, mul(load(row_scale + r), common));
}

// As scalar::rms_scales, from the sums of the squares of the rows, which row_scale holds.
KVARN_NOINLINE void rms_scales(int rows, int cols, float unit, float* row_scale) {
  const f32 inverse_n = set1(1.0f / static_cast<float>(cols));
  for (int r = 0; r < rows; r += 16)
    store(row_scale + r, mul(sqrt(mul(load(row_scale + r), inverse_n)), set1(unit)));
  center_scales(row_scale, rows, 0.0f);
}

// As scalar::equalized_rms_scales.
KVARN_NOINLINE void equalized_rms_scales(const float* x, std::ptrdiff_t stride, int rows, int cols,
                                         float unit, float* row_scale) {
  alignas(64) float col_rms[max_head_dim];
  find_column_rms(x, stride, rows, cols, unit, col_rms);
  const float level = typical(col_rms, cols);
  float* const weight = col_rms;
  for (int c = 0; c < cols; c += 16) {
    const f32 rms = load(col_rms + c);
    store(weight + c, select_less(rms, set1(least_magnitude), set1(0.0f), div(set1(1.0f), rms)));
  }
  sum_row_squares(x, stride, rows, cols, weight, row_scale);
  const f32 inverse_cols = set1(1.0f / static_cast<float>(cols));
  for (int r = 0; r < rows; r += 16)
    store(row_scale + r, sqrt(mul(load(row_scale + r), inverse_cols)));
  center_scales(row_scale, rows, level);
}

// A token to `x`, rotated, times `norm`, where it says so. `x` may be the token.
KVARN_NOINLINE void load_rotated(const float* token, int head_dim, bool rotate, float norm,
                                 float* x) {
  if (rotate)
    rotate_vector(token, x, head_dim, norm);
  else if (token != x)
    std::memcpy(x, token, sizeof(float) * static_cast<std::size_t>(head_dim));
}

// Sixteen tokens to 16 rows of a column-major tile of keys. False where one holds something that
// sanitize replaces.
template <class T>
KVARN_NOINLINE bool load_keys(token_rows<T> tokens, int head_dim, bool rotate, float* x,
                              std::ptrdiff_t stride) {
  alignas(64) float columns[16 * max_head_dim];
  const int block = rotate ? head_dim / hadamard_core(head_dim) : 1;
  i32 largest = set1_i32(0);
  for (std::ptrdiff_t d = 0; d < head_dim; d += 16) {
    // Where rotate_columns stores in a burst.
    for (int i = 0; i < 16; ++i) prefetch(reinterpret_cast<const std::byte*>(x + stride * (d + i)));
    transpose_block(tokens.x + d, tokens.stride, rotate ? columns + 16 * d : x + stride * d,
                    rotate ? 16 : stride, 1.0f, block, &largest);
  }
  if (rotate) rotate_columns(columns, head_dim, stages_of_transpose(block), x, stride);
  return !any_less(set1_i32(largest_storable), largest);
}

// kvarn::scalar::load_tile into a column-major tile of that stride; `squares` receives the sums of
// the squares of the rows of keys.
template <class T>
void load_tile(tokens_view<const T> tokens, const tile_layout& layout, bool rotate, float* x,
               std::ptrdiff_t stride, float* squares, replaced_values& replaced) {
  const int head_dim = layout.head_dim;
  alignas(64) float buffer[16 * max_head_dim];
  for (int t = 0; t < layout.group; t += 16) {
    if (layout.kind == tile_kind::value) {
      const auto rows = load_rows(tokens, t, 16, head_dim, buffer, replaced);
      for (int i = 0; i < 16; ++i)
        load_rotated(rows.x + rows.stride * i, head_dim, rotate, 1.0f, x + stride * (t + i));
      continue;
    }
    const token_rows<T> rows{tokens.data + t * tokens.token_stride, tokens.token_stride};
    if (tokens.channel_stride != 1 || !load_keys(rows, head_dim, rotate, x + t, stride))
      load_keys(copy_rows(tokens, t, 16, head_dim, buffer, replaced), head_dim, rotate, x + t,
                stride);
    sum_row_squares(x + t, stride, 16, head_dim, nullptr, squares + t);
  }
}

// Rounds and stores the row scales; what divides and weighs the rows.
KVARN_NOINLINE void round_row_scales(const float* row_scale, float unit, encode_state& state) {
  const tile_layout& layout = state.out.layout;
  f32 largest = load(row_scale);
  for (int r = 16; r < state.rows; r += 16) largest = max(largest, load(row_scale + r));
  const f32 shift =
      set1(power_of_two(-kvarn::detail::scale_shift(layout.scale, max_lane(largest))));
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

// Makes `grid` that by which the codes of the 16 columns from c on are made.
KVARN_ALWAYS_INLINE void use_grid(encode_state& state, int c, const grid_vectors& grid) {
  store(state.zero + c, grid.zero);
  store(state.step + c, grid.step);
  const f32 range = mul(set1(static_cast<float>(state.max_code)), grid.step);
  store(state.inverse_range + c, div(set1(1.0f), range));
}

// The maximum of the 16 columns from c on and minus their minimum, each still in 16 lanes.
struct column_ranges {
  f32 high[16];
  f32 minus_low[16];
};
KVARN_NOINLINE void find_ranges(const encode_state& state, int c, column_ranges& out) {
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
      out.high[first + i] = high[i];
      out.minus_low[first + i] = sub(set1(0.0f), low[i]);
    }
  }
}

// kvarn::fit_range of 16 columns.
KVARN_NOINLINE void fit_ranges(const encode_state& state, const column_ranges& ranges, float range,
                               bool cover, grid_vectors& grid) {
  const f32 minus_low = max_of_columns(ranges.minus_low);
  const f32 width = add(max_of_columns(ranges.high), minus_low);
  const f32 start = fms(set1(0.5f * (1.0f - range)), width, minus_low);
  grid.zero_bits = cover ? zeros_below(start) : nearest_zeros(start);
  grid.zero = half_to_float(grid.zero_bits);
  const f32 reach =
      cover ? sub(fma(set1(range), width, start), grid.zero) : mul(set1(range), width);
  const f32 inverse_count = set1(1.0f / static_cast<float>(state.max_code));
  const scale_type type = state.out.layout.scale;
  grid.step_bits = round_scales(mul(reach, inverse_count), type);
  grid.step = decode_scales(grid.step_bits, type);
}

// The deviation of 16 rows from a zero, and their code, of which integer_shift is not yet
// subtracted.
KVARN_ALWAYS_INLINE f32 raw_code(f32 deviation, f32 inverse_range, f32 max_code) {
  const f32 unit = min(max(mul(deviation, inverse_range), set1(0.0f)), set1(1.0f));
  return fma(unit, max_code, set1(integer_shift));
}

// kvarn::column_sums of 16 columns, each still in 16 lanes; `squares`: of the codes for refit, of
// the deviations for unbias.
struct column_sums {
  f32 codes[16];
  f32 deviations[16];
  f32 products[16];
  f32 squares[16];
};

// The sums for kvarn::refit of the 16 columns from c on, whose grid is in use.
KVARN_NOINLINE void sum_weighted(const encode_state& state, int c, column_sums& out) {
  const f32 max_code = set1(static_cast<float>(state.max_code));
  for (int i = 0; i < 16; ++i) {
    const float* const x = state.column(c + i);
    const f32 zero = set1(state.zero[c + i]);
    const f32 inverse_range = set1(state.inverse_range[c + i]);
    f32 s[4];
    KVARN_UNROLL
    for (f32& sum : s) sum = set1(0.0f);
    for (int r = 0; r < state.rows; r += 16) {
      const f32 weight = load(state.row_weight + r);
      const f32 t = fms(load(x + r), load(state.inverse_scale + r), zero);
      const f32 code = sub(raw_code(t, inverse_range, max_code), set1(integer_shift));
      const f32 weighted = mul(weight, code);
      s[0] = fma(weight, code, s[0]);
      s[1] = fma(weight, t, s[1]);
      s[2] = fma(weighted, t, s[2]);
      s[3] = fma(weighted, code, s[3]);
    }
    out.codes[i] = s[0];
    out.deviations[i] = s[1];
    out.products[i] = s[2];
    out.squares[i] = s[3];
  }
}

// kvarn::unbias or kvarn::refit of 16 columns, from the sums under their grid.
KVARN_NOINLINE void fit_sums(const encode_state& state, const column_sums& sums, bool unbiased,
                             grid_vectors& grid) {
  const f32 zero = set1(0.0f);
  const f32 w = set1(state.weight_sum);
  const f32 inverse_n = set1(1.0f / static_cast<float>(state.rows));
  const f32 codes = fold_columns(sums.codes);
  const f32 deviations = fold_columns(sums.deviations);
  const f32 products = fold_columns(sums.products);
  const f32 squares = fold_columns(sums.squares);
  f32 step;
  f32 fits;  // above 0 where the step is to be taken
  if (unbiased) {
    const f32 variance = fnma(mul(deviations, inverse_n), deviations, squares);
    const f32 covariance = fnma(mul(codes, inverse_n), deviations, products);
    step = min(div(variance, covariance), mul(set1(2.0f), grid.step));
    fits = min(variance, covariance);
  } else {
    const f32 scaled = mul(w, squares);
    const f32 determinant = fnma(codes, codes, scaled);
    step = div(fnma(codes, deviations, mul(w, products)), determinant);
    fits = select_less(mul(set1(1e-6f), scaled), determinant, set1(1.0f), zero);
  }
  const scale_type type = state.out.layout.scale;
  grid.step_bits =
      bits(select_less(zero, fits, from_bits(round_scales(step, type)), from_bits(grid.step_bits)));
  grid.step = decode_scales(grid.step_bits, type);
  const f32 rest = fnma(grid.step, codes, deviations);
  grid.zero_bits = nearest_zeros(add(grid.zero, unbiased ? mul(rest, inverse_n) : div(rest, w)));
  grid.zero = half_to_float(grid.zero_bits);
}

// Of 16 rows the squares of the errors that their codes leave, and their products with the rows,
// in the 16 lanes of a sum over columns.
struct row_errors {
  f32 squares[16];
  f32 products[16];
};
KVARN_NOINLINE void sum_row_errors(const encode_state& state, int r, f32 inverse_scale,
                                   row_errors& out) {
  const f32 max_code = set1(static_cast<float>(state.max_code));
  for (int first = 0; first < 16; first += 2) {
    f32 squares[2] = {set1(0.0f), set1(0.0f)};
    f32 products[2] = {set1(0.0f), set1(0.0f)};
    for (int c = first; c < state.cols; c += 16) KVARN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const f32 x = load(state.column(c + i) + r);
      const f32 t = fms(x, inverse_scale, set1(state.zero[c + i]));
      const f32 raw = raw_code(t, set1(state.inverse_range[c + i]), max_code);
      const f32 error = fnma(sub(raw, set1(integer_shift)), set1(state.step[c + i]), t);
      squares[i] = fma(error, error, squares[i]);
      products[i] = fma(error, x, products[i]);
    }
    KVARN_UNROLL
    for (int i = 0; i < 2; ++i) {
      out.squares[first + i] = squares[i];
      out.products[first + i] = products[i];
    }
  }
}

// As scalar::choose_scales, by the grids in use and row_squares.
KVARN_NOINLINE void choose_scales(encode_state& state, float along, float unit) {
  const scale_type type = state.out.layout.scale;
  const bool wide = type == scale_type::ue5m3;
  const i32 least = set1_i32(wide ? ue5m3::min_code : e4m3::min_code);
  const i32 most = set1_i32(wide ? ue5m3::max_code : e4m3::max_code);
  std::byte* const codes = state.out.data + state.out.layout.scale_offset();
  for (int r = 0; r < state.rows; r += 16) {
    const f32 row_squares = load(state.row_squares + r);
    const f32 along_weight =
        select_less(row_squares, set1(least_magnitude), set1(0.0f), div(set1(along), row_squares));
    const i32 middle = load_u8(codes + r);
    i32 best_code = middle;
    f32 best_cost;
    for (const int by : {0, -1, 1}) {
      const i32 code = min(max(add(middle, set1_i32(by)), least), most);
      const f32 scale = decode_scales(code, type);
      row_errors errors;
      sum_row_errors(state, r, div(set1(unit), scale), errors);
      fold_registers<8>(errors.squares);
      fold_registers<8>(errors.products);
      const f32 product = errors.products[0];
      const f32 cost =
          mul(fma(mul(product, along_weight), product, errors.squares[0]), mul(scale, scale));
      if (by == 0) {
        best_cost = cost;
        continue;
      }
      best_code = bits(select_less(cost, best_cost, from_bits(code), from_bits(best_code)));
      best_cost = select_less(cost, best_cost, cost, best_cost);
    }
    store_u8(codes + r, best_code);
    store(state.inverse_scale + r, div(set1(unit), decode_scales(best_code, type)));
  }
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

// Puts the codes of rows r .. r + 15 into their place in the planes: of columns c .. c + 7 (`low`)
// and c + 8 .. c + 15 (`high`), 4 bits each.
KVARN_NOINLINE void keep_words(encode_state& state, int c, int r, i32 low, i32 high) {
  const int code_bits = state.out.layout.bits;
  const std::ptrdiff_t rows = state.rows;
  if (code_bits == 4) {
    std::int32_t* const to = state.words + rows * (c / 8) + r;
    store_i32(to, low);
    store_i32(to + rows, high);
    return;
  }
  store_i32(state.words + rows * (c / 16) + r,
            bit_or(gather_low_bits(low), shift_left<16>(gather_low_bits(high))));
  if (code_bits == 3) {
    const i32 tops = bit_or(gather_high_bits(low), shift_left<8>(gather_high_bits(high)));
    std::int32_t* const to = state.words + rows * (state.cols / 16 + c / 32) + r;
    store_i32(to, c % 32 == 0 ? tops : bit_or(load_i32(to), shift_left<16>(tops)));
  }
}

// Codes of the 16 columns from c on, whose grid is in use.
KVARN_NOINLINE void encode_columns(encode_state& state, int c) {
  const f32 max_code = set1(static_cast<float>(state.max_code));
  for (int r = 0; r < state.rows; r += 16) {
    const f32 inverse = load(state.inverse_scale + r);
    i32 word[2];
    for (int half = 1; half >= 0; --half) {
      i32 codes = set1_i32(0);
      for (int i = 8 * half + 7; i >= 8 * half; --i) {
        const f32 t = fms(load(state.column(c + i) + r), inverse, set1(state.zero[c + i]));
        codes = append<4>(codes, bits(raw_code(t, set1(state.inverse_range[c + i]), max_code)));
      }
      word[half] = codes;
    }
    keep_words(state, c, r, word[0], word[1]);
  }
}

// The same, and the sums for kvarn::unbias.
KVARN_NOINLINE void encode_and_sum(encode_state& state, int c, column_sums& out) {
  const f32 max_code = set1(static_cast<float>(state.max_code));
  i32 word[2][max_head_dim / 16];
  for (int r = 0; r < state.rows; r += 16) word[0][r / 16] = word[1][r / 16] = set1_i32(0);
  for (int i = 15; i >= 0; --i) {
    i32* const codes = word[i / 8];
    const float* const x = state.column(c + i);
    const f32 zero = set1(state.zero[c + i]);
    const f32 inverse_range = set1(state.inverse_range[c + i]);
    f32 s[4];
    KVARN_UNROLL
    for (f32& sum : s) sum = set1(0.0f);
    for (int r = 0; r < state.rows; r += 16) {
      const f32 t = fms(load(x + r), load(state.inverse_scale + r), zero);
      const f32 raw = raw_code(t, inverse_range, max_code);
      codes[r / 16] = append<4>(codes[r / 16], bits(raw));
      const f32 code = sub(raw, set1(integer_shift));
      s[0] = add(s[0], code);
      s[1] = add(s[1], t);
      s[2] = fma(code, t, s[2]);
      s[3] = fma(t, t, s[3]);
    }
    out.codes[i] = s[0];
    out.deviations[i] = s[1];
    out.products[i] = s[2];
    out.squares[i] = s[3];
  }
  for (int r = 0; r < state.rows; r += 16)
    keep_words(state, c, r, word[0][r / 16], word[1][r / 16]);
}
