// Packed codes brought into the order of lanes, written once; included inside the region and
// namespace of each instruction set.

// A 32-bit word of codes of each of rows_at_once rows, one row a lane.
using lane_words = std::int32_t[rows_at_once];

// Rows that are transposed together, and the words of a plane of them.
inline constexpr int transposed_rows = 64;
inline constexpr int max_lane_words = transposed_rows / rows_at_once * max_head_dim * 4 / 32;

inline int words_of_row(const tile_layout& layout, int plane) {
  return static_cast<int>((layout.plane_row_bytes(plane) + 3) / 4);
}
// Rows are read by as many words at least: what follows the codes belongs to the record too.
inline constexpr int least_words = 4;
constexpr int padded_words(int count) {
  return (count + least_words - 1) / least_words * least_words;
}

// `Count` words of each of rows_at_once rows.
template <int Count>
KVARN_ALWAYS_INLINE void transpose_rows(const std::byte* first, std::size_t stride,
                                        lane_words* out) {
  words w[Count];
  load_words(first, stride, w);
  KVARN_UNROLL
  for (int i = 0; i < Count; ++i) store_words(out[i], w[i]);
}

// The codes of a plane of `rows` rows from `first` on, at most transposed_rows: padded_words words
// of each block of rows_at_once rows, then zeros for the rows that are missing.
inline void transpose_words(const_tile_view tile, int plane, int first, int rows, lane_words* out) {
  const tile_layout& layout = tile.layout;
  const std::size_t stride = layout.plane_row_bytes(plane);
  const int count = padded_words(words_of_row(layout, plane));
  for (int row = 0; row < rows; row += rows_at_once) {
    const std::byte* const codes = tile.data + layout.code_offset(plane, first + row);
    std::ptrdiff_t word = 0;
    for (; word + words_at_once <= count; word += words_at_once)
      transpose_rows<words_at_once>(codes + 4 * word, stride, out + word);
    if (word < count) transpose_rows<least_words>(codes + 4 * word, stride, out + word);
    out += count;
  }
  const int missing = (transposed_rows - rows) / rows_at_once * count;
  if (missing > 0) std::memset(out, 0, static_cast<std::size_t>(missing) * sizeof(*out));
}
