// Attention over packed tiles, written once; included inside the region and namespace of each
// instruction set, whose vector operations it uses. The definition: attention/scalar_attention.hpp.

// kvarn::exp2_of.
KVARN_ALWAYS_INLINE f32 exp2_of(f32 x) {
  const f32 shift = set1(integer_shift);
  const f32 whole = sub(add(x, shift), shift);
  const f32 f = sub(x, whole);
  f32 p = set1(exp2_coefficients[0]);
  KVARN_UNROLL
  for (int i = 1; i < 6; ++i) p = fma(p, f, set1(exp2_coefficients[i]));
  return scale_from(x, -125.0f, p, whole);
}

// What a tile folds into its operands: a[c] (step[c] (code - middle) + center[c]).
struct tile_columns {
  alignas(64) float step[max_head_dim];
  alignas(64) float center[max_head_dim];
};
inline void load_columns(const_tile_view tile, tile_columns& out) {
  const tile_layout& layout = tile.layout;
  const f32 middle = set1(middle_code(layout));
  for (std::ptrdiff_t c = 0; c < layout.cols(); c += 16) {
    const f32 step = decode_scales(tile.data + layout.step_offset() + c, layout.scale);
    store(out.step + c, step);
    store(out.center + c, fma(middle, step, load_half(tile.data + layout.zero_offset() + 2 * c)));
  }
}

// Heads whose operands are folded together.
inline constexpr int folded_at_once = 4;

// On the way to the operands of some heads: products with the steps, and sums lane by lane.
struct folded_products {
  alignas(64) float product[folded_at_once][max_head_dim + cache_line / 4];
  f32 magnitude[folded_at_once];
  f32 bias[folded_at_once];
  f32 weights[folded_at_once];  // of softmax weights
};

// Multiplies the columns of a tile with a[c] of head i, which are a query, or, where Weighs, the
// softmax weights 2^(a[c] - maximum).
template <bool Weighs>
inline void fold_columns(const tile_columns& columns, int cols, const float* a, float maximum,
                         int i, folded_products& out) {
  f32 magnitude = set1(0.0f);
  f32 bias = set1(0.0f);
  f32 weights = set1(0.0f);
  const f32 shift = set1(maximum);
  for (int c = 0; c < cols; c += 16) {
    f32 x = load(a + c);
    if constexpr (Weighs) {
      x = exp2_of(sub(x, shift));
      weights = add(weights, x);
    }
    const f32 product = mul(x, load(columns.step + c));
    store(out.product[i] + c, product);
    magnitude = max_magnitude(magnitude, product);
    bias = fma(x, load(columns.center + c), bias);
  }
  // Operands beyond the columns are 0.
  for (int c = cols; c % bytes_at_once != 0; c += 16) store(out.product[i] + c, set1(0.0f));
  out.magnitude[i] = magnitude;
  out.bias[i] = bias;
  out.weights[i] = weights;
}

// Rounds products times inverse_unit to the operands of head h. Returns 16 sums of them.
inline f32 round_products(const tile_layout& layout, const float* product, float inverse_unit,
                          int h, operand_precision precision, folded_heads& out) {
  const std::ptrdiff_t parts = precision == operand_precision::int16 ? 2 : 1;
  const f32 shift = set1(integer_shift);
  const f32 inverse = set1(inverse_unit);
  i32 sum = set1_i32(0);
  std::uint32_t shifts = 0;
  for (int c = 0; c < layout.cols(); c += bytes_at_once) {
    i32 value[4];
    KVARN_UNROLL
    for (std::ptrdiff_t k = 0; k < 4; ++k) {
      // The integer stands in the low bits of product * inverse + shift, beside those of shift.
      value[k] = bits(fma(load(product + c + 16 * k), inverse, shift));
      sum = add(sum, value[k]);
    }
    shifts += 4 * bits_of(integer_shift);
    const split_bytes bytes = split(value);
    for (int plane = 0; plane < layout.planes(); ++plane) {
      const int width = layout.plane_bits(plane);
      std::int32_t(*const quads)[quad_stride] = out.quads[plane] + parts * h;
      store_quads(quads[0] + c / 4, bytes.low, width);
      if (parts == 2) store_quads(quads[1] + c / 4, bytes.high, width);
    }
  }
  return to_float(sub(sum, set1_i32(static_cast<std::int32_t>(shifts))));
}

// Folds a tile into the operands of all heads, as fold_columns takes them. `weights`: the sums of
// the softmax weights; null unless Weighs.
template <bool Weighs>
inline void fold_heads(const_tile_view tile, const float* const* a, const float* maximum, int heads,
                       operand_precision precision, const sum_operations& sums, folded_heads& out,
                       float* weights) {
  const tile_layout& layout = tile.layout;
  tile_columns columns;
  load_columns(tile, columns);
  const auto limit = static_cast<float>(max_operand(precision));
  const float middle = middle_code(layout);
  for (int first = 0; first < heads; first += folded_at_once) {
    const int count = heads - first < folded_at_once ? heads - first : folded_at_once;
    folded_products products;
    for (int i = 0; i < count; ++i)
      fold_columns<Weighs>(columns, layout.cols(), a[first + i], Weighs ? maximum[first + i] : 0.0f,
                           i, products);
    float inverse_unit[folded_at_once];
    for (int i = 0; i < count; ++i) {
      const float magnitude = max_lane(products.magnitude[i]);
      const bool nonzero = magnitude >= least_magnitude;
      inverse_unit[i] = nonzero ? limit / magnitude : 0.0f;
      out.unit[first + i] = nonzero ? magnitude / limit : 0.0f;
    }
    for (int i = 0; i < count; ++i) {
      const int h = first + i;
      const f32 values =
          round_products(layout, products.product[i], inverse_unit[i], h, precision, out);
      out.bias[h] = std::fma(-rounded(middle * out.unit[h]), fold(values), fold(products.bias[i]));
      if constexpr (Weighs) weights[h] = fold(products.weights[i]);
    }
    sums.stay_awake();
  }
}

// The sum of head h over 16 rows from its column or columns.
KVARN_ALWAYS_INLINE f32 head_sum(const std::int32_t (*sums)[sum_stride], std::ptrdiff_t h,
                                 int parts, int row) {
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

// Caps `group` scores, a multiple of 16, and masks those outside [first, end). Returns 16 maxima.
KVARN_NOINLINE f32 cap_and_mask(float* scores, int first, int end, int group, float cap) {
  if (cap != 0.0f)
    for (int t = 0; t < group; t += 16) store(scores + t, soft_capped(load(scores + t), cap));
  for (int t = 0; t < first; ++t) scores[t] = minus_infinity;
  for (int t = end; t < group; ++t) scores[t] = minus_infinity;
  f32 largest = load(scores);
  for (int t = 16; t < group; t += 16) largest = max(largest, load(scores + t));
  return largest;
}

// Turns `group` scores into weights 2^(score - maximum), as scalar::weigh. Returns 16 sums.
KVARN_NOINLINE f32 weigh(float* scores, float maximum, int group) {
  const f32 shift = set1(maximum);
  f32 total = set1(0.0f);
  for (int t = 0; t < group; t += 16) {
    const f32 weight = exp2_of(sub(load(scores + t), shift));
    store(scores + t, weight);
    total = add(total, weight);
  }
  return total;
}

// Takes up to heads_at_once rows, each of which sees some of the group, through it, as
// scalar::attend_sealed. Prefetches `next`.
inline void attend_group(const cache_format& format, const sealed_group& group,
                         const sealed_group& next, float cap, operand_precision precision,
                         const sum_operations& operations, attention_row* const* rows, int heads) {
  const int parts = precision == operand_precision::int16 ? 2 : 1;
  const const_tile_view keys{group.keys, format.key_layout()};
  const const_tile_view values{group.values, format.value_layout()};
  alignas(64) std::int32_t sums[max_columns][sum_stride];
  alignas(64) float scores[heads_at_once][max_group];
  alignas(64) float scale[max_head_dim];
  folded_heads operands;
  const float* inputs[heads_at_once];
  int last = 0;
  for (int h = 0; h < heads; ++h) {
    inputs[h] = rows[h]->query;
    const visible_range visible(*rows[h], group.position, group.count);
    if (last < visible.end) last = visible.end;
  }

  const int scored = (last + 15) / 16 * 16;
  fold_heads<false>(keys, inputs, nullptr, heads, precision, operations, operands, nullptr);
  prefetch_rest(next.keys, keys.layout);
  operations.sum(keys, 0, scored, next.keys - keys.data, operands, parts * heads, sums);
  for (int t = 0; t < scored; t += 16)
    store(scale + t, decode_scales(keys.data + keys.layout.scale_offset() + t, format.scale));
  f32 lanes[heads_at_once];
  float maximum[heads_at_once];
  for (int h = 0; h < heads; ++h) {
    if (h % 4 == 0) operations.stay_awake();
    const f32 unit = set1(operands.unit[h]);
    const f32 bias = set1(operands.bias[h]);
    f32 largest = set1(minus_infinity);
    for (int t = 0; t < scored; t += 16) {
      const f32 score = mul(load(scale + t), fma(head_sum(sums, h, parts, t), unit, bias));
      store(scores[h] + t, score);
      largest = max(largest, score);
    }
    const visible_range visible(*rows[h], group.position, group.count);
    if (cap != 0.0f || visible.first > 0 || visible.end < format.group)
      largest = cap_and_mask(scores[h], visible.first, visible.end, format.group, cap);
    lanes[h] = largest;
  }
  for (int h = 0; h < heads; ++h) {
    maximum[h] = max_lane(lanes[h]);
    inputs[h] = scores[h];
  }

  float weights[heads_at_once];
  fold_heads<true>(values, inputs, maximum, heads, precision, operations, operands, weights);
  prefetch_rest(next.values, values.layout);
  const int dim = format.value_head_dim;
  for (int d = 0; d < dim; d += 16)
    store(scale + d, decode_scales(values.data + values.layout.scale_offset() + d, format.scale));
  float rescale[heads_at_once];
  for (int h = 0; h < heads; ++h) {
    attention_row& row = *rows[h];
    const softmax_join join = join_maxima(row.maximum, maximum[h]);
    row.maximum = join.maximum;
    row.sum = std::fma(row.sum, join.first, weights[h] * join.second);
    rescale[h] = join.first;
    operands.unit[h] = operands.unit[h] * join.second;
    operands.bias[h] = operands.bias[h] * join.second;
  }
  for (int first = 0; first < dim; first += sum_rows_at_once) {
    const int count = dim - first < sum_rows_at_once ? dim - first : sum_rows_at_once;
    operations.sum(values, first, count, next.values - values.data, operands, parts * heads, sums);
    for (int h = 0; h < heads; ++h) {
      if (h % 4 == 0) operations.stay_awake();
      const f32 factor = set1(rescale[h]);
      const f32 unit = set1(operands.unit[h]);
      const f32 bias = set1(operands.bias[h]);
      float* const out = rows[h]->values + first;
      for (int d = 0; d < count; d += 16) {
        const f32 sum = fma(head_sum(sums, h, parts, d), unit, bias);
        store(out + d, fma(load(out + d), factor, mul(load(scale + first + d), sum)));
      }
    }
  }
}

// As scalar::attend_sealed, with the sums of codes by `operations`.
inline void attend_sealed_by(const sum_operations& operations, const cache_format& format,
                             const sealed_run& run, float cap, operand_precision precision,
                             attention_row* rows, int row_count) {
  for (std::size_t g = 0; g < run.count; ++g) {
    const sealed_group& group = run.groups[g];
    const sealed_group& next = g + 1 < run.count          ? run.groups[g + 1]
                               : run.following != nullptr ? *run.following
                                                          : group;
    attention_row* seeing[heads_at_once];
    int heads = 0;
    for (int row = 0; row < row_count; ++row) {
      if (!visible_range(rows[row], group.position, group.count).empty())
        seeing[heads++] = rows + row;
      if (heads == heads_at_once || (heads > 0 && row == row_count - 1)) {
        attend_group(format, group, next, cap, precision, operations, seeing, heads);
        heads = 0;
      }
    }
  }
}

inline void attend_sealed(const cache_format& format, const sealed_run& run, float cap,
                          operand_precision precision, attention_row* rows, int row_count) {
  attend_sealed_by({&code_sums::sum}, format, run, cap, precision, rows, row_count);
}

// Sixteen channels of a token as floats.
template <class T>
KVARN_NOINLINE f32 gather_channels(tokens_view<const T> tokens, int token, int channel) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = tokens.load(token, channel + i);
  return load(x);
}
template <class T>
KVARN_ALWAYS_INLINE f32 load_channels(tokens_view<const T> tokens, int token, int channel) {
  return tokens.channel_stride == 1
             ? load_channels(tokens.data + token * tokens.token_stride + channel)
             : gather_channels(tokens, token, channel);
}

// Rows that go through exact tokens together. Fewer are filled up with copies of the first.
inline constexpr int exact_rows = 4;

// Prefetches four tokens where their channels are next to one another.
template <class T>
KVARN_ALWAYS_INLINE void prefetch_tokens(tokens_view<const T> tokens, int first, int head_dim) {
  if (tokens.channel_stride != 1) return;
  const auto bytes = static_cast<std::size_t>(head_dim) * sizeof(T);
  for (int t = first; t < first + 4; ++t) {
    const T* const row = tokens.data + t * tokens.token_stride;
    for (std::size_t i = 0; i < bytes; i += cache_line)
      prefetch(reinterpret_cast<const std::byte*>(row) + i);
  }
}

inline constexpr int tokens_ahead = 16;  // of which keys are prefetched

// Inner products of the queries with the keys of tokens 0 .. count - 1 from `start` on. Prefetches
// the keys that follow, and the values of the same tokens, which are read next.
template <class T>
void score_exact(const cache_format& format, const exact_tokens<T>& tokens, int start, int count,
                 const float* const* queries, float (*scores)[exact_block]) {
  const tokens_view<const T> keys = tokens.keys;
  const int head_dim = format.key_head_dim;
  for (int t = 0; t < count; t += 4) {
    if (start + t + tokens_ahead + 4 <= tokens.count)
      prefetch_tokens(keys, start + t + tokens_ahead, head_dim);
    if (t + 4 <= count) prefetch_tokens(tokens.values, start + t, format.value_head_dim);
    f32 sums[4 * exact_rows];
    KVARN_UNROLL
    for (f32& sum : sums) sum = set1(0.0f);
    for (int d = 0; d < head_dim; d += 16) KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int token = t + i < count ? t + i : count - 1;
      const f32 key = load_channels(keys, start + token, d);
      KVARN_UNROLL
      for (int h = 0; h < exact_rows; ++h)
        sums[4 * h + i] = fma(load(queries[h] + d), key, sums[4 * h + i]);
    }
    alignas(64) float totals[16];
    store(totals, fold_each(sums));
    for (std::ptrdiff_t h = 0; h < exact_rows; ++h) std::memcpy(scores[h] + t, totals + 4 * h, 16);
  }
}

// values[h] = sum over tokens first .. end - 1, in order, of weights[h][t] times the token's
// values.
template <class T>
void sum_exact(tokens_view<const T> tokens, int start, int first, int end, int dim,
               const float (*weights)[exact_block], float (*values)[max_head_dim]) {
  for (int d = 0; d < dim; d += 16) {
    f32 sums[exact_rows];
    KVARN_UNROLL
    for (f32& sum : sums) sum = set1(0.0f);
    for (int t = first; t < end; ++t) {
      const f32 value = load_channels(tokens, start + t, d);
      KVARN_UNROLL
      for (int h = 0; h < exact_rows; ++h) sums[h] = fma(set1(weights[h][t]), value, sums[h]);
    }
    KVARN_UNROLL
    for (int h = 0; h < exact_rows; ++h) store(values[h] + d, sums[h]);
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

// Takes `count` tokens from `start` on, at most exact_block, into rows that see the same of them.
template <class T>
void attend_exact_block(const cache_format& format, const exact_tokens<T>& tokens, int start,
                        int count, float cap, attention_row* rows, int row_count) {
  const visible_range visible(rows[0], tokens.position + start, count);
  if (visible.empty()) return;
  alignas(64) float scores[exact_rows][exact_block];
  alignas(64) float values[exact_rows][max_head_dim];
  const float* queries[exact_rows];
  for (int h = 0; h < exact_rows; ++h) queries[h] = rows[h < row_count ? h : 0].query;
  score_exact(format, tokens, start, count, queries, scores);
  attention_row parts[exact_rows];
  const int padded = (count + 15) / 16 * 16;
  for (int h = 0; h < exact_rows; ++h) {
    parts[h].values = values[h];
    const f32 largest = cap_and_mask(scores[h], visible.first, visible.end, padded, cap);
    parts[h].maximum = max_lane(largest);
    parts[h].sum = fold(weigh(scores[h], parts[h].maximum, padded));
  }
  sum_exact(tokens.values, start, visible.first, visible.end, format.value_head_dim, scores,
            values);
  for (int h = 0; h < row_count; ++h) join_row(rows[h], parts[h], format.value_head_dim);
}

// As scalar::attend_exact.
template <class T>
void attend_exact(const cache_format& format, const exact_tokens<T>& tokens, float cap,
                  attention_row* rows, int row_count) {
  for (int start = 0; start < tokens.count; start += exact_block) {
    const int left = tokens.count - start;
    const int count = left < exact_block ? left : exact_block;
    for (int row = 0; row < row_count;) {
      int together = 1;
      while (together < exact_rows && row + together < row_count &&
             rows[row + together].first_visible == rows[row].first_visible &&
             rows[row + together].end_visible == rows[row].end_visible)
        ++together;
      attend_exact_block(format, tokens, start, count, cap, rows + row, together);
      row += together;
    }
  }
}

// As scalar::prepare_query.
template <class T>
void prepare_query(tokens_view<T> queries, int index, int head_dim,
                   const attention_options& options, float* query) {
  replaced_values replaced;
  const tokens_view<const std::remove_const_t<T>> read{queries.data, queries.token_stride,
                                                       queries.channel_stride};
  const token_rows<float> loaded = load_rows(read, index, 1, head_dim, query, replaced);
  const float unit = options.softmax_scale * log2_e;
  if (!options.queries_rotated)
    return rotate_vector(loaded.x, query, head_dim, unit * hadamard_norm(head_dim));
  for (int d = 0; d < head_dim; d += 16) store(query + d, mul(load(loaded.x + d), set1(unit)));
}

// As scalar::join_sink_logit.
inline void join_sink_logit(attention_row& row, float logit, int dim) {
  const softmax_join join = join_maxima(row.maximum, rounded(logit * log2_e));
  row.maximum = join.maximum;
  row.sum = std::fma(row.sum, join.first, join.second);
  for (int d = 0; d < dim; d += 16)
    store(row.values + d, mul(load(row.values + d), set1(join.first)));
}

// As scalar::finish_row.
template <class T>
void finish_row(const attention_row& row, int dim, bool rotate, tokens_view<T> out, int index) {
  float norm = row.maximum == minus_infinity ? 0.0f : 1.0f / row.sum;
  if (rotate)
    rotate_vector(row.values, row.values, dim, norm * hadamard_norm(dim));
  else
    for (int d = 0; d < dim; d += 16) store(row.values + d, mul(load(row.values + d), set1(norm)));
  store_tokens(row.values, dim, index, 1, out);
}
