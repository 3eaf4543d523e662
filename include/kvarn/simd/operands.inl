// The shapes that attention and the sums of codes share; included inside the region and namespace
// of each instruction set.

// Rows of attention that go through a group together, and rows of a tile that are summed at once.
inline constexpr int heads_at_once = 8;
inline constexpr int sum_rows_at_once = 128;
static_assert(sum_rows_at_once >= max_group);

// The operands of heads, folded as kvarn::fold_operand does and cut into one column of bytes
// (precision int8) or two (int16: the low bytes, then the high bytes). A column is in the order in
// which codes of 1, 2 or 4 bits leave a 32-bit word: word j, shifted right by width * s and masked,
// has in byte b the code of tile column (32 / width) j + (8 / width) b + s. Quad (8 / width) j + s
// holds their operands.
inline constexpr int max_columns = 2 * heads_at_once;
// Columns stand a cache line more than a power of two apart: they do not evict each other.
inline constexpr int cache_line = 64;
inline constexpr std::ptrdiff_t quad_stride = max_head_dim / 4 + cache_line / 4;
inline constexpr std::ptrdiff_t sum_stride = sum_rows_at_once + cache_line / 4;

struct folded_heads {
  alignas(64) std::int32_t quads[2][max_columns][quad_stride];  // for each plane of codes
  float unit[heads_at_once];
  float bias[heads_at_once];
};

// Prefetches what a record has behind its codes.
KVARN_ALWAYS_INLINE void prefetch_rest(const std::byte* record, const tile_layout& layout) {
  for (std::size_t i = layout.zero_offset(); i < layout.record_bytes(); i += cache_line)
    prefetch(record + i);
}

// How a target sums codes times operands.
struct sum_operations {
  // sums[column][r] = the sum of code * operand of row first + r, exactly, for r < rows, a multiple
  // of 16. Prefetches the bytes `ahead` of the codes it reads. Columns after the last one, up to
  // max_columns, may be read and their sums be written; nobody reads those.
  void (*sum)(const_tile_view tile, int first, int rows, std::ptrdiff_t ahead,
              const folded_heads& operands, int columns, std::int32_t (*sums)[sum_stride]);
  // Called between sums, each time after some hundred cycles; null if that is not needed.
  void (*keep_awake)() = nullptr;

  void stay_awake() const {
    if (keep_awake != nullptr) keep_awake();
  }
};
