// AMX int8 tiles on top of AVX-512: only the sums of codes times operands are its own.
//
// A tile of operands (a row is a column of bytes of a head) times a tile of codes (a row is one
// quad of 16 rows of the record) is a tile of sums, whose rows are vectors of 16 sums as the
// kernels of AVX-512 take them. Uses all tile registers of the thread: what a caller keeps in them
// is lost.
#if defined(KVARN_TARGET)  // TILE, INT8
KVARN_TARGET(amx, X86_64,
             machine.runs(target::avx512) && machine.saves(0x60000) && bit(machine.seven.d, 24) &&
                 bit(machine.seven.d, 25) && request_amx_state())
#elif defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                               \
    __attribute__((target(                                                                                  \
        "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,amx-tile,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,amx-tile,amx-int8")
#endif

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace amx {

using namespace avx512;

inline constexpr int tile_rows = 16;
inline constexpr int tile_row_bytes = 64;
inline constexpr int tile_quads = 16;  // quads of codes or operands in one tile

// The tile configuration of the instruction set, palette 1.
struct alignas(64) tile_shapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// What tile instructions load is written before: g++ 12 does not know that they load.
KVARN_ALWAYS_INLINE void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Holds the shapes of tiles for operands of `columns` columns.
class tile_scope {
 public:
  explicit tile_scope(int columns) {
    tile_shapes shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = tile_row_bytes;
      const int rows = is_codes(i) || columns > tile_rows ? tile_rows : columns;
      shapes.rows[i] = static_cast<std::uint8_t>(rows);
    }
    finish_stores();
    _tile_loadconfig(&shapes);
  }
  tile_scope(const tile_scope&) = delete;
  tile_scope& operator=(const tile_scope&) = delete;
  ~tile_scope() { _tile_release(); }

 private:
  // Registers 0 and 1: operands, 2 and 3: codes, 4 to 7: sums.
  static constexpr bool is_codes(int tile) { return tile == 2 || tile == 3; }
};

class tile_sums {
 public:
  // As sum_operations::sum. Cuts the codes of as many rows as stay in the L1 cache, then multiplies
  // them.
  static void sum(const_tile_view tile, int first, int rows, std::ptrdiff_t ahead,
                  const folded_heads& operands, int columns, std::int32_t (*sums)[sum_stride]) {
    alignas(64) lane_words words[max_lane_words];
    alignas(64) lane_words codes[max_quads];
    const tile_layout& layout = tile.layout;
    const int block_quads = layout.planes() * plane_quads(layout);
    const int fitting = (block_quads < cached_quads ? cached_quads / block_quads : 1) * tile_rows;
    const int step = fitting < transposed_rows ? fitting : transposed_rows;
    for (int row = 0; row < rows; row += step) {
      const int count = rows - row < step ? rows - row : step;
      stay_awake();
      // Sums of both planes meet in one tile: the codes of a plane come shifted to their place.
      lane_words* out = codes;
      for (int plane = 0; plane < layout.planes(); ++plane) {
        const std::byte* const next = tile.data + layout.code_offset(plane, first + row) + ahead;
        transpose_words(tile, plane, first + row, count, words);
        const int word_count = words_of_row(layout, plane);
        if (layout.bits == 4)
          cut_codes<4, 0>(words, word_count, count, next, out, block_quads);
        else if (plane == 0)
          cut_codes<2, 0>(words, word_count, count, next, out, block_quads);
        else
          cut_codes<1, 2>(words, word_count, count, next, out, block_quads);
        out += plane_quads(layout);
      }
      multiply(layout, operands, columns, codes, count / tile_rows, sums[0] + row);
    }
  }

  // The multiplier falls asleep after some 700 idle cycles and needs 1000 to wake up (measured on
  // Sapphire Rapids): a product that nobody reads keeps it awake.
  static void stay_awake() { _tile_dpbsud(4, 0, 2); }

 private:
  static constexpr int max_quads = 256;     // of tile_rows rows, at least one block of rows
  static constexpr int cached_quads = 128;  // as many as stay in the L1 cache beside the rest
  static_assert(max_quads >= 2 * max_head_dim / 4 && tile_rows == rows_at_once);

  // A multiple of the quads of one tile. Operands beyond the columns are 0.
  static int plane_quads(const tile_layout& layout) {
    return (layout.cols() / 4 + tile_quads - 1) / tile_quads * tile_quads;
  }

  // Quads of the codes of a plane of Width bits, times 2^Shift, block after block of rows.
  // Prefetches as many bytes from `next` on.
  template <int Width, int Shift>
  static void cut_codes(const lane_words* in, int word_count, int rows, const std::byte* next,
                        lane_words* out, int block_quads) {
    const code_cutter cutter(Width, Shift);
    for (int row = 0; row < rows; row += tile_rows) {
      for (int j = 0; j < word_count; ++j) {
        words word = load_words(in[j]);
        prefetch(next);
        next += sizeof(*in);
        KVARN_UNROLL
        for (int s = 0; s < 8 / Width; ++s)
          store_words(out[8 / Width * j + s], cutter.cut(word, s));
      }
      in += padded_words(word_count);
      out += block_quads;
    }
  }

  // Sums of two blocks of rows, or of one that stands for both.
  struct block_pair {
    const lane_words* codes;
    const lane_words* more_codes;
    std::int32_t* sums;
    bool both;
  };

  static void multiply(const tile_layout& layout, const folded_heads& operands, int columns,
                       const lane_words* codes, int blocks, std::int32_t* sums) {
    finish_stores();
    const int quads = layout.planes() * plane_quads(layout);
    block_pair before{};
    bool odd = false;
    for (int c = 0; c < columns; c += tile_rows)
      for (std::ptrdiff_t block = 0; block < blocks; block += 2, odd = !odd) {
        const bool both = block + 1 < blocks;
        const auto* const first = codes + block * quads;
        const block_pair now{first, both ? first + quads : first,
                             sums + c * sum_stride + block * tile_rows, both};
        if (odd)
          multiply_pair<true>(layout, operands, c, now, before);
        else
          multiply_pair<false>(layout, operands, c, now, before);
        before = now;
      }
    odd ? store_pair<false>(before) : store_pair<true>(before);
  }

  // In the tile registers 4 and 5, or 6 and 7. The pair before is stored when there is something
  // else to do: its last products come late.
  template <bool Odd>
  static KVARN_ALWAYS_INLINE void multiply_pair(const tile_layout& layout,
                                                const folded_heads& operands, int column,
                                                const block_pair& now, const block_pair& before) {
    if constexpr (Odd) {
      _tile_zero(6);
      _tile_zero(7);
    } else {
      _tile_zero(4);
      _tile_zero(5);
    }
    for (int plane = 0; plane < layout.planes(); ++plane) {
      const int offset = plane * plane_quads(layout);
      for (int quad = 0; quad < layout.cols() / 4; quad += tile_quads) {
        _tile_loadd(0, operands.quads[plane][column] + quad, sizeof(operands.quads[0][0]));
        _tile_loadd(2, now.codes[offset + quad], tile_row_bytes);
        _tile_loadd(3, now.more_codes[offset + quad], tile_row_bytes);
        if constexpr (Odd) {
          _tile_dpbsud(6, 0, 2);
          _tile_dpbsud(7, 0, 3);
        } else {
          _tile_dpbsud(4, 0, 2);
          _tile_dpbsud(5, 0, 3);
        }
        if (plane == 0 && quad == 0 && before.sums != nullptr) store_pair<!Odd>(before);
      }
    }
  }

  template <bool Odd>
  static KVARN_ALWAYS_INLINE void store_pair(const block_pair& pair) {
    constexpr auto stride = sizeof(std::int32_t) * sum_stride;
    if constexpr (Odd) {
      _tile_stored(6, pair.sums, stride);
      if (pair.both) _tile_stored(7, pair.sums + tile_rows, stride);
    } else {
      _tile_stored(4, pair.sums, stride);
      if (pair.both) _tile_stored(5, pair.sums + tile_rows, stride);
    }
  }
};

// With fewer, dot products in registers are faster than cutting codes for the tiles.
inline constexpr int min_columns = 4;

struct kernels : avx512::kernels {
  static void attend_sealed(const cache_format& format, const sealed_run& run, float cap,
                            operand_precision precision, attention_row* rows, int row_count) {
    const int columns = precision == operand_precision::int16 ? 2 * row_count : row_count;
    if (columns < min_columns)
      return avx512::attend_sealed(format, run, cap, precision, rows, row_count);
    const tile_scope tiles(columns);
    avx512::attend_sealed_by({&tile_sums::sum, &tile_sums::stay_awake}, format, run, cap, precision,
                             rows, row_count);
  }
};

}  // namespace amx
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#endif  // __x86_64__
