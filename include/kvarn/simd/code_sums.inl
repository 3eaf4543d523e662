// Sums of codes times operands by the dot product instructions of a target, written once; included
// inside the region and namespace of each instruction set.
struct code_sums {
  // sums[column][r] = the sum of code * operand of row first + r, exactly, for r < rows, a multiple
  // of 16. Prefetches the bytes `ahead` of the codes it reads.
  static void sum(const_tile_view tile, int first, int rows, std::ptrdiff_t ahead,
                  const folded_heads& operands, int columns, std::int32_t (*sums)[sum_stride]) {
    for (int plane = 0; plane < tile.layout.planes(); ++plane) {
      const plane_rows codes{tile.data + tile.layout.code_offset(plane, first),
                             tile.layout.plane_row_bytes(plane), tile.layout.plane_bits(plane),
                             tile.layout.plane_shift(plane)};
      for (int c = 0; c < columns;) {
        const std::int32_t* const quads = operands.quads[plane][c];
        const int left = columns - c;
        if (max_dot_columns >= 16 && left >= 16)
          c += sum_plane<16>(codes, rows, ahead, quads, sums[c]);
        else if (left >= 8)
          c += sum_plane<8>(codes, rows, ahead, quads, sums[c]);
        else if (left >= 6)
          c += sum_plane<6>(codes, rows, ahead, quads, sums[c]);
        else if (left >= 4)
          c += sum_plane<4>(codes, rows, ahead, quads, sums[c]);
        else if (left >= 2)
          c += sum_plane<2>(codes, rows, ahead, quads, sums[c]);
        else
          c += sum_plane<1>(codes, rows, ahead, quads, sums[c]);
      }
    }
  }

  static constexpr bool falls_asleep = false;

 private:
  // Rows of a plane of codes of `width` bits that are worth 2^shift.
  struct plane_rows {
    const std::byte* codes;
    std::size_t stride;
    int width;
    int shift;
  };

  template <int Columns>
  static int sum_plane(const plane_rows plane, int rows, std::ptrdiff_t ahead,
                       const std::int32_t* quads, std::int32_t* sums) {
    // As many blocks of rows at once as keep enough independent sums in flight.
    constexpr int wanted = dot_accumulators / Columns;
    constexpr int blocks = wanted >= 4 && max_dot_blocks >= 4 ? 4 : wanted >= 2 ? 2 : 1;
    int row = 0;
    for (; row + blocks * rows_at_once <= rows; row += blocks * rows_at_once)
      sum_rows<Columns, blocks>(plane, row, ahead, quads, sums + row);
    if constexpr (blocks * rows_at_once > 16)
      for (; row < rows; row += rows_at_once)
        sum_rows<Columns, 1>(plane, row, ahead, quads, sums + row);
    return Columns;
  }

  // Blocks * rows_at_once rows from `row` on. A plane that is not the first adds to the sums.
  template <int Columns, int Blocks>
  static KVARN_ALWAYS_INLINE void sum_rows(const plane_rows plane, int row, std::ptrdiff_t ahead,
                                           const std::int32_t* quads, std::int32_t* sums) {
    const std::size_t stride = plane.stride;
    const std::byte* const codes = plane.codes + stride * static_cast<std::size_t>(row);
    for (std::size_t i = 0; i < stride * Blocks * rows_at_once; i += cache_line)
      prefetch(codes + ahead + i);

    const code_cutter cutter(plane.width);
    const int shifts = 8 / plane.width;
    const int word_count = static_cast<int>((stride + 3) / 4);
    dot_sum sum[Blocks][Columns];
    clear(sum);
    bool adds = plane.shift != 0;
    [[maybe_unused]] int unflushed = 0;
    const std::int32_t* quad = quads;
    for (int first = 0; first < word_count; first += words_at_once) {
      const int count = word_count - first < words_at_once ? word_count - first : words_at_once;
      words w[Blocks][words_at_once];
      KVARN_UNROLL
      for (int i = 0; i < Blocks; ++i)
        load_words(codes + stride * static_cast<std::size_t>(i * rows_at_once) + 4 * first, stride,
                   w[i]);
      for (int j = 0; j < count; ++j) {
        words word[Blocks];
        KVARN_UNROLL
        for (int i = 0; i < Blocks; ++i) word[i] = w[i][j];
        for (int s = 0; s < shifts; ++s, ++quad) {
          words code[Blocks];
          KVARN_UNROLL
          for (int i = 0; i < Blocks; ++i) code[i] = cutter.cut(word[i], s);
          KVARN_UNROLL
          for (int c = 0; c < Columns; ++c) dot(sum, c, code, quad + c * quad_stride);
        }
        if constexpr (dots_need_flush) {
          unflushed += shifts;
          if (unflushed + shifts > dots_before_flush(plane.width)) {
            store_sums(sum, plane.shift, adds, sums);
            clear(sum);
            adds = true;
            unflushed = 0;
          }
        }
      }
    }
    store_sums(sum, plane.shift, adds, sums);
  }

  template <int Blocks, int Columns>
  static KVARN_ALWAYS_INLINE void clear(dot_sum (&sum)[Blocks][Columns]) {
    KVARN_UNROLL
    for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
    for (int c = 0; c < Columns; ++c) sum[i][c] = no_dots();
  }

  // Stores the sums, times 2^shift, or adds them to what was stored.
  template <int Blocks, int Columns>
  static KVARN_ALWAYS_INLINE void store_sums(const dot_sum (&sum)[Blocks][Columns], int shift,
                                             bool adds, std::int32_t* sums) {
    KVARN_UNROLL
    for (int i = 0; i < Blocks; ++i) KVARN_UNROLL
    for (int c = 0; c < Columns; ++c) {
      words result = flush(sum[i][c]);
      std::int32_t* const out = sums + c * sum_stride + i * rows_at_once;
      if (adds) result = add(load_words(out), shift_left(result, broadcast_words(shift)));
      store_words(out, result);
    }
  }

  // The products of one column's operand with Blocks vectors of codes.
  template <int Blocks, int Columns>
  static KVARN_ALWAYS_INLINE void dot(dot_sum (&sum)[Blocks][Columns], int c,
                                      const words (&code)[Blocks], const std::int32_t* operand) {
    if constexpr (Blocks == 1) {
      add_dots(sum[0][c], code[0], operand);
    } else {
      const words shared = broadcast_words(*operand);
      KVARN_UNROLL
      for (int i = 0; i < Blocks; ++i) add_dots(sum[i][c], code[i], shared);
    }
  }
};
