// Dual-axis variance normalisation, written once; included inside the region and namespace of each
// instruction set. The definition: codec/variance_normalize.hpp.
//
// The tile is column-major here: a lane is a row, sums over the columns of a row need no shuffle,
// and those over the rows of a column are reduced 16 columns at a time. An iteration is one sweep:
// the sums of 16 columns, their new weights, and at once the contributions of these columns, which
// are still in the L1 cache, to the sums of the rows.

// fold() joins lanes 0 and 8, 4 and 12, then both pairs, and so on. With the columns lane by lane
// in this order, the second lane of a pair is joined to the first as soon as it is complete.
inline constexpr int fold_order[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

// Sums over the columns of each row, `rows` floats each: of the pairs of lanes in fold_order, then
// of the lane in progress.
inline constexpr int lane_pairs = 8;
struct row_sums {
  float* sum;
  float* squares;
};
constexpr int row_sum_floats(int rows) { return 2 * (lane_pairs + 1) * rows; }

// The folded sums of the row vector at r.
KVARN_ALWAYS_INLINE f32 fold_pairs(const float* sums, int rows, int r) {
  f32 s[lane_pairs];
  KVARN_UNROLL
  for (std::ptrdiff_t i = 0; i < lane_pairs; ++i) s[i] = load(sums + rows * i + r);
  return add(add(add(s[0], s[1]), add(s[2], s[3])), add(add(s[4], s[5]), add(s[6], s[7])));
}

// A run of columns of one lane, in fold_order.
struct column_run {
  const float* const* column;
  const float* weight;
  int count;
  const float* sum_before;  // null for zeros
  const float* squares_before;
  const float* sum_beside;  // of the other lane of the pair, or null
  const float* squares_beside;
  float* sum;
  float* squares;
};

KVARN_NOINLINE void fill(float* x, int n, float value) {
  for (int i = 0; i < n; i += 16) store(x + i, set1(value));
}

// What a tile is normalised with; columns are in fold_order.
struct normalize_state {
  alignas(64) float row_scale[max_head_dim];
  alignas(64) float row_weight[max_head_dim];
  alignas(64) float row_std[max_head_dim];
  alignas(64) float row_shift[max_head_dim];
  alignas(64) float row_squares[max_head_dim];
  alignas(64) float best_row[max_head_dim];
  alignas(64) float col_scale[max_head_dim];
  alignas(64) float col_weight[max_head_dim];
  alignas(64) float col_shift[max_head_dim];
  alignas(64) float best_col[max_head_dim];
  const float* column[max_head_dim];
  column_run runs[max_head_dim / 16 + 16];
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
KVARN_NOINLINE float spread_ratio(const spreads& seen) {
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

// fold_each and max_each, out of line.
KVARN_NOINLINE f32 fold_columns(const f32 (&r)[16]) { return fold_each(r); }
KVARN_NOINLINE f32 max_of_columns(const f32 (&r)[16]) { return max_each(r); }

struct column_major_tile {
  const float* x;  // column c at x + column_stride(rows) * c
  int rows;
  int cols;
  float unit;
};

// Floats from a column to the next: an odd number of cache lines, so that columns 16 apart do not
// compete for the same sets of the L1 cache (without that the paper's encoder takes 1.6 times as
// long).
constexpr std::ptrdiff_t column_stride(int rows) { return std::ptrdiff_t{16} * ((rows / 16) | 1); }

// Of 16 columns, the sums over the rows of d = x * row_weight - shift and of d^2, each still in 16
// lanes.
struct column_sums_in_lanes {
  f32 sum[16];
  f32 squares[16];
};

// Also fetches the columns `next` into the L1 cache. Out of line, as add_run.
KVARN_NOINLINE void sum_over_rows(const float* const* column, const float* const* next, int rows,
                                  const float* row_weight, const float* shift,
                                  column_sums_in_lanes& out) {
  for (int first = 0; first < 16; first += 4) {
    f32 sums[4];
    f32 squares[4];
    f32 k[4];
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      sums[i] = squares[i] = set1(0.0f);
      k[i] = set1(shift[first + i]);
    }
    for (int r = 0; r < rows; r += 16) {
      const f32 weight = load(row_weight + r);
      KVARN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const f32 d = fms(load(column[first + i] + r), weight, k[i]);
        sums[i] = add(sums[i], d);
        squares[i] = fma(d, d, squares[i]);
        prefetch(reinterpret_cast<const std::byte*>(next[first + i] + r));
      }
    }
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      out.sum[first + i] = sums[i];
      out.squares[first + i] = squares[i];
    }
  }
}

// Adds a run to the sums of Count vectors of rows from r on.
template <int Count>
KVARN_ALWAYS_INLINE void add_run(const column_run& run, int r, const float* row_shift) {
  f32 s[Count];
  f32 q[Count];
  f32 shift[Count];
  KVARN_UNROLL
  for (std::ptrdiff_t i = 0; i < Count; ++i) {
    shift[i] = load(row_shift + r + 16 * i);
    s[i] = q[i] = set1(0.0f);
    if (run.sum_before != nullptr) {
      s[i] = load(run.sum_before + r + 16 * i);
      q[i] = load(run.squares_before + r + 16 * i);
    }
  }
  for (int k = 0; k < run.count; ++k) {
    const f32 weight = set1(run.weight[k]);
    KVARN_UNROLL
    for (std::ptrdiff_t i = 0; i < Count; ++i) {
      const f32 d = fms(load(run.column[k] + r + 16 * i), weight, shift[i]);
      s[i] = add(s[i], d);
      q[i] = fma(d, d, q[i]);
    }
  }
  KVARN_UNROLL
  for (std::ptrdiff_t i = 0; i < Count; ++i) {
    if (run.sum_beside != nullptr) {
      s[i] = add(load(run.sum_beside + r + 16 * i), s[i]);
      q[i] = add(load(run.squares_beside + r + 16 * i), q[i]);
    }
    store(run.sum + r + 16 * i, s[i]);
    store(run.squares + r + 16 * i, q[i]);
  }
}

// Out of line, so that g++ 12 keeps the sums in registers.
KVARN_NOINLINE void add_run(const column_run& run, int rows, const float* row_shift) {
  int r = 0;
  for (; r + 64 <= rows; r += 64) add_run<4>(run, r, row_shift);
  for (; r < rows; r += 16) add_run<1>(run, r, row_shift);
}

// Cuts the columns into runs that end with each lane and after every 16 columns.
KVARN_NOINLINE void make_runs(normalize_state& state, int rows, int cols) {
  const int per_lane = cols / 16;
  const int in_progress = lane_pairs * rows;
  column_run* run = state.runs;
  int within = 0;
  int lane = 0;
  for (int position = 0; position < cols; position += run[-1].count) {
    const int left = per_lane - within;
    const int left_of_16 = 16 - position % 16;
    const bool ends = left <= left_of_16;
    const int pair = rows * (lane / 2);
    const int to = ends ? pair : in_progress;
    const bool begins = within == 0;
    const bool joins = ends && lane % 2 != 0;
    const row_sums& sums = state.sums;
    *run++ = {state.column + position,
              state.col_weight + position,
              ends ? left : left_of_16,
              begins ? nullptr : sums.sum + in_progress,
              begins ? nullptr : sums.squares + in_progress,
              joins ? sums.sum + pair : nullptr,
              joins ? sums.squares + pair : nullptr,
              sums.sum + to,
              sums.squares + to};
    within = ends ? 0 : within + left_of_16;
    if (ends) ++lane;
  }
}

// What a sweep does: the sums of the columns, the change of their scales, the sums of the rows.
struct sweep {
  bool columns;
  bool scales;
  bool rows;
};

// One sweep. `spread` receives that of the columns.
KVARN_NOINLINE void sweep_tile(const column_major_tile& tile, sweep what, float low, float high,
                               bool skip_zero, normalize_state& state, spreads& spread) {
  column_sums_in_lanes sums;
  const column_run* run = state.runs;
  for (int position = -16; position < tile.cols; position += 16) {
    if (what.columns && position >= 0) {
      const auto m = moments_about(load(state.col_shift + position), fold_columns(sums.sum),
                                   fold_columns(sums.squares), tile.rows, tile.unit);
      f32 std = m.std;
      if (what.scales) {
        const f32 weighted = mul(m.std, load(state.col_weight + position));
        const f32 clamped = clamp(weighted, kvarn::detail::min_std, kvarn::detail::max_std);
        const f32 scale = clamp(mul(load(state.col_scale + position), clamped), low, high);
        const f32 weight = div(set1(1.0f), scale);
        store(state.col_scale + position, scale);
        store(state.col_weight + position, weight);
        std = mul(m.std, weight);
        if (position == 0)
          for (int r = 0; r < tile.rows; r += 16)
            store(state.row_shift + r, mul(load(state.column[0] + r), set1(state.col_weight[0])));
      }
      add_spread(spread, std, skip_zero);
    }
    // The sums of the next columns come before the rows: they fill the time that the square roots
    // and divisions above take.
    const int next = position + 16;
    if (what.columns && next < tile.cols)
      sum_over_rows(state.column + next, state.column + (next + 16 < tile.cols ? next + 16 : 0),
                    tile.rows, state.row_weight, state.col_shift + next, sums);
    if (what.rows && position >= 0)
      for (int end = 0; end < 16; ++run) {
        add_run(*run, tile.rows, state.row_shift);
        end += run->count;
      }
  }
}

// The moments of the rows from their sums about row_shift, which becomes their mean.
KVARN_NOINLINE void find_row_moments(const column_major_tile& tile, normalize_state& state) {
  for (int r = 0; r < tile.rows; r += 16) {
    const auto m =
        moments_about(load(state.row_shift + r), fold_pairs(state.sums.sum, tile.rows, r),
                      fold_pairs(state.sums.squares, tile.rows, r), tile.cols, tile.unit);
    store(state.row_std + r, m.std);
    store(state.row_shift + r, m.mean);
    store(state.row_squares + r, m.squares);
  }
}

// The first row under the row weights is where the sums of the columns start.
KVARN_NOINLINE void shift_columns(const column_major_tile& tile, normalize_state& state) {
  for (int c = 0; c < tile.cols; ++c)
    state.col_shift[c] = rounded(state.column[c][0] * state.row_weight[0]);
}

// kvarn::detail::overall_std.
KVARN_NOINLINE float overall_std(const float* mean, const float* squares, int rows, int cols,
                                 float unit) {
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
KVARN_NOINLINE normalize_report normalize_columns(const column_major_tile& tile,
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
      state.column[lane * per_lane + i] =
          tile.x + column_stride(rows) * (fold_order[lane] + 16 * i);
  make_runs(state, rows, cols);
  fill(state.col_scale, cols, 1.0f);
  fill(state.col_weight, cols, 1.0f);
  fill(state.row_scale, rows, 1.0f);
  fill(state.row_weight, rows, 1.0f);
  shift_columns(tile, state);
  std::memcpy(state.row_shift, tile.x, sizeof(float) * static_cast<std::size_t>(rows));
  spreads columns = no_spread();
  // The row weights, which the columns of the start of an equivariant one need, come from the rows.
  sweep_tile(tile, {!equivariant, false, true}, low, high, equivariant, state, columns);
  find_row_moments(tile, state);
  float tile_std = 1.0f;
  if (equivariant) {
    tile_std = overall_std(state.row_shift, state.row_squares, rows, cols, tile.unit);
    if (!(tile_std >= least_magnitude)) tile_std = 1.0f;  // a constant tile
  }
  const float inverse_tile_std = 1.0f / tile_std;
  fill(state.row_weight, rows, inverse_tile_std);
  if (equivariant) {
    shift_columns(tile, state);
    sweep_tile(tile, {true, false, false}, low, high, equivariant, state, columns);
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
      std::memcpy(state.best_row, state.row_scale, sizeof(state.best_row));
      std::memcpy(state.best_col, state.col_scale, sizeof(state.best_col));
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
    shift_columns(tile, state);
    columns = no_spread();
    sweep_tile(tile, {true, true, true}, low, high, equivariant, state, columns);
    column_ratio = spread_ratio(columns);
    find_row_moments(tile, state);
  }
  for (int r = 0; r < rows; r += 16)
    store(state.best_row + r, mul(load(state.best_row + r), set1(tile_std)));
  return report;
}

// The first whole vector of a workspace.
KVARN_ALWAYS_INLINE float* aligned(float* p) {
  constexpr std::size_t bytes = alignment_floats * sizeof(float);
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  return p + (bytes - address % bytes) % bytes / sizeof(float);
}

// Floats of workspace of variance_normalize: the tile, column-major and aligned, and row_sums.
constexpr std::size_t normalize_workspace(int rows, int cols) {
  return static_cast<std::size_t>(column_stride(rows) * cols + row_sum_floats(rows)) +
         alignment_floats;
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
      transpose_block(x + r * cols + c, cols, columns + c * column_stride(rows) + r,
                      column_stride(rows));
  normalize_state state;
  float* const sums = columns + column_stride(rows) * cols;
  state.sums = {sums, sums + row_sum_floats(rows) / 2};
  const column_major_tile tile{columns, rows, cols, unit};
  const normalize_report report = normalize_columns(tile, options, state);
  for (int r = 0; r < rows; r += 16) store(row_scale + r, load(state.best_row + r));
  for (int c = 0; c < cols; ++c)
    col_scale[(state.column[c] - columns) / column_stride(rows)] = state.best_col[c];
  return report;
}
