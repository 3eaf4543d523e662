// Sums of codes times operands by the dot product instructions of a target, written once; included
// inside the region and namespace of each instruction set.
struct code_sums {
  // As sum_operations::sum.
  static void sum(const_tile_view tile, int first, int rows, std::ptrdiff_t ahead,
                  const folded_heads& operands, int columns, std::int32_t (*sums)[sum_stride]) {
    alignas(64) lane_words words[max_lane_words];
    const tile_layout& layout = tile.layout;
    for (int row = 0; row < rows; row += transposed_rows)
      for (int plane = 0; plane < layout.planes(); ++plane) {
        const int left = rows - row < transposed_rows ? rows - row : transposed_rows;
        transpose_words(tile, plane, first + row, left, words);
        const plane_words codes{words,
                                tile.data + layout.code_offset(plane, first + row) + ahead,
                                words_of_row(layout, plane),
                                layout.plane_bits(plane),
                                layout.plane_shift(plane),
                                left};
        for (int c = 0; c < columns; c += columns_at_once)
          multiply_columns(codes, columns - c, operands.quads[plane][c], sums[c] + row);
      }
  }

 private:
  // Transposed codes of a plane, of `width` bits that are worth 2^shift.
  struct plane_words {
    const lane_words* words;
    const std::byte* next;  // to prefetch: as many bytes
    int count;              // of words of a row
    int width;
    int shift;
    int rows;
  };

  static constexpr int columns_at_once = 8;

  // With the next of `left` columns of operands. What it computes beyond them nobody reads. Three
  // heads, in one part or two, have variants of their own: in six columns they take 0.8 times as
  // long as in eight. Each variant is a function of its own: in one, g++ keeps sums in memory.
  static void multiply_columns(const plane_words& codes, int left, const std::int32_t* quads,
                               std::int32_t* sums) {
    if (left > 6)
      multiply<8>(codes, quads, sums);
    else if (left > 4)
      multiply<6>(codes, quads, sums);
    else if (left == 4)
      multiply<4>(codes, quads, sums);
    else if (left == 3)
      multiply<3>(codes, quads, sums);
    else
      multiply<2>(codes, quads, sums);
  }

  // With `Columns` columns of operands. A plane that is not the first adds to the sums.
  template <int Columns>
  static KVARN_NOINLINE void multiply(const plane_words& shared, const std::int32_t* quads,
                                      std::int32_t* sums) {
    const plane_words codes = shared;  // a copy, which stores to `sums` cannot change
    // As many blocks of rows at once as keep enough independent sums in flight.
    constexpr int wanted = dot_accumulators / Columns;
    constexpr int blocks = wanted < max_dot_blocks ? wanted : max_dot_blocks;
    static_assert(transposed_rows % (blocks * rows_at_once) == 0);
    for (int row = 0; row < codes.rows; row += blocks * rows_at_once)
      multiply_blocks<Columns, blocks>(codes, row / rows_at_once, quads, sums + row);
  }

  template <int Columns, int Blocks>
  static KVARN_ALWAYS_INLINE void multiply_blocks(const plane_words& codes, int block,
                                                  const std::int32_t* quad, std::int32_t* sums) {
    const std::ptrdiff_t block_words = padded_words(codes.count);
    const lane_words* const block_codes = codes.words + block * block_words;
    const std::byte* next =
        codes.next + sizeof(lane_words) * static_cast<std::size_t>(block * codes.count);
    const code_cutter cutter(codes.width);
    const int shifts = 8 >> codes.width / 2;  // 8 / width without a division
    dot_sum sum[Blocks][Columns];
    clear(sum);
    bool adds = codes.shift != 0;
    [[maybe_unused]] int unflushed = 0;
    for (int j = 0; j < codes.count; ++j) {
      words word[Blocks];
      KVARN_UNROLL
      for (int i = 0; i < Blocks; ++i) word[i] = load_words(block_codes[i * block_words + j]);
      // A line at a time: a burst would hold the fill buffers that loads need.
      for (std::size_t i = 0; i < sizeof(word); i += cache_line) prefetch(next + i);
      next += sizeof(word);
      for (int s = 0; s < shifts; ++s, ++quad) {
        words code[Blocks];
        KVARN_UNROLL
        for (int i = 0; i < Blocks; ++i) code[i] = cutter.cut(word[i], s);
        KVARN_UNROLL
        for (int c = 0; c < Columns; ++c) {
          const words operand = broadcast_words(quad[c * quad_stride]);
          KVARN_UNROLL
          for (int i = 0; i < Blocks; ++i) add_dots(sum[i][c], code[i], operand);
        }
      }
      if constexpr (dots_need_flush) {
        unflushed += shifts;
        if (unflushed + shifts > dots_before_flush(codes.width)) {
          store_sums(sum, codes.shift, adds, sums);
          clear(sum);
          adds = true;
          unflushed = 0;
        }
      }
    }
    store_sums(sum, codes.shift, adds, sums);
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
    for (std::ptrdiff_t i = 0; i < Blocks; ++i) KVARN_UNROLL
    for (int c = 0; c < Columns; ++c) {
      words result = flush(sum[i][c]);
      std::int32_t* const out = sums + c * sum_stride + i * rows_at_once;
      if (adds) result = add(load_words(out), shift_left(result, broadcast_words(shift)));
      store_words(out, result);
    }
  }
};
