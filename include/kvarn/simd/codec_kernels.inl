// encode_tile, decode_row, decode_tokens and decode_tile from the kernels beside this file;
// included inside the region and namespace of each instruction set. The definition:
// codec/scalar_codec.hpp.

// Steps, zeros and codes. Work on one block of 16 columns stands between the steps of the next that
// wait for each other's results.
inline void encode_codes(encode_state& state, const encoder_recipe& recipe, const float* upper) {
  const tile_layout& layout = state.out.layout;
  grid_vectors grid;
  column_ranges ranges;
  find_ranges(state, 0, ranges);
  for (int c = -16; c < state.cols; c += 16) {
    const int next = c + 16;
    grid_vectors next_grid;
    if (next < state.cols) {
      next_grid = fit_ranges(ranges, recipe.range, recipe.cover, state.max_code, layout.scale);
      use_grid(state, next, next_grid);
    }
    if (c >= 0) {
      if (recipe.unbiased)
        encode_and_unbias(state, c, grid);
      else if (upper == nullptr)
        encode_columns(state, c);
      store_u16(state.out.data + layout.zero_offset() + 2 * c, grid.zero_bits);
      store_u8(state.out.data + layout.step_offset() + c, grid.step_bits);
    }
    if (next < state.cols) {
      for (int i = 0; i < recipe.refits; ++i) {
        refit_columns(state, next, next_grid);
        use_grid(state, next, next_grid);
      }
      grid = next_grid;
    }
    if (next + 16 < state.cols) find_ranges(state, next + 16, ranges);
  }
  if (upper != nullptr)
    for (int r = 0; r < state.rows; r += feedback_rows)
      encode_with_feedback(state, upper, r,
                           state.rows - r < feedback_rows ? state.rows - r : feedback_rows);

  constexpr int at_once = 8;
  const std::int32_t* plane_words = state.words;
  for (int plane = 0; plane < layout.planes(); ++plane) {
    const auto bytes = static_cast<int>(layout.plane_row_bytes(plane));
    const auto stride = static_cast<std::size_t>(bytes);
    const int count = (bytes + 3) / 4;
    for (int r = 0; r < state.rows; r += 16) {
      std::byte* const out = state.out.data + layout.code_offset(plane, r);
      for (int first = 0; first < count; first += at_once) {
        i32 w[at_once];
        KVARN_UNROLL
        for (int i = 0; i < at_once; ++i) {
          const int word = first + i < count ? first + i : count - 1;
          w[i] = load_i32(plane_words + state.rows * word + r);
        }
        const int left = bytes - 4 * first;
        store_rows(out + 4 * first, stride, left < 4 * at_once ? left : 4 * at_once, w);
      }
    }
    plane_words += state.rows * count;
  }
}

// As scalar::encode_tile.
template <class T>
encode_report encode_tile(tokens_view<T> tokens, tile_view out, const encoder_recipe& recipe,
                          bool rotate, const float* upper_factor, float* workspace) {
  const tile_layout& layout = out.layout;
  encode_report report;
  encode_state state;
  state.x = aligned(workspace);
  state.stride = column_stride(layout.rows());
  state.out = out;
  state.rows = layout.rows();
  state.cols = layout.cols();
  state.max_code = layout.max_code();
  alignas(64) float row_scale[max_head_dim];
  const bool rms = recipe.scaling == row_scaling::rms;
  load_tile(tokens, layout, rotate, state.x, state.stride, rms ? row_scale : nullptr,
            report.replaced);
  const float unit = rotate ? hadamard_norm(layout.head_dim) : 1.0f;

  if (rms) {
    rms_scales(state.rows, state.cols, unit, row_scale);
    round_row_scales(row_scale, unit, state);
  } else if (recipe.scaling == row_scaling::rms_equalized) {
    equalized_rms_scales(state.x, state.stride, state.rows, state.cols, unit, row_scale);
    round_row_scales(row_scale, unit, state);
  } else {
    normalize_state normalized;
    float* const sums = state.column(state.cols);
    normalized.sums = {sums, sums + row_sum_floats(state.rows) / 2};
    report.normalize = normalize_columns(
        {state.x, state.rows, state.cols, unit},
        {.iterations = recipe.iterations,
         .scale_equivariant = recipe.scaling == row_scaling::dual_axis_equivariant},
        normalized);
    round_row_scales(normalized.best_row, unit, state);
  }

  const float* const upper = recipe.error_feedback ? upper_factor : nullptr;
  encode_codes(state, recipe, upper);
  return report;
}

// The codes of one row, in one plane or two.
struct row_codes {
  const std::byte* low;
  const std::byte* high;
  std::ptrdiff_t low_stride;
  std::ptrdiff_t high_stride;

  KVARN_ALWAYS_INLINE row_codes(const_tile_view tile, int row)
      : low(tile.data + tile.layout.code_offset(0, row)),
        high(tile.data + tile.layout.code_offset(tile.layout.planes() - 1, row)),
        low_stride(static_cast<std::ptrdiff_t>(tile.layout.plane_row_bytes(0))),
        high_stride(
            static_cast<std::ptrdiff_t>(tile.layout.plane_row_bytes(tile.layout.planes() - 1))) {}

  // Those of the 16 columns from c on, `rows` rows below, as numbers.
  template <int Bits>
  KVARN_ALWAYS_INLINE f32 numbers(int c, int rows = 0) const {
    return load_codes<Bits>(low + low_stride * rows + c * (Bits == 4 ? 4 : 2) / 8,
                            high + high_stride * rows + c / 8);
  }
  KVARN_ALWAYS_INLINE void advance() {
    low += low_stride;
    high += high_stride;
  }
};

KVARN_ALWAYS_INLINE f32 load_zeros(const_tile_view tile, int c) {
  return load_half(tile.data + tile.layout.zero_offset() + 2 * c);
}
KVARN_ALWAYS_INLINE f32 load_steps(const_tile_view tile, int c) {
  return decode_scales(tile.data + tile.layout.step_offset() + c, tile.layout.scale);
}

// The scales of rows first .. end - 1, in row_scale[row].
KVARN_ALWAYS_INLINE void load_row_scales(const_tile_view tile, int first, int end,
                                         float* row_scale) {
  for (int r = first / 16 * 16; r < end; r += 16)
    store(row_scale + r,
          decode_scales(tile.data + tile.layout.scale_offset() + r, tile.layout.scale));
}

template <int Bits>
void decode_row(const_tile_view tile, int row, float* out) {
  const row_codes codes(tile, row);
  const f32 scale = set1(tile.scale(row));
  for (int c = 0; c < tile.layout.cols(); c += 16) {
    const f32 y = fma(codes.numbers<Bits>(c), load_steps(tile, c), load_zeros(tile, c));
    store(out + c, mul(y, scale));
  }
}

// As scalar::decode_row.
inline void decode_row(const_tile_view tile, int row, float* out) {
  if (tile.layout.bits == 2) decode_row<2>(tile, row, out);
  if (tile.layout.bits == 3) decode_row<3>(tile, row, out);
  if (tile.layout.bits == 4) decode_row<4>(tile, row, out);
}

// The codes of a row of `cols` columns as numbers.
[[gnu::noinline]] inline void load_numbers(const row_codes& codes, int code_bits, int cols,
                                           float* x) {
  if (code_bits == 2)
    for (int c = 0; c < cols; c += 16) store(x + c, codes.numbers<2>(c));
  else if (code_bits == 3)
    for (int c = 0; c < cols; c += 16) store(x + c, codes.numbers<3>(c));
  else
    for (int c = 0; c < cols; c += 16) store(x + c, codes.numbers<4>(c));
}

// The same of the 16 columns from c on of 16 rows.
KVARN_ALWAYS_INLINE void load_number_rows(const row_codes& codes, int code_bits, int c,
                                          f32 (&r)[16]) {
  if (code_bits == 2) {
    for (int i = 0; i < 16; ++i) r[i] = codes.numbers<2>(c, i);
  } else if (code_bits == 3) {
    for (int i = 0; i < 16; ++i) r[i] = codes.numbers<3>(c, i);
  } else {
    for (int i = 0; i < 16; ++i) r[i] = codes.numbers<4>(c, i);
  }
}

// Sixteen channels of a token.
template <class T>
KVARN_ALWAYS_INLINE void store_channels(tokens_view<T> out, int token, int channel, f32 x) {
  if (out.channel_stride == 1) {
    store_channels(out.data + token * out.token_stride + channel, x);
  } else {
    alignas(64) float values[16];
    store(values, x);
    for (int i = 0; i < 16; ++i) out.store(token, channel + i, values[i]);
  }
}

// Keys: a token is a row.
template <class T>
void decode_rows(const_tile_view tile, int first, int count, tokens_view<T> out, bool rotate_back) {
  const int head_dim = tile.layout.head_dim;
  alignas(64) float zero[max_head_dim];
  alignas(64) float step[max_head_dim];
  alignas(64) float scale[max_group];
  alignas(64) float vector[max_head_dim];
  for (int c = 0; c < head_dim; c += 16) {
    store(zero + c, load_zeros(tile, c));
    store(step + c, load_steps(tile, c));
  }
  load_row_scales(tile, first, first + count, scale);
  row_codes codes(tile, first);
  for (int t = 0; t < count; ++t) {
    float* x = vector;
    if constexpr (std::is_same_v<T, float>)
      if (out.channel_stride == 1) x = out.data + t * out.token_stride;
    const f32 row_scale = set1(scale[first + t]);
    load_numbers(codes, tile.layout.bits, head_dim, x);
    for (int c = 0; c < head_dim; c += 16)
      store(x + c, mul(fma(load(x + c), load(step + c), load(zero + c)), row_scale));
    codes.advance();
    if (rotate_back) hadamard(x, head_dim);
    if (x == vector)
      for (int d = 0; d < head_dim; d += 16) store_channels(out, t, d, load(x + d));
  }
}

// Values: a token is a column; 16 at a time.
template <class T>
void decode_columns(const_tile_view tile, int first, int count, tokens_view<T> out,
                    bool rotate_back) {
  const int head_dim = tile.layout.head_dim;
  const int block = head_dim / hadamard_core(head_dim);
  const f32 norm = set1(rotate_back ? hadamard_norm(head_dim) : 1.0f);
  alignas(64) float scale[max_head_dim];
  alignas(64) float columns[16 * max_head_dim];
  load_row_scales(tile, 0, head_dim, scale);
  for (int c = first / 16 * 16; c < first + count; c += 16) {
    const f32 zero = load_zeros(tile, c);
    const f32 step = load_steps(tile, c);
    for (int d = 0; d < head_dim; d += 16) {
      const row_codes codes(tile, d);
      f32 r[16];
      load_number_rows(codes, tile.layout.bits, c, r);
      KVARN_UNROLL
      for (int i = 0; i < 16; ++i) r[i] = mul(fma(r[i], step, zero), set1(scale[d + i]));
      if (rotate_back) first_column_stages(r, block);
      KVARN_UNROLL
      for (int i = 0; i < 16; ++i) store(columns + 16 * (d + i), r[i]);
    }
    if (rotate_back) rotate_columns(columns, head_dim, columns, 16);
    const int begin = c < first ? first - c : 0;
    const int end = first + count - c < 16 ? first + count - c : 16;
    for (int d = 0; d < head_dim; d += 16) {
      f32 r[16];
      KVARN_UNROLL
      for (int i = 0; i < 16; ++i) r[i] = mul(load(columns + 16 * (d + i)), norm);
      transpose(r);
      if (begin == 0 && end == 16) {
        KVARN_UNROLL
        for (int i = 0; i < 16; ++i) store_channels(out, c + i - first, d, r[i]);
      } else {
        for (int i = begin; i < end; ++i) store_channels(out, c + i - first, d, r[i]);
      }
    }
  }
}

// As scalar::decode_tokens.
template <class T>
void decode_tokens(const_tile_view tile, int first, int count, tokens_view<T> out,
                   bool rotate_back) {
  KVARN_ASSERT(first >= 0 && count >= 0 && first + count <= tile.layout.group);
  if (tile.layout.kind == tile_kind::key)
    decode_rows(tile, first, count, out, rotate_back);
  else
    decode_columns(tile, first, count, out, rotate_back);
}

// As scalar::rotate_tokens.
template <class T, class O>
replaced_values rotate_tokens(tokens_view<T> in, tokens_view<O> out, int count, int head_dim) {
  replaced_values replaced;
  alignas(64) float vector[max_head_dim];
  for (int t = 0; t < count; ++t) {
    load_vector(in, t, head_dim, false, vector, replaced);
    hadamard(vector, head_dim);
    for (int d = 0; d < head_dim; d += 16) store_channels(out, t, d, load(vector + d));
  }
  return replaced;
}
