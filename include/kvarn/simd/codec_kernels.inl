// encode_tile, decode_row, decode_tokens and rotate_tokens from the kernels beside this file;
// included inside the region and namespace of each instruction set. The definition:
// codec/scalar_codec.hpp.

// Writes the packed codes to their planes.
KVARN_NOINLINE void store_planes(const encode_state& state) {
  const tile_layout& layout = state.out.layout;
  constexpr int at_once = 8;
  const std::int32_t* plane_words = state.words;
  for (int plane = 0; plane < layout.planes(); ++plane) {
    const auto bytes = static_cast<int>(layout.plane_row_bytes(plane));
    const auto stride = static_cast<std::size_t>(bytes);
    const std::ptrdiff_t count = (bytes + 3) / 4;
    for (int r = 0; r < state.rows; r += 16) {
      std::byte* out = state.out.data + layout.code_offset(plane, r);
      for (int first = 0; first < count; first += at_once) {
        i32 w[at_once];
        for (int i = 0; i < at_once; ++i) {
          const std::ptrdiff_t word = first + i < count ? first + i : count - 1;
          w[i] = load_i32(plane_words + state.rows * word + r);
        }
        const int left = bytes - 4 * first;
        store_rows(out, stride, left < 4 * at_once ? left : 4 * at_once, w);
        out += sizeof(std::int32_t) * at_once;
      }
    }
    plane_words += state.rows * count;
  }
}

// Steps, zeros and codes. Work on one block of 16 columns stands between the steps of the next that
// wait for each other's results, unless the codes need the grids of all columns.
KVARN_NOINLINE void encode_codes(encode_state& state, const encoder_recipe& recipe, float unit,
                                 const float* upper) {
  KVARN_ASSERT(!(recipe.choose_scales && recipe.unbiased));
  const bool codes_last = recipe.choose_scales || upper != nullptr;
  const tile_layout& layout = state.out.layout;
  grid_vectors grid;
  grid_vectors next_grid;
  column_ranges ranges;
  column_sums sums;
  std::byte* zeros = state.out.data + layout.zero_offset();
  std::byte* steps = state.out.data + layout.step_offset();
  find_ranges(state, 0, ranges);
  for (int c = -16; c < state.cols; c += 16) {
    const int next = c + 16;
    if (next < state.cols) {
      fit_ranges(state, ranges, recipe.range, recipe.cover, next_grid);
      use_grid(state, next, next_grid);
    }
    if (c >= 0) {
      if (recipe.unbiased) {
        encode_and_sum(state, c, sums);
        fit_sums(state, sums, true, grid);
      } else if (!codes_last) {
        encode_columns(state, c);
      }
      store_u16(zeros, grid.zero_bits);
      store_u8(steps, grid.step_bits);
      zeros += 32;
      steps += 16;
    }
    if (next < state.cols) {
      for (int i = 0; i < recipe.refits; ++i) {
        sum_weighted(state, next, sums);
        fit_sums(state, sums, false, next_grid);
        use_grid(state, next, next_grid);
      }
      grid = next_grid;
    }
    if (next + 16 < state.cols) find_ranges(state, next + 16, ranges);
  }
  if (recipe.choose_scales) choose_scales(state, recipe.along, unit);
  if (upper != nullptr)
    for (int r = 0; r < state.rows; r += feedback_rows)
      encode_with_feedback(state, upper, r,
                           state.rows - r < feedback_rows ? state.rows - r : feedback_rows);
  else if (codes_last)
    for (int c = 0; c < state.cols; c += 16) encode_columns(state, c);
  store_planes(state);
}

// Encodes the tile that state.x holds. `row_scale`: of keys the sums of the squares of the rows.
KVARN_NOINLINE normalize_report encode_loaded(encode_state& state, const encoder_recipe& recipe,
                                              float unit, float* row_scale, const float* upper) {
  normalize_report report;
  if (recipe.choose_scales) {
    if (state.out.layout.kind == tile_kind::value)
      sum_row_squares(state.x, state.stride, state.rows, state.cols, nullptr, state.row_squares);
    else
      std::memcpy(state.row_squares, row_scale,
                  sizeof(float) * static_cast<std::size_t>(state.rows));
  }
  const float* scales = row_scale;
  normalize_state normalized;
  if (recipe.scaling == row_scaling::rms) {
    if (state.out.layout.kind == tile_kind::value)
      sum_row_squares(state.x, state.stride, state.rows, state.cols, nullptr, row_scale);
    rms_scales(state.rows, state.cols, unit, row_scale);
  } else if (recipe.scaling == row_scaling::rms_equalized) {
    equalized_rms_scales(state.x, state.stride, state.rows, state.cols, unit, row_scale);
  } else {
    float* const sums = state.column(state.cols);
    normalized.sums = {sums, sums + row_sum_floats(state.rows) / 2};
    report = normalize_columns(
        {state.x, state.rows, state.cols, unit},
        {.iterations = recipe.iterations,
         .scale_equivariant = recipe.scaling == row_scaling::dual_axis_equivariant},
        normalized);
    scales = normalized.best_row;
  }
  round_row_scales(scales, unit, state);
  encode_codes(state, recipe, unit, recipe.error_feedback ? upper : nullptr);
  return report;
}

// Whether encode_workspace holds, of every layout, the aligned tile and the sums over its rows.
constexpr bool workspace_suffices() {
  for (const int head_dim : supported_head_dims)
    for (const int group : supported_groups)
      for (const tile_kind kind : {tile_kind::key, tile_kind::value}) {
        const tile_layout layout{.kind = kind, .head_dim = head_dim, .group = group};
        const std::ptrdiff_t floats =
            column_stride(layout.rows()) * layout.cols() + row_sum_floats(layout.rows());
        if (static_cast<std::size_t>(floats) + alignment_floats > encode_workspace(layout))
          return false;
      }
  return true;
}
static_assert(workspace_suffices());

// As scalar::encode_tile.
template <class T>
KVARN_NOINLINE encode_report encode_tile(tokens_view<T> tokens, tile_view out,
                                         const encoder_recipe& recipe, bool rotate,
                                         const float* upper_factor, float* workspace) {
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
  load_tile<std::remove_const_t<T>>({tokens.data, tokens.token_stride, tokens.channel_stride},
                                    layout, rotate, state.x, state.stride, row_scale,
                                    report.replaced);
  const float unit = rotate ? hadamard_norm(layout.head_dim) : 1.0f;
  report.normalize = encode_loaded(state, recipe, unit, row_scale, upper_factor);
  return report;
}

// Rows of codes, in one plane or two; those of a block of 16 columns from the first on.
struct code_rows {
  const std::byte* low;
  const std::byte* high;
  std::ptrdiff_t low_stride;
  std::ptrdiff_t high_stride;
};

// out[stride * i] = code * step + zero, times scale[i], of each of `rows` rows of 16 codes.
template <int Bits>
KVARN_ALWAYS_INLINE void decode_block(code_rows codes, int rows, f32 step, f32 zero,
                                      const float* scale, float* out, std::ptrdiff_t stride) {
  for (int i = 0; i < rows; ++i, out += stride) {
    store(out, mul(fma(load_codes<Bits>(codes.low, codes.high), step, zero), set1(scale[i])));
    codes.low += codes.low_stride;
    codes.high += codes.high_stride;
  }
}

// Decodes, as stored, columns first_col .. end_col - 1, multiples of 16, of a block of rows:
// element (i, c) to out[stride * i + c - first_col].
KVARN_NOINLINE void decode_rows(const_tile_view tile, int row, int rows, std::ptrdiff_t first_col,
                                std::ptrdiff_t end_col, float* out, std::ptrdiff_t stride) {
  const tile_layout& layout = tile.layout;
  alignas(64) float scale[max_head_dim];  // from a multiple of 16 on
  const int within = row % 16;
  for (int r = 0; r < within + rows; r += 16)
    store(scale + r,
          decode_scales(tile.data + layout.scale_offset() + row - within + r, layout.scale));
  const int last = layout.planes() - 1;
  const std::ptrdiff_t width = layout.plane_bits(0);
  code_rows codes{tile.data + layout.code_offset(0, row) + first_col * width / 8,
                  tile.data + layout.code_offset(last, row) + first_col / 8,
                  static_cast<std::ptrdiff_t>(layout.plane_row_bytes(0)),
                  static_cast<std::ptrdiff_t>(layout.plane_row_bytes(last))};
  const std::byte* steps = tile.data + layout.step_offset() + first_col;
  const std::byte* zeros = tile.data + layout.zero_offset() + 2 * first_col;
  for (std::ptrdiff_t c = first_col; c < end_col; c += 16) {
    const f32 step = decode_scales(steps, layout.scale);
    const f32 zero = load_half(zeros);
    if (layout.bits == 2)
      decode_block<2>(codes, rows, step, zero, scale + within, out, stride);
    else if (layout.bits == 3)
      decode_block<3>(codes, rows, step, zero, scale + within, out, stride);
    else
      decode_block<4>(codes, rows, step, zero, scale + within, out, stride);
    codes.low += 2 * width;
    codes.high += 2;
    steps += 16;
    zeros += 32;
    out += 16;
  }
}

// As scalar::decode_row.
inline void decode_row(const_tile_view tile, int row, float* out) {
  decode_rows(tile, row, 1, 0, tile.layout.cols(), out, 0);
}

// Stores `count` tokens of head_dim floats each as tokens first, first + 1, ... of a view.
template <class T>
KVARN_NOINLINE void store_tokens(const float* x, int head_dim, int first, int count,
                                 tokens_view<T> out) {
  for (int t = first; t < first + count; ++t)
    for (int d = 0; d < head_dim; d += 16, x += 16) {
      if (out.channel_stride == 1)
        store_channels(out.data + t * out.token_stride + d, load(x));
      else
        for (int i = 0; i < 16; ++i) out.store(t, d + i, x[i]);
    }
}

// Tokens first .. first + count - 1 of a tile, at most 16, for values those of one block of 16
// columns: channel d of token t to out[stride * (t - first) + d].
KVARN_NOINLINE void decode_vectors(const_tile_view tile, int first, int count, bool rotate_back,
                                   float* out, std::ptrdiff_t stride) {
  const int head_dim = tile.layout.head_dim;
  const float norm = rotate_back ? hadamard_norm(head_dim) : 1.0f;
  if (tile.layout.kind == tile_kind::key) {
    decode_rows(tile, first, count, 0, head_dim, out, stride);
    if (rotate_back)
      for (int t = 0; t < count; ++t)
        rotate_vector(out + stride * t, out + stride * t, head_dim, norm);
    return;
  }
  alignas(64) float columns[16 * max_head_dim];
  alignas(64) float rows[16][16];
  const int first_col = first - first % 16;
  decode_rows(tile, 0, head_dim, first_col, first_col + 16, columns, 16);
  if (rotate_back) rotate_columns(columns, head_dim, 1, columns, 16);
  const bool whole = count == 16;
  for (std::ptrdiff_t d = 0; d < head_dim; d += 16) {
    transpose_block(columns + 16 * d, 16, whole ? out + d : rows[0], whole ? stride : 16, norm);
    if (!whole)
      for (int t = 0; t < count; ++t) store(out + stride * t + d, load(rows[first % 16 + t]));
  }
}

// As scalar::decode_tokens.
template <class T>
KVARN_NOINLINE void decode_tokens(const_tile_view tile, int first, int count, tokens_view<T> out,
                                  bool rotate_back) {
  KVARN_ASSERT(first >= 0 && count >= 0 && first + count <= tile.layout.group);
  alignas(64) float buffer[16 * max_head_dim];
  const int head_dim = tile.layout.head_dim;
  for (int t = 0; t < count;) {
    const int left_of_16 = 16 - (first + t) % 16;
    const int several = count - t < left_of_16 ? count - t : left_of_16;
    bool direct = false;
    if constexpr (std::is_same_v<T, float>) {
      direct = out.channel_stride == 1;
      if (direct)
        decode_vectors(tile, first + t, several, rotate_back, out.data + t * out.token_stride,
                       out.token_stride);
    }
    if (!direct) {
      decode_vectors(tile, first + t, several, rotate_back, buffer, head_dim);
      store_tokens(buffer, head_dim, t, several, out);
    }
    t += several;
  }
}

// As scalar::rotate_tokens.
template <class T, class O>
KVARN_NOINLINE replaced_values rotate_tokens(tokens_view<T> in, tokens_view<O> out, int count,
                                             int head_dim) {
  replaced_values replaced;
  const float norm = hadamard_norm(head_dim);
  alignas(64) float vector[max_head_dim];
  const tokens_view<const std::remove_const_t<T>> read{in.data, in.token_stride, in.channel_stride};
  for (int t = 0; t < count; ++t) {
    const auto token = load_rows(read, t, 1, head_dim, vector, replaced);
    rotate_vector(token.x, vector, head_dim, norm);
    sanitize(vector, head_dim, replaced);
    store_tokens(vector, head_dim, t, 1, out);
  }
  return replaced;
}
