// Attention over packed tiles, written once; included inside the region and namespace of each
// instruction set, whose vector operations it uses. The definition: attention/attention.hpp.

// Steps or scales of 16 columns or rows.
KVARN_ALWAYS_INLINE f32 decode_scales(const std::byte* codes, scale_type type) {
  const i32 code = load_u8(codes);
  if (type == scale_type::ue5m3) return half_to_float(shift_left<7>(code));
  const f32 normal = from_bits(add(shift_left<20>(code), set1_i32(0x3c000000)));
  const f32 subnormal = mul(to_float(code), set1(0x1p-9f));
  return from_bits(select_less(code, set1_i32(8), bits(subnormal), bits(normal)));
}

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

// The operands of up to four heads, folded as kvarn::fold_operand does, in the order in which codes
// of 1, 2 or 4 bits leave a 32-bit word: word j, shifted right by width * s and masked, has in byte
// b the code of column (32 / width) j + (8 / width) b + s. Quad (8 / width) j + s holds their
// operands.
inline constexpr std::size_t cache_line = 64;
inline constexpr int max_quads = max_head_dim / 4;

template <int Heads>
struct folded_heads {
  alignas(64) std::int32_t quads[2][Heads][2][max_quads];  // plane, head, low and high byte
  float unit[Heads];
  float bias[Heads];
};

// Orders the operand bytes of `cols` columns, padded with zeros to a multiple of 32, into quads.
template <int Width>
KVARN_ALWAYS_INLINE void order_quads(const std::uint8_t* bytes, int cols, std::int32_t* quads) {
  auto* out = reinterpret_cast<std::uint8_t*>(quads);
  if constexpr (Width == 1) {
    for (int c = 0; c < cols; c += 32)
      for (int s = 0; s < 8; ++s)
        for (int b = 0; b < 4; ++b) out[c + 4 * s + b] = bytes[c + 8 * b + s];
  } else {
    alignas(16) static constexpr std::uint8_t two[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                         2, 6, 10, 14, 3, 7, 11, 15};
    alignas(16) static constexpr std::uint8_t four[16] = {0, 2,  4,  6,  1, 3,  5,  7,
                                                          8, 10, 12, 14, 9, 11, 13, 15};
    for (int c = 0; c < cols; c += 16) shuffle16(bytes + c, Width == 2 ? two : four, out + c);
  }
}

template <int Heads, int Parts>
void fold_heads(const_tile_view tile, const float* const (&a)[Heads], folded_heads<Heads>& out) {
  const tile_layout& layout = tile.layout;
  const int cols = layout.cols();
  alignas(64) float product[Heads][max_head_dim];
  f32 largest[Heads];
  f32 bias[Heads];
  for (int h = 0; h < Heads; ++h) largest[h] = bias[h] = set1(0.0f);
  for (int c = 0; c < cols; c += 16) {
    const f32 step = decode_scales(tile.data + layout.step_offset() + c, layout.scale);
    const f32 zero = load_half(tile.data + layout.zero_offset() + 2 * c);
    for (int h = 0; h < Heads; ++h) {
      const f32 x = load(a[h] + c);
      const f32 folded = mul(x, step);
      store(product[h] + c, folded);
      largest[h] = max(largest[h], abs(folded));
      bias[h] = fma(x, zero, bias[h]);
    }
  }
  constexpr auto precision = Parts == 2 ? operand_precision::int16 : operand_precision::int8;
  constexpr auto limit = static_cast<float>(max_operand(precision));
  constexpr int padding = 32;
  alignas(64) std::uint8_t low[max_head_dim + padding];
  alignas(64) std::uint8_t high[max_head_dim + padding];
  if (layout.bits == 3) {
    std::memset(low + cols, 0, padding);
    std::memset(high + cols, 0, padding);
  }
  for (int h = 0; h < Heads; ++h) {
    const float magnitude = max_lane(largest[h]);
    const bool nonzero = magnitude >= 0x1p-100f;
    const f32 inverse_unit = set1(nonzero ? limit / magnitude : 0.0f);
    out.unit[h] = nonzero ? magnitude / limit : 0.0f;
    out.bias[h] = fold(bias[h]);
    for (int c = 0; c < cols; c += 16) {
      // The integer stands in the low 16 bits of value * inverse_unit + 1.5 * 2^23.
      const i32 value = bits(fma(load(product[h] + c), inverse_unit, set1(12582912.0f)));
      store_u8(low + c, value);
      if constexpr (Parts == 2) store_u8(high + c, shift_right<8>(add(value, set1_i32(128))));
    }
    for (int part = 0; part < Parts; ++part) {
      const std::uint8_t* bytes = part == 0 ? low : high;
      if (layout.bits == 4) {
        order_quads<4>(bytes, cols, out.quads[0][h][part]);
      } else {
        order_quads<2>(bytes, cols, out.quads[0][h][part]);
        if (layout.bits == 3) order_quads<1>(bytes, cols, out.quads[1][h][part]);
      }
    }
  }
}

// For Blocks * rows_at_once rows of a plane: sums[h][r] = or += (sum of code * operand of head h)
// << Shift, exact integers. (Shift 0 is the first plane, which sets.) Prefetches the bytes `ahead`
// of those it reads.
template <int Width, int Shift, int Heads, int Parts, int Blocks>
KVARN_ALWAYS_INLINE void sum_rows(const std::byte* codes, std::size_t stride, int word_count,
                                  std::ptrdiff_t ahead,
                                  const std::int32_t (&quads)[Heads][2][max_quads],
                                  std::int32_t* sums) {
  constexpr int shifts = 8 / Width;
  constexpr int flush_words = dots_before_flush<Width> / shifts;
  static_assert(flush_words >= 1);
  const words mask = broadcast_words(0x01010101 * ((1 << Width) - 1));
  dot_sum sum[Blocks][Heads][Parts];
  words total[Blocks][Heads][Parts];
  KVARN_UNROLL
  for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
  for (int h = 0; h < Heads; ++h) KVARN_UNROLL
  for (int p = 0; p < Parts; ++p) {
    sum[i][h][p] = no_dots();
    if constexpr (flush_words < max_quads) total[i][h][p] = broadcast_words(0);
  }

  for (std::size_t i = 0; i < stride * Blocks * rows_at_once; i += cache_line)
    prefetch(codes + ahead + i);
  for (int first = 0; first < word_count; first += words_at_once) {
    const int count = word_count - first < words_at_once ? word_count - first : words_at_once;
    words w[Blocks][words_at_once];
    KVARN_UNROLL
    for (int i = 0; i < Blocks; ++i)
      load_words(codes + stride * static_cast<std::size_t>(i * rows_at_once) + 4 * first, stride,
                 count, w[i]);
    for (int j = 0; j < count; ++j) {
      words word[Blocks];
      KVARN_UNROLL
      for (int i = 0; i < Blocks; ++i) word[i] = w[i][j];
      const std::int32_t* const quad = quads[0][0] + (first + j) * shifts;
      KVARN_UNROLL
      for (int s = 0; s < shifts; ++s) KVARN_UNROLL
      for (int i = 0; i < Blocks; ++i) {
        const words code = bit_and(word[i], mask);
        word[i] = shift_right<Width>(word[i]);
        KVARN_UNROLL
        for (int h = 0; h < Heads; ++h) KVARN_UNROLL
        for (int p = 0; p < Parts; ++p) dot(sum[i][h][p], code, quad + (2 * h + p) * max_quads + s);
      }
      if constexpr (flush_words < max_quads)
        if (j % flush_words == flush_words - 1 || j == count - 1) {
          KVARN_UNROLL
          for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
          for (int h = 0; h < Heads; ++h) KVARN_UNROLL
          for (int p = 0; p < Parts; ++p) {
            total[i][h][p] = add(total[i][h][p], flush(sum[i][h][p]));
            sum[i][h][p] = no_dots();
          }
        }
    }
  }
  KVARN_UNROLL
  for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
  for (int h = 0; h < Heads; ++h) {
    if constexpr (flush_words >= max_quads) KVARN_UNROLL
    for (int p = 0; p < Parts; ++p) total[i][h][p] = flush(sum[i][h][p]);
    words result = total[i][h][0];
    if constexpr (Parts == 2) result = add(result, shift_left<8>(total[i][h][1]));
    std::int32_t* const out = sums + h * max_head_dim + i * rows_at_once;
    if constexpr (Shift != 0) result = add(load_words(out), shift_left<Shift>(result));
    store_words(out, result);
  }
}

template <int Width, int Shift, int Heads, int Parts>
void sum_plane(const_tile_view tile, int plane, int rows, std::ptrdiff_t ahead,
               const std::int32_t (&quads)[Heads][2][max_quads], std::int32_t* sums) {
  // As many blocks of rows at once as keep enough independent sums in flight.
  constexpr int wanted = dot_accumulators / (Heads * Parts);
  constexpr int blocks = wanted >= 4 ? 4 : wanted >= 2 ? 2 : 1;
  constexpr int step = blocks * rows_at_once;
  const std::size_t stride = tile.layout.plane_row_bytes(plane);
  const std::byte* codes = tile.data + tile.layout.plane_offset(plane);
  const int word_count = static_cast<int>((stride + 3) / 4);
  int row = 0;
  for (; row + step <= rows; row += step)
    sum_rows<Width, Shift, Heads, Parts, blocks>(codes + stride * static_cast<std::size_t>(row),
                                                 stride, word_count, ahead, quads, sums + row);
  for (; row < rows; row += rows_at_once)
    sum_rows<Width, Shift, Heads, Parts, 1>(codes + stride * static_cast<std::size_t>(row), stride,
                                            word_count, ahead, quads, sums + row);
}

// The integer sums of kvarn::tile_product for `rows` rows, a multiple of 16.
template <int Heads, int Parts>
void sum_codes(const_tile_view tile, int rows, const std::byte* next,
               const folded_heads<Heads>& operands, std::int32_t (&sums)[Heads][max_head_dim]) {
  const std::ptrdiff_t ahead = next - tile.data;
  for (std::size_t i = tile.layout.zero_offset(); i < tile.layout.record_bytes(); i += cache_line)
    prefetch(next + i);
  if (tile.layout.bits == 4) {
    sum_plane<4, 0, Heads, Parts>(tile, 0, rows, ahead, operands.quads[0], sums[0]);
    return;
  }
  sum_plane<2, 0, Heads, Parts>(tile, 0, rows, ahead, operands.quads[0], sums[0]);
  if (tile.layout.bits == 3)
    sum_plane<1, 2, Heads, Parts>(tile, 1, rows, ahead, operands.quads[1], sums[0]);
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

// Takes `Heads` query rows through one group, as kvarn::detail::attend_sealed, and prefetches
// `next`.
template <int Heads, int Parts>
void attend_group(const cache_format& format, const sealed_group& group, const sealed_group& next,
                  float soft_cap, attention_row* rows) {
  int first[Heads];
  int end[Heads];
  int last = 0;
  for (int h = 0; h < Heads; ++h) {
    const visible_range visible(rows[h], group.position, group.count);
    first[h] = visible.first;
    end[h] = visible.end;
    if (!visible.empty() && last < visible.end) last = visible.end;
  }
  if (last == 0) return;

  const const_tile_view keys{group.keys, format.key_layout()};
  const const_tile_view values{group.values, format.value_layout()};
  alignas(64) std::int32_t sums[Heads][max_head_dim];
  alignas(64) float scores[Heads][max_group];
  folded_heads<Heads> operands;
  const float* inputs[Heads];

  for (int h = 0; h < Heads; ++h) inputs[h] = rows[h].query;
  fold_heads<Heads, Parts>(keys, inputs, operands);
  const int scored = (last + 15) / 16 * 16;
  sum_codes<Heads, Parts>(keys, scored, next.keys, operands, sums);
  for (int t = 0; t < scored; t += 16) {
    const f32 scale = decode_scales(keys.data + keys.layout.scale_offset() + t, format.scale);
    for (int h = 0; h < Heads; ++h) {
      const f32 sum = to_float(load_i32(sums[h] + t));
      store(scores[h] + t, mul(scale, fma(sum, set1(operands.unit[h]), set1(operands.bias[h]))));
    }
  }

  float weight_sum[Heads];
  float maximum[Heads];
  for (int h = 0; h < Heads; ++h) {
    maximum[h] = minus_infinity;
    weight_sum[h] = 0.0f;
    if (first[h] < end[h])
      maximum[h] = weigh(scores[h], first[h], end[h], format.group, soft_cap, weight_sum[h]);
    else
      std::memset(scores[h], 0, sizeof(scores[h]));
    inputs[h] = scores[h];
  }

  fold_heads<Heads, Parts>(values, inputs, operands);
  sum_codes<Heads, Parts>(values, format.value_head_dim, next.values, operands, sums);
  f32 rescale[Heads];
  f32 unit[Heads];
  f32 bias[Heads];
  for (int h = 0; h < Heads; ++h) {
    if (first[h] >= end[h]) continue;
    const softmax_join join = join_maxima(rows[h].maximum, maximum[h]);
    rows[h].maximum = join.maximum;
    rows[h].sum = std::fma(rows[h].sum, join.first, weight_sum[h] * join.second);
    rescale[h] = set1(join.first);
    unit[h] = set1(operands.unit[h] * join.second);
    bias[h] = set1(operands.bias[h] * join.second);
  }
  for (int d = 0; d < format.value_head_dim; d += 16) {
    const f32 scale = decode_scales(values.data + values.layout.scale_offset() + d, format.scale);
    for (int h = 0; h < Heads; ++h) {
      if (first[h] >= end[h]) continue;
      const f32 product = mul(scale, fma(to_float(load_i32(sums[h] + d)), unit[h], bias[h]));
      store(rows[h].values + d, fma(load(rows[h].values + d), rescale[h], product));
    }
  }
}

template <int Parts>
void attend_groups(const cache_format& format, const sealed_group* groups, std::size_t count,
                   float soft_cap, attention_row* rows, int row_count) {
  for (std::size_t g = 0; g < count; ++g) {
    const sealed_group& group = groups[g];
    const sealed_group& next = groups[g + 1 < count ? g + 1 : g];
    int row = 0;
    for (; row + 4 <= row_count; row += 4)
      attend_group<4, Parts>(format, group, next, soft_cap, rows + row);
    switch (row_count - row) {
      case 1:
        attend_group<1, Parts>(format, group, next, soft_cap, rows + row);
        break;
      case 2:
        attend_group<2, Parts>(format, group, next, soft_cap, rows + row);
        break;
      case 3:
        attend_group<3, Parts>(format, group, next, soft_cap, rows + row);
        break;
      default:
        break;
    }
  }
}

// As scalar::attend_sealed.
inline void attend_sealed(const cache_format& format, const sealed_group* groups, std::size_t count,
                          float cap, operand_precision precision, attention_row* rows,
                          int row_count) {
  if (precision == operand_precision::int16)
    attend_groups<2>(format, groups, count, cap, rows, row_count);
  else
    attend_groups<1>(format, groups, count, cap, rows, row_count);
}

// Sixteen channels of a token as floats; `p` is at least 16 elements.
KVARN_ALWAYS_INLINE f32 load_channels(const float* p) { return load(p); }
KVARN_ALWAYS_INLINE f32 load_channels(const float16* p) { return load_half(p); }
KVARN_ALWAYS_INLINE f32 load_channels(const bfloat16* p) {
  return from_bits(shift_left<16>(load_u16(p)));
}

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
