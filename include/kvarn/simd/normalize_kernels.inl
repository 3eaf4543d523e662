// Dual-axis variance normalisation, written once; included inside the region and namespace of each
// instruction set. The definition: codec/variance_normalize.hpp.
//
// The tile is column-major here: a lane is a row, sums over the columns of a row need no shuffle,
// and those over the rows of a column are reduced 16 columns at a time. An iteration is one sweep:
// the sums of 16 columns, their new weights, and at once the contributions of these columns, which
// are still in the L1 cache, to the sums of the rows.

// fold() joins lanes 0 and 8, 4 and 12, then both pairs, and so on. Columns that are taken lane by
// lane in this order need a stack of partial sums instead of one sum per lane and row.
inline constexpr int fold_order[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
inline constexpr int fold_levels = 5;

// Sums over the columns of each row, with columns in fold_order.
struct row_sums {
  // Level k < 4 holds joined sums of 2^k lanes, level 4 the result, level 5 the lane in progress.
  alignas(64) float sum[fold_levels + 1][max_head_dim];
  alignas(64) float squares[fold_levels + 1][max_head_dim];
};

// What a tile is normalised with; columns are in fold_order.
struct normalize_state {
  alignas(64) float row_scale[max_head_dim];
  alignas(64) float row_weight[max_head_dim];
  alignas(64) float row_std[max_head_dim];
  alignas(64) float row_shift[max_head_dim];
  alignas(64) float best_row[max_head_dim];
  alignas(64) float col_scale[max_head_dim];
  alignas(64) float col_weight[max_head_dim];
  alignas(64) float col_shift[max_head_dim];
  alignas(64) float best_col[max_head_dim];
  int column[max_head_dim];  // which one stands at each position
  row_sums sums;
};

// kvarn::detail::spread of 16 at a time.
struct spreads {
  f32 largest;
  f32 smallest;
};
KVARN_ALWAYS_INLINE spreads no_spread() { return {set1(0.0f), set1(0x1p126f)}; }
KVARN_ALWAYS_INLINE void add_spread(spreads& seen, f32 std, bool skip_zero) {
  seen.largest = max(seen.largest, std);
  const f32 counted = select_less(set1(0.0f), std, std, set1(0x1p126f));
  seen.smallest = min(seen.smallest, skip_zero ? counted : std);
}
KVARN_ALWAYS_INLINE float spread_ratio(const spreads& seen) {
  const float largest = max_lane(seen.largest);
  const float smallest = min_lane(seen.smallest);
  return largest < smallest ? 1.0f : largest / max_of(smallest, 1e-8f);
}

// kvarn::detail::moments_about of 16 at a time, n >= 2.
struct moment_vectors {
  f32 mean;
  f32 squares;
  f32 std;
};
KVARN_ALWAYS_INLINE moment_vectors moments_about(f32 shift, f32 sum, f32 squares, int n,
                                                 float unit) {
  const f32 inverse_n = set1(1.0f / static_cast<float>(n));
  moment_vectors m;
  m.mean = fma(sum, inverse_n, shift);
  m.squares = max(fnma(mul(sum, inverse_n), sum, squares), set1(0.0f));
  const f32 inverse_degrees = set1(1.0f / static_cast<float>(n - 1));
  m.std = mul(sqrt(mul(m.squares, inverse_degrees)), set1(unit));
  return m;
}

KVARN_ALWAYS_INLINE f32 clamp(f32 x, float low, float high) {
  return min(max(x, set1(low)), set1(high));
}

struct column_major_tile {
  const float* x;  // column c at x + rows * c
  int rows;
  int cols;
  float unit;
};

// Of 16 columns, the sums over the rows of d = x * row_weight - shift, and of d^2; one a lane.
KVARN_ALWAYS_INLINE void sum_over_rows(const float* const (&column)[16], int rows,
                                       const float* row_weight, const float* shift, f32& sum,
                                       f32& squares) {
  f32 s[16];
  f32 q[16];
  for (int first = 0; first < 16; first += 4) {
    f32 sums[4];
    f32 squared[4];
    f32 k[4];
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      sums[i] = squared[i] = set1(0.0f);
      k[i] = set1(shift[first + i]);
    }
    for (int r = 0; r < rows; r += 16) {
      const f32 weight = load(row_weight + r);
      KVARN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const f32 d = fms(load(column[first + i] + r), weight, k[i]);
        sums[i] = add(sums[i], d);
        squared[i] = fma(d, d, squared[i]);
      }
    }
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      s[first + i] = sums[i];
      q[first + i] = squared[i];
    }
  }
  sum = fold_each(s);
  squares = fold_each(q);
}

// Joins the finished sum of the lane-th lane in fold_order, of the row vector at `r`.
KVARN_ALWAYS_INLINE void push_lane(float (*levels)[max_head_dim], int r, int lane, f32 sum) {
  int level = 0;
  for (; ((lane >> level) & 1) != 0; ++level) sum = add(load(levels[level] + r), sum);
  store(levels[level] + r, sum);
}

// Adds 16 columns, from `position` on, to the sums of Count vectors of rows.
template <int Count>
KVARN_ALWAYS_INLINE void sum_over_columns(const float* const (&column)[16], int position,
                                          int per_lane, int r, const float* col_weight,
                                          const float* row_shift, row_sums& sums) {
  f32 s[Count];
  f32 q[Count];
  f32 shift[Count];
  int lane = position / per_lane;
  int left = per_lane - position % per_lane;
  KVARN_UNROLL
  for (int i = 0; i < Count; ++i) {
    shift[i] = load(row_shift + r + 16 * i);
    s[i] = q[i] = set1(0.0f);
    if (left != per_lane) {
      s[i] = load(sums.sum[fold_levels] + r + 16 * i);
      q[i] = load(sums.squares[fold_levels] + r + 16 * i);
    }
  }
  for (int k = 0; k < 16;) {
    const int end = k + left < 16 ? k + left : 16;
    left -= end - k;
    for (; k < end; ++k) {
      const f32 weight = set1(col_weight[k]);
      KVARN_UNROLL
      for (int i = 0; i < Count; ++i) {
        const f32 d = fms(load(column[k] + r + 16 * i), weight, shift[i]);
        s[i] = add(s[i], d);
        q[i] = fma(d, d, q[i]);
      }
    }
    if (left == 0) {
      KVARN_UNROLL
      for (int i = 0; i < Count; ++i) {
        push_lane(sums.sum, r + 16 * i, lane, s[i]);
        push_lane(sums.squares, r + 16 * i, lane, q[i]);
        s[i] = q[i] = set1(0.0f);
      }
      ++lane;
      left = per_lane;
    }
  }
  if (left != per_lane) {
    KVARN_UNROLL
    for (int i = 0; i < Count; ++i) {
      store(sums.sum[fold_levels] + r + 16 * i, s[i]);
      store(sums.squares[fold_levels] + r + 16 * i, q[i]);
    }
  }
}

enum class sweep { start_rows, start_columns, start, iterate };

// One sweep. `start`: the moments of the start, or of it on one axis, without a change of scales.
// `columns` receives the spread of the columns.
template <sweep Kind>
KVARN_ALWAYS_INLINE void sweep_tile(const column_major_tile& tile, float low, float high,
                                    bool skip_zero, normalize_state& state, spreads& columns) {
  for (int position = 0; position < tile.cols; position += 16) {
    const float* column[16];
    for (int k = 0; k < 16; ++k)
      column[k] = tile.x + std::ptrdiff_t{tile.rows} * state.column[position + k];
    if constexpr (Kind != sweep::start_rows) {
      f32 sum;
      f32 squares;
      sum_over_rows(column, tile.rows, state.row_weight, state.col_shift + position, sum, squares);
      const auto m =
          moments_about(load(state.col_shift + position), sum, squares, tile.rows, tile.unit);
      store(state.col_shift + position, m.mean);
      if constexpr (Kind == sweep::iterate) {
        const f32 weighted = mul(m.std, load(state.col_weight + position));
        const f32 std = clamp(weighted, kvarn::detail::min_std, kvarn::detail::max_std);
        const f32 scale = clamp(mul(load(state.col_scale + position), std), low, high);
        const f32 weight = div(set1(1.0f), scale);
        store(state.col_scale + position, scale);
        store(state.col_weight + position, weight);
        add_spread(columns, mul(m.std, weight), skip_zero);
      } else {
        add_spread(columns, m.std, skip_zero);
      }
    }
    if constexpr (Kind != sweep::start_columns) {
      const int per_lane = tile.cols / 16;
      int r = 0;
      for (; r + 64 <= tile.rows; r += 64)
        sum_over_columns<4>(column, position, per_lane, r, state.col_weight + position,
                            state.row_shift, state.sums);
      for (; r < tile.rows; r += 16)
        sum_over_columns<1>(column, position, per_lane, r, state.col_weight + position,
                            state.row_shift, state.sums);
    }
  }
}

// kvarn::detail::overall_std.
inline float overall_std(const float* mean, const float* squares, int rows, int cols, float unit) {
  const auto n = static_cast<float>(cols);
  f32 sums = set1(0.0f);
  f32 within = set1(0.0f);
  for (int r = 0; r < rows; r += 16) {
    const f32 deviation = sub(load(mean + r), set1(mean[0]));
    sums = add(sums, deviation);
    within = add(within, fma(mul(deviation, set1(n)), deviation, load(squares + r)));
  }
  const float sum = fold(sums);
  const float ratio = n / static_cast<float>(rows);
  const float total = max_of(std::fma(-(sum * ratio), sum, fold(within)), 0.0f);
  const float count = rounded(static_cast<float>(rows) * n);
  return std::sqrt(total * (1.0f / (count - 1.0f))) * unit;
}

// kvarn::variance_normalize of a column-major tile; rows and cols are multiples of 16 and at most
// max_head_dim. Leaves row_scale in state.best_row and col_scale, in fold_order, in state.best_col.
inline normalize_report normalize_columns(const column_major_tile& tile,
                                          const normalize_options& options,
                                          normalize_state& state) {
  const int rows = tile.rows;
  const int cols = tile.cols;
  const bool equivariant = options.scale_equivariant;
  const float low =
      equivariant ? kvarn::detail::min_equivariant_scale : kvarn::detail::min_paper_scale;
  const float high =
      equivariant ? kvarn::detail::max_equivariant_scale : kvarn::detail::max_paper_scale;

  const int per_lane = cols / 16;
  for (int lane = 0; lane < 16; ++lane)
    for (int i = 0; i < per_lane; ++i)
      state.column[lane * per_lane + i] = fold_order[lane] + 16 * i;
  for (int c = 0; c < cols; c += 16) {
    store(state.col_scale + c, set1(1.0f));
    store(state.col_weight + c, set1(1.0f));
  }
  for (int c = 0; c < cols; ++c)
    state.col_shift[c] = tile.x[std::ptrdiff_t{rows} * state.column[c]];
  for (int r = 0; r < rows; r += 16) {
    store(state.row_scale + r, set1(1.0f));
    store(state.row_weight + r, set1(1.0f));
    store(state.row_shift + r, load(tile.x + r));
  }
  spreads columns = no_spread();
  if (equivariant)
    sweep_tile<sweep::start_rows>(tile, low, high, equivariant, state, columns);
  else
    sweep_tile<sweep::start>(tile, low, high, equivariant, state, columns);
  for (int r = 0; r < rows; r += 16) {
    const auto m = moments_about(load(state.row_shift + r), load(state.sums.sum[4] + r),
                                 load(state.sums.squares[4] + r), cols, tile.unit);
    store(state.row_std + r, m.std);
    store(state.row_shift + r, m.mean);
    store(state.row_weight + r, m.squares);
  }
  float tile_std = 1.0f;
  if (equivariant) {
    tile_std = overall_std(state.row_shift, state.row_weight, rows, cols, tile.unit);
    if (!(tile_std >= 0x1p-100f)) tile_std = 1.0f;  // a constant tile
  }
  const float inverse_tile_std = 1.0f / tile_std;
  for (int r = 0; r < rows; r += 16) store(state.row_weight + r, set1(inverse_tile_std));
  if (equivariant) {
    for (int c = 0; c < cols; c += 16)
      store(state.col_shift + c, mul(load(state.col_shift + c), set1(inverse_tile_std)));
    sweep_tile<sweep::start_columns>(tile, low, high, equivariant, state, columns);
  }
  float column_ratio = spread_ratio(columns);

  normalize_report report;
  for (int iteration = 0;; ++iteration) {
    spreads row_spread = no_spread();
    for (int r = 0; r < rows; r += 16) {
      const f32 std = mul(load(state.row_std + r), load(state.row_weight + r));
      store(state.row_std + r, std);
      add_spread(row_spread, std, equivariant);
    }
    const float imbalance = spread_ratio(row_spread) + column_ratio;
    if (iteration == 0 || imbalance <= report.imbalance) {  // ties take the newer
      report.best = iteration;
      report.imbalance = imbalance;
      for (int r = 0; r < rows; r += 16) store(state.best_row + r, load(state.row_scale + r));
      for (int c = 0; c < cols; c += 16) store(state.best_col + c, load(state.col_scale + c));
    }
    if (iteration == options.iterations) break;
    report.iterations = iteration + 1;

    for (int r = 0; r < rows; r += 16) {
      const f32 std =
          clamp(load(state.row_std + r), kvarn::detail::min_std, kvarn::detail::max_std);
      const f32 scale = clamp(mul(load(state.row_scale + r), std), low, high);
      store(state.row_scale + r, scale);
      store(state.row_weight + r, mul(div(set1(1.0f), scale), set1(inverse_tile_std)));
    }
    columns = no_spread();
    sweep_tile<sweep::iterate>(tile, low, high, equivariant, state, columns);
    column_ratio = spread_ratio(columns);
    for (int r = 0; r < rows; r += 16) {
      const auto m = moments_about(load(state.row_shift + r), load(state.sums.sum[4] + r),
                                   load(state.sums.squares[4] + r), cols, tile.unit);
      store(state.row_std + r, m.std);
      store(state.row_shift + r, m.mean);
    }
  }
  for (int r = 0; r < rows; r += 16)
    store(state.best_row + r, mul(load(state.best_row + r), set1(tile_std)));
  return report;
}

// Copies 16 x 16 numbers, transposed: row i at `in` + stride * i to out + out_stride * column.
KVARN_ALWAYS_INLINE void transpose_block(const float* in, std::ptrdiff_t stride, float* out,
                                         std::ptrdiff_t out_stride) {
  f32 r[16];
  KVARN_UNROLL
  for (int i = 0; i < 16; ++i) r[i] = load(in + stride * i);
  transpose(r);
  KVARN_UNROLL
  for (int i = 0; i < 16; ++i) store(out + out_stride * i, r[i]);
}

KVARN_ALWAYS_INLINE float* aligned(float* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  return p + (64 - address % 64) % 64 / sizeof(float);
}

// As kvarn::variance_normalize. Fast for multiples of 16 up to max_head_dim.
inline normalize_report variance_normalize(const float* x, int rows, int cols, float unit,
                                           const normalize_options& options, float* row_scale,
                                           float* col_scale, float* workspace) {
  if (rows % 16 != 0 || cols % 16 != 0 || rows > max_head_dim || cols > max_head_dim)
    return kvarn::variance_normalize(x, rows, cols, unit, options, row_scale, col_scale, workspace);
  float* const columns = aligned(workspace);
  for (std::ptrdiff_t r = 0; r < rows; r += 16)
    for (std::ptrdiff_t c = 0; c < cols; c += 16)
      transpose_block(x + r * cols + c, cols, columns + c * rows + r, rows);
  normalize_state state;
  const column_major_tile tile{columns, rows, cols, unit};
  const normalize_report report = normalize_columns(tile, options, state);
  for (int r = 0; r < rows; r += 16) store(row_scale + r, load(state.best_row + r));
  for (int c = 0; c < cols; ++c) col_scale[state.column[c]] = state.best_col[c];
  return report;
}
