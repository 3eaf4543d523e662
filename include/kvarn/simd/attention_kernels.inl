// Attention over packed tiles, written once; included inside the region and namespace of each
// instruction set, whose vector operations it uses. The definition: attention/attention.hpp.

// kvarn::exp2_of.
KVARN_ALWAYS_INLINE f32 exp2_of(f32 x) {
  const f32 magic = set1(12582912.0f);  // 1.5 * 2^23
  const f32 shifted = add(x, magic);
  const f32 f = sub(x, sub(shifted, magic));
  f32 p = set1(0x1.5c08e6p-10f);
  p = fma(p, f, set1(0x1.3d0c52p-7f));
  p = fma(p, f, set1(0x1.c6b6e4p-5f));
  p = fma(p, f, set1(0x1.ebf918p-3f));
  p = fma(p, f, set1(0x1.62e428p-1f));
  p = fma(p, f, set1(1.0f));
  const f32 power = from_bits(add(bits(p), shift_left<23>(bits(shifted))));
  return select_less(x, set1(-125.0f), set1(0.0f), power);
}

inline constexpr std::size_t cache_line = 64;

// The operands of up to heads_at_once heads, folded as kvarn::fold_operand does and cut into one
// column of bytes (precision int8) or two (int16: the low bytes, then the high bytes). A column is
// in the order in which codes of 1, 2 or 4 bits leave a 32-bit word: word j, shifted right by width
// * s and masked, has in byte b the code of tile column (32 / width) j + (8 / width) b + s. Quad (8
// / width) j + s holds their operands.
struct folded_heads {
  static constexpr int max_columns = 2 * heads_at_once;
  static constexpr int max_quads = max_head_dim / 4;
  alignas(64) std::int32_t quads[2][max_columns][max_quads];  // for each plane of codes
  float unit[heads_at_once];
  float bias[heads_at_once];
};

// Orders the operand bytes of `cols` tile columns, padded with zeros to a multiple of 32, into
// quads.
KVARN_ALWAYS_INLINE void order_quads(const std::uint8_t* bytes, int cols, int width,
                                     std::int32_t* quads) {
  alignas(16) static constexpr std::uint8_t two[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                       2, 6, 10, 14, 3, 7, 11, 15};
  alignas(16) static constexpr std::uint8_t four[16] = {0, 2,  4,  6,  1, 3,  5,  7,
                                                        8, 10, 12, 14, 9, 11, 13, 15};
  auto* out = reinterpret_cast<std::uint8_t*>(quads);
  if (width == 1) {
    for (int c = 0; c < cols; c += 32)
      for (int s = 0; s < 8; ++s)
        for (int b = 0; b < 4; ++b) out[c + 4 * s + b] = bytes[c + 8 * b + s];
  } else {
    for (int c = 0; c < cols; c += 16) shuffle16(bytes + c, width == 2 ? two : four, out + c);
  }
}

// Folds the steps and zeros of a tile into `heads` vectors, a[h] + 0 .. cols - 1.
inline void fold_heads(const_tile_view tile, const float* const* a, int heads,
                       operand_precision precision, folded_heads& out) {
  const tile_layout& layout = tile.layout;
  const int cols = layout.cols();
  constexpr int padding = 32;
  alignas(64) float step[max_head_dim];
  alignas(64) float zero[max_head_dim];
  alignas(64) float product[max_head_dim];
  alignas(64) std::uint8_t bytes[2][max_head_dim + padding];
  for (int c = 0; c < cols; c += 16) {
    store(step + c, decode_scales(tile.data + layout.step_offset() + c, layout.scale));
    store(zero + c, load_half(tile.data + layout.zero_offset() + 2 * c));
  }
  const int parts = precision == operand_precision::int16 ? 2 : 1;
  const auto limit = static_cast<float>(max_operand(precision));
  if (layout.bits == 3) {
    std::memset(bytes[0] + cols, 0, padding);
    std::memset(bytes[1] + cols, 0, padding);
  }
  for (int h = 0; h < heads; ++h) {
    f32 largest = set1(0.0f);
    f32 bias = set1(0.0f);
    for (int c = 0; c < cols; c += 16) {
      const f32 x = load(a[h] + c);
      const f32 folded = mul(x, load(step + c));
      store(product + c, folded);
      largest = max(largest, abs(folded));
      bias = fma(x, load(zero + c), bias);
    }
    const float magnitude = max_lane(largest);
    const bool nonzero = magnitude >= 0x1p-100f;
    const f32 inverse_unit = set1(nonzero ? limit / magnitude : 0.0f);
    out.unit[h] = nonzero ? magnitude / limit : 0.0f;
    out.bias[h] = fold(bias);
    for (int c = 0; c < cols; c += 16) {
      // The integer stands in the low 16 bits of product * inverse_unit + 1.5 * 2^23.
      const i32 value = bits(fma(load(product + c), inverse_unit, set1(12582912.0f)));
      store_u8(bytes[0] + c, value);
      if (parts == 2) store_u8(bytes[1] + c, shift_right<8>(add(value, set1_i32(128))));
    }
    for (int p = 0; p < parts; ++p)
      for (int plane = 0; plane < layout.planes(); ++plane)
        order_quads(bytes[p], cols, layout.plane_bits(plane), out.quads[plane][parts * h + p]);
  }
}

// Exact integers for Blocks * rows_at_once rows of a plane: sums[column][row] = the sum of code *
// operand, plus sums[column][row] before where the plane is not the first, whose codes are worth
// 2^shift. Prefetches the bytes `ahead` of those it reads.
template <int Columns, int Blocks>
KVARN_ALWAYS_INLINE void sum_rows(const std::byte* codes, std::size_t stride, int width, int shift,
                                  std::ptrdiff_t ahead, const std::int32_t* quads,
                                  std::int32_t* sums) {
  const words mask = broadcast_words(0x01010101 * ((1 << width) - 1));
  const words next_code = broadcast_words(width);
  const int shifts = 8 / width;
  const int word_count = static_cast<int>((stride + 3) / 4);
  dot_sum sum[Blocks][Columns];
  words total[Blocks][Columns];
  KVARN_UNROLL
  for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
  for (int c = 0; c < Columns; ++c) {
    sum[i][c] = no_dots();
    if constexpr (dots_need_flush) total[i][c] = broadcast_words(0);
  }
  for (std::size_t i = 0; i < stride * Blocks * rows_at_once; i += cache_line)
    prefetch(codes + ahead + i);

  const std::int32_t* quad = quads;
  for (int first = 0; first < word_count; first += words_at_once) {
    const int count = word_count - first < words_at_once ? word_count - first : words_at_once;
    words w[Blocks][words_at_once];
    KVARN_UNROLL
    for (int i = 0; i < Blocks; ++i)
      load_words(codes + stride * static_cast<std::size_t>(i * rows_at_once) + 4 * first, stride,
                 count, w[i]);
    int unflushed = 0;
    for (int j = 0; j < count; ++j) {
      words word[Blocks];
      KVARN_UNROLL
      for (int i = 0; i < Blocks; ++i) word[i] = w[i][j];
      for (int s = 0; s < shifts; ++s) {
        KVARN_UNROLL
        for (int i = 0; i < Blocks; ++i) {
          const words code = bit_and(word[i], mask);
          word[i] = shift_right(word[i], next_code);
          KVARN_UNROLL
          for (int c = 0; c < Columns; ++c)
            dot(sum[i][c], code, quad + c * folded_heads::max_quads);
        }
        ++quad;
      }
      if constexpr (dots_need_flush) {
        unflushed += shifts;
        if (unflushed + shifts > dots_before_flush(width) || j == count - 1) {
          unflushed = 0;
          KVARN_UNROLL
          for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
          for (int c = 0; c < Columns; ++c) {
            total[i][c] = add(total[i][c], flush(sum[i][c]));
            sum[i][c] = no_dots();
          }
        }
      }
    }
    (void)unflushed;
  }
  KVARN_UNROLL
  for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
  for (int c = 0; c < Columns; ++c) {
    words result = dots_need_flush ? total[i][c] : flush(sum[i][c]);
    std::int32_t* const out = sums + c * max_head_dim + i * rows_at_once;
    if (shift != 0) result = add(load_words(out), shift_left(result, broadcast_words(shift)));
    store_words(out, result);
  }
}

template <int Columns>
void sum_plane(const_tile_view tile, int plane, int rows, std::ptrdiff_t ahead,
               const std::int32_t* quads, std::int32_t* sums) {
  // As many blocks of rows at once as keep enough independent sums in flight.
  constexpr int wanted = dot_accumulators / Columns;
  constexpr int blocks = wanted >= 4 ? 4 : wanted >= 2 ? 2 : 1;
  const std::size_t stride = tile.layout.plane_row_bytes(plane);
  const std::byte* codes = tile.data + tile.layout.plane_offset(plane);
  const int width = tile.layout.plane_bits(plane);
  const int shift = tile.layout.plane_shift(plane);
  int row = 0;
  for (; row + blocks * rows_at_once <= rows; row += blocks * rows_at_once)
    sum_rows<Columns, blocks>(codes + stride * static_cast<std::size_t>(row), stride, width, shift,
                              ahead, quads, sums + row);
  if constexpr (blocks > 1)
    for (; row < rows; row += rows_at_once)
      sum_rows<Columns, 1>(codes + stride * static_cast<std::size_t>(row), stride, width, shift,
                           ahead, quads, sums + row);
}

// sums[column][row] for `rows` rows, a multiple of 16: the sum of code * operand, exactly. `next`
// is the record to be read after this one.
inline void sum_codes(const_tile_view tile, int rows, const std::byte* next,
                      const folded_heads& operands, int columns,
                      std::int32_t (*sums)[max_head_dim]) {
  const std::ptrdiff_t ahead = next - tile.data;
  for (std::size_t i = tile.layout.zero_offset(); i < tile.layout.record_bytes(); i += cache_line)
    prefetch(next + i);
  for (int plane = 0; plane < tile.layout.planes(); ++plane)
    for (int c = 0; c < columns;) {
      const std::int32_t* const quads = operands.quads[plane][c];
      const int left = columns - c;
      if (left >= 8) {
        sum_plane<8>(tile, plane, rows, ahead, quads, sums[c]);
        c += 8;
      } else if (left >= 6) {
        sum_plane<6>(tile, plane, rows, ahead, quads, sums[c]);
        c += 6;
      } else if (left >= 4) {
        sum_plane<4>(tile, plane, rows, ahead, quads, sums[c]);
        c += 4;
      } else if (left >= 2) {
        sum_plane<2>(tile, plane, rows, ahead, quads, sums[c]);
        c += 2;
      } else {
        sum_plane<1>(tile, plane, rows, ahead, quads, sums[c]);
        c += 1;
      }
    }
}

// The sum of head h over 16 rows from its column or columns.
KVARN_ALWAYS_INLINE f32 head_sum(const std::int32_t (*sums)[max_head_dim], int h, int parts,
                                 int row) {
  if (parts == 1) return to_float(load_i32(sums[h] + row));
  const i32 low = load_i32(sums[2 * h] + row);
  const i32 high = load_i32(sums[2 * h + 1] + row);
  return to_float(add(low, shift_left<8>(high)));
}

KVARN_ALWAYS_INLINE f32 soft_capped(f32 score, float cap) {
  const f32 x = mul(div(score, set1(cap)), set1(2.0f * log2_e));
  const f32 power = exp2_of(min(max(x, set1(-60.0f)), set1(60.0f)));
  return mul(set1(cap), sub(set1(1.0f), div(set1(2.0f), add(power, set1(1.0f)))));
}

// kvarn::detail::weigh_scores and sum_weights over `group` scores, a multiple of 16.
KVARN_ALWAYS_INLINE float weigh(float* scores, int first, int end, int group, float cap,
                                float& sum) {
  if (cap != 0.0f)
    for (int t = 0; t < group; t += 16) store(scores + t, soft_capped(load(scores + t), cap));
  for (int t = 0; t < first; ++t) scores[t] = minus_infinity;
  for (int t = end; t < group; ++t) scores[t] = minus_infinity;
  f32 largest = load(scores);
  for (int t = 16; t < group; t += 16) largest = max(largest, load(scores + t));
  const float maximum = max_lane(largest);
  const f32 shift = set1(maximum);
  f32 total = set1(0.0f);
  for (int t = 0; t < group; t += 16) {
    const f32 weight = exp2_of(sub(load(scores + t), shift));
    store(scores + t, weight);
    total = add(total, weight);
  }
  sum = fold(total);
  return maximum;
}

// Takes up to heads_at_once rows through one group, as scalar::attend_sealed, and prefetches
// `next`.
inline void attend_group(const cache_format& format, const sealed_group& group,
                         const sealed_group& next, float cap, operand_precision precision,
                         attention_row* rows, int heads) {
  const int parts = precision == operand_precision::int16 ? 2 : 1;
  int first[heads_at_once];
  int end[heads_at_once];
  int last = 0;
  for (int h = 0; h < heads; ++h) {
    const visible_range visible(rows[h], group.position, group.count);
    first[h] = visible.first;
    end[h] = visible.end;
    if (!visible.empty() && last < visible.end) last = visible.end;
  }
  if (last == 0) return;

  const const_tile_view keys{group.keys, format.key_layout()};
  const const_tile_view values{group.values, format.value_layout()};
  alignas(64) std::int32_t sums[folded_heads::max_columns][max_head_dim];
  alignas(64) float scores[heads_at_once][max_group];
  alignas(64) float scale[max_head_dim];
  folded_heads operands;
  const float* inputs[heads_at_once];
  for (int h = 0; h < heads; ++h) inputs[h] = rows[h].query;

  const int scored = (last + 15) / 16 * 16;
  fold_heads(keys, inputs, heads, precision, operands);
  sum_codes(keys, scored, next.keys, operands, parts * heads, sums);
  for (int t = 0; t < scored; t += 16)
    store(scale + t, decode_scales(keys.data + keys.layout.scale_offset() + t, format.scale));
  float weight_sum[heads_at_once];
  float maximum[heads_at_once];
  for (int h = 0; h < heads; ++h) {
    inputs[h] = scores[h];
    if (first[h] >= end[h]) {
      std::memset(scores[h], 0, sizeof(scores[h]));
      continue;
    }
    const f32 unit = set1(operands.unit[h]);
    const f32 bias = set1(operands.bias[h]);
    for (int t = 0; t < scored; t += 16)
      store(scores[h] + t, mul(load(scale + t), fma(head_sum(sums, h, parts, t), unit, bias)));
    maximum[h] = weigh(scores[h], first[h], end[h], format.group, cap, weight_sum[h]);
  }

  const int dim = format.value_head_dim;
  fold_heads(values, inputs, heads, precision, operands);
  sum_codes(values, dim, next.values, operands, parts * heads, sums);
  for (int d = 0; d < dim; d += 16)
    store(scale + d, decode_scales(values.data + values.layout.scale_offset() + d, format.scale));
  for (int h = 0; h < heads; ++h) {
    if (first[h] >= end[h]) continue;
    attention_row& row = rows[h];
    const softmax_join join = join_maxima(row.maximum, maximum[h]);
    row.maximum = join.maximum;
    row.sum = std::fma(row.sum, join.first, weight_sum[h] * join.second);
    const f32 rescale = set1(join.first);
    const f32 unit = set1(operands.unit[h] * join.second);
    const f32 bias = set1(operands.bias[h] * join.second);
    for (int d = 0; d < dim; d += 16) {
      const f32 product = mul(load(scale + d), fma(head_sum(sums, h, parts, d), unit, bias));
      store(row.values + d, fma(load(row.values + d), rescale, product));
    }
  }
}

// As scalar::attend_sealed.
inline void attend_sealed(const cache_format& format, const sealed_group* groups, std::size_t count,
                          float cap, operand_precision precision, attention_row* rows,
                          int row_count) {
  for (std::size_t g = 0; g < count; ++g) {
    const sealed_group& next = groups[g + 1 < count ? g + 1 : g];
    for (int row = 0; row < row_count; row += heads_at_once) {
      const int heads = row_count - row < heads_at_once ? row_count - row : heads_at_once;
      attend_group(format, groups[g], next, cap, precision, rows + row, heads);
    }
  }
}

// Sixteen channels of a token as floats.
template <class T>
KVARN_ALWAYS_INLINE f32 load_channels(tokens_view<const T> tokens, int token, int channel) {
  if (tokens.channel_stride == 1)
    return load_channels(tokens.data + token * tokens.token_stride + channel);
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = tokens.load(token, channel + i);
  return load(x);
}

// Inner products of `Heads` queries with the keys of tokens 0 .. count - 1 from `start` on.
template <int Heads, class T>
void score_exact(tokens_view<const T> keys, int start, int count, int head_dim,
                 const attention_row* rows, float (*scores)[exact_block]) {
  for (int t = 0; t < count; t += 4) {
    f32 sums[16];
    KVARN_UNROLL
    for (int i = 0; i < 16; ++i) sums[i] = set1(0.0f);
    for (int d = 0; d < head_dim; d += 16) KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int token = t + i < count ? t + i : count - 1;
      const f32 key = load_channels(keys, start + token, d);
      KVARN_UNROLL
      for (int h = 0; h < Heads; ++h)
        sums[4 * h + i] = fma(load(rows[h].query + d), key, sums[4 * h + i]);
    }
    alignas(64) float totals[16];
    store(totals, fold_each(sums));
    for (int h = 0; h < Heads; ++h)
      for (int i = 0; i < 4; ++i) scores[h][t + i] = totals[4 * h + i];
  }
}

// values[h] = sum over tokens first .. end - 1, in order, of weights[h][t] times the token's
// values.
template <int Heads, class T>
void sum_exact(tokens_view<const T> tokens, int start, int first, int end, int dim,
               const float (*weights)[exact_block], float (*values)[max_head_dim]) {
  for (int d = 0; d < dim; d += 16) {
    f32 sums[Heads];
    KVARN_UNROLL
    for (int h = 0; h < Heads; ++h) sums[h] = set1(0.0f);
    for (int t = first; t < end; ++t) {
      const f32 value = load_channels(tokens, start + t, d);
      KVARN_UNROLL
      for (int h = 0; h < Heads; ++h) sums[h] = fma(set1(weights[h][t]), value, sums[h]);
    }
    KVARN_UNROLL
    for (int h = 0; h < Heads; ++h) store(values[h] + d, sums[h]);
  }
}

// As scalar::join_row.
inline void join_row(attention_row& row, const attention_row& later, int dim) {
  if (later.maximum == minus_infinity) return;
  const softmax_join join = join_maxima(row.maximum, later.maximum);
  row.maximum = join.maximum;
  row.sum = std::fma(row.sum, join.first, later.sum * join.second);
  const f32 first = set1(join.first);
  const f32 second = set1(join.second);
  for (int d = 0; d < dim; d += 16)
    store(row.values + d, fma(load(row.values + d), first, mul(load(later.values + d), second)));
}

// Takes rows that see the same tokens through one block.
template <int Heads, class T>
void attend_exact_block(const cache_format& format, const exact_tokens<T>& tokens, int start,
                        int count, float cap, attention_row* rows) {
  alignas(64) float scores[Heads][exact_block];
  alignas(64) float values[Heads][max_head_dim];
  score_exact<Heads>(tokens.keys, start, count, format.key_head_dim, rows, scores);
  const visible_range visible(rows[0], tokens.position + start, count);
  if (visible.empty()) return;
  attention_row parts[Heads];
  for (int h = 0; h < Heads; ++h) {
    parts[h].values = values[h];
    parts[h].maximum =
        weigh(scores[h], visible.first, visible.end, (count + 15) / 16 * 16, cap, parts[h].sum);
  }
  sum_exact<Heads>(tokens.values, start, visible.first, visible.end, format.value_head_dim, scores,
                   values);
  for (int h = 0; h < Heads; ++h) join_row(rows[h], parts[h], format.value_head_dim);
}

// As scalar::attend_exact.
template <class T>
void attend_exact(const cache_format& format, const exact_tokens<T>& tokens, float cap,
                  attention_row* rows, int row_count) {
  for (int start = 0; start < tokens.count; start += exact_block) {
    const int left = tokens.count - start;
    const int count = left < exact_block ? left : exact_block;
    for (int row = 0; row < row_count;) {
      int heads = 1;
      while (heads < 4 && row + heads < row_count &&
             rows[row + heads].first_visible == rows[row].first_visible &&
             rows[row + heads].end_visible == rows[row].end_visible)
        ++heads;
      switch (heads) {
        case 1:
          attend_exact_block<1>(format, tokens, start, count, cap, rows + row);
          break;
        case 2:
          attend_exact_block<2>(format, tokens, start, count, cap, rows + row);
          break;
        case 3:
          attend_exact_block<3>(format, tokens, start, count, cap, rows + row);
          break;
        default:
          attend_exact_block<4>(format, tokens, start, count, cap, rows + row);
          break;
      }
      row += heads;
    }
  }
}

// As scalar::prepare_query.
template <class T>
void prepare_query(tokens_view<T> queries, int index, int head_dim,
                   const attention_options& options, float* query) {
  replaced_values replaced;
  load_token(queries, index, head_dim, query, replaced);
  float unit = options.softmax_scale * log2_e;
  if (!options.queries_rotated) {
    hadamard_unnormalized(query, head_dim);
    unit = unit * hadamard_norm(head_dim);
  }
  for (int d = 0; d < head_dim; d += 16) store(query + d, mul(load(query + d), set1(unit)));
}

// As scalar::join_sink_logit.
inline void join_sink_logit(attention_row& row, float logit, int dim) {
  const softmax_join join = join_maxima(row.maximum, logit * log2_e);
  row.maximum = join.maximum;
  row.sum = std::fma(row.sum, join.first, join.second);
  for (int d = 0; d < dim; d += 16)
    store(row.values + d, mul(load(row.values + d), set1(join.first)));
}

// As scalar::finish_row.
template <class T>
void finish_row(const attention_row& row, int dim, bool rotate, tokens_view<T> out, int index) {
  float norm = row.maximum == minus_infinity ? 0.0f : 1.0f / row.sum;
  if (rotate) {
    hadamard_unnormalized(row.values, dim);
    norm = norm * hadamard_norm(dim);
  }
  for (int d = 0; d < dim; d += 16) store(row.values + d, mul(load(row.values + d), set1(norm)));
  for (int d = 0; d < dim; ++d) out.store(index, d, row.values[d]);
}
