// The codes of a packed tile as operands of integer tensor cores, and what they are multiplied
// with.
//
// Lane 4 r + i works for row i of every four. Of the columns that an operand contracts over it
// holds
//   base + 16 q + word_stride w + e,   base = 16 runs (r / 2) + half_stride (r % 2),
// in element [q][w][e]: that is where the transposition of 8 x 8 matrices takes them from, and
// where the scores of a tile come out, whose rows are taken in the order that makes it so.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "tensor_core.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// How 16 neighbouring codes lie in 4 operand registers: byte b of register u is code
//   u + 4 b                        of 2 and 3 bits,
//   8 (u / 2) + u % 2 + 2 b        of 4 bits.
// Element (w, e) of a lane belongs to byte 2 (r % 2) + slot of its register.
// `Swaps`, of 2 bits: lanes of odd r have element e in the place of e ^ 1.
template <int Bits, bool Swaps = false>
struct code_order {
  static_assert(!Swaps || Bits == 2);
  static constexpr int word_stride = Bits == 4 ? 8 : 4;
  static constexpr int half_stride = Bits == 4 ? 4 : 8;
  static constexpr bool swaps = Swaps;
  // Of the lane: what e is changed by; a word of four elements, of two, as the lane has them.
  __device__ static int swap() { return Swaps ? lane_index() >> 2 & 1 : 0; }
  __device__ static std::uint32_t swap_bytes(std::uint32_t word) {
    return Swaps ? __byte_perm(word, 0, swap() != 0 ? 0x2301 : 0x3210) : word;
  }
  __device__ static std::uint32_t swap_halves(std::uint32_t word) {
    return Swaps ? __byte_perm(word, 0, swap() != 0 ? 0x1032 : 0x3210) : word;
  }
  // The element of register u and slot 0 or 1.
  KVARN_HOST_DEVICE static constexpr int word(int u, int slot) { return Bits == 4 ? u >> 1 : slot; }
  KVARN_HOST_DEVICE static constexpr int element(int u, int slot) {
    return Bits == 4 ? (u & 1) + 2 * slot : u;
  }
  KVARN_HOST_DEVICE static constexpr int column(int u, int slot) {
    return word_stride * word(u, slot) + element(u, slot);
  }
  __device__ static int base(int runs) {
    const int r = lane_index() >> 2;
    return 16 * runs * (r >> 1) + half_stride * (r & 1);
  }
};

// The order of tokens: that of the values' columns. Where rows of keys are so short that eight lie
// in 128 bytes, lanes swap elements: half of them then find theirs on other banks (9 % of the time
// of a call; with rows of 32 bytes it costs as much as it gains).
template <cache_format Format>
using token_order = code_order<Format.value_bits, Format.value_bits == 2 &&
                                                      Format.key_layout().plane_row_bytes(0) <= 16>;

// Registers of the operand A from 16 codes of one row; of 2 and 3 bits those of odd elements are 4
// times the codes.
template <int Bits, bool Swaps>
__device__ inline void spread_codes(std::uint32_t low, std::uint32_t high, std::uint32_t (&a)[4]) {
  if constexpr (Bits == 4) {
    a[0] = low & 0x0f0f0f0fu;
    a[1] = (low >> 4) & 0x0f0f0f0fu;
    a[2] = high & 0x0f0f0f0fu;
    a[3] = (high >> 4) & 0x0f0f0f0fu;
  } else {
    const std::uint32_t upper = low >> 4;
    // Two bytes are of a lane of even r, two of the next.
    constexpr std::uint32_t even = Swaps ? 0x0c0c0303u : 0x03030303u;
    constexpr std::uint32_t odd = Swaps ? 0x03030c0cu : 0x0c0c0c0cu;
    a[0] = low & even;
    a[1] = low & odd;
    a[2] = upper & even;
    a[3] = upper & odd;
    if constexpr (Bits == 3) {
      // Nibble b of the high bits goes to byte b.
      std::uint32_t h = (high | (high << 8)) & 0x00ff00ffu;
      h = (h | (h << 4)) & 0x0f0f0f0fu;
      a[0] |= (h << 2) & 0x04040404u;
      a[1] |= (h << 3) & 0x10101010u;
      a[2] |= h & 0x04040404u;
      a[3] |= (h << 1) & 0x10101010u;
    }
  }
}

// The codes of a record in shared memory, as lane i reads them: runs i * Runs .. of a row.
template <tile_layout Layout, int Runs>
struct code_rows {
  static constexpr int row_bytes = static_cast<int>(Layout.plane_row_bytes(0));
  static constexpr int high_row_bytes =
      Layout.bits == 3 ? static_cast<int>(Layout.plane_row_bytes(1)) : 0;
  static constexpr int run_bytes = Layout.bits == 4 ? 8 : 4;
  static constexpr int places = row_bytes | (Runs * run_bytes);  // a multiple of what all are
  static constexpr int align = places % 16 == 0 ? 16 : places % 8 == 0 ? 8 : 4;

  const std::byte* low;
  const std::byte* high;
  int swap;

  // Rows are counted from `first_row`, an even one; with `swap` 1, rows 2 k and 2 k + 1 change
  // places.
  __device__ code_rows(const std::byte* record, int first_row, int swap_rows = 0)
      : swap(swap_rows) {
    const int i = lane_index() & 3;
    low = record + first_row * row_bytes + i * Runs * run_bytes;
    high = record + Layout.plane_offset(1) + first_row * high_row_bytes + i * Runs * 2;
  }

  __device__ void load(int row, std::uint32_t (&out)[Runs], std::uint32_t (&out_high)[Runs]) const {
    const int moved = row % 2 == 0 ? swap : -swap;
    const std::byte* const from = low + moved * row_bytes + row * row_bytes;
    constexpr int words = Runs * run_bytes / 4;
    std::uint32_t word[words];
    if constexpr (align == 16 && words % 4 == 0) {
#pragma unroll
      for (int k = 0; k < words; k += 4)
        *reinterpret_cast<uint4*>(word + k) = *reinterpret_cast<const uint4*>(from + 4 * k);
    } else if constexpr (align >= 8 && words % 2 == 0) {
#pragma unroll
      for (int k = 0; k < words; k += 2)
        *reinterpret_cast<uint2*>(word + k) = *reinterpret_cast<const uint2*>(from + 4 * k);
    } else {
#pragma unroll
      for (int k = 0; k < words; ++k)
        word[k] = *reinterpret_cast<const std::uint32_t*>(from + 4 * k);
    }
#pragma unroll
    for (int q = 0; q < Runs; ++q) {
      out[q] = word[q * (run_bytes / 4)];
      out_high[q] = Layout.bits == 4 ? word[(2 * q + 1) % words] : 0;
      if constexpr (Layout.bits == 3)
        out_high[q] =
            *reinterpret_cast<const std::uint16_t*>(high + (row + moved) * high_row_bytes + 2 * q);
    }
  }
};

// Four FP8 numbers as halves without the factor of their type: bytes 0 and 2, bytes 1 and 3.
struct byte_halves {
  std::uint32_t even;
  std::uint32_t odd;
};
__device__ inline byte_halves halves_of(std::uint32_t bytes) {
  return {(bytes & 0x00ff00ffu) << 7, (bytes >> 1) & 0x7f807f80u};
}
__device__ inline void widen_bytes(const byte_halves& halves, float (&out)[4]) {
  const float_pair even = unpack_halves(halves.even);
  const float_pair odd = unpack_halves(halves.odd);
  out[0] = even.low;
  out[1] = odd.low;
  out[2] = even.high;
  out[3] = odd.high;
}
// What the bits of an FP8 number as a binary16 have to be multiplied by.
template <scale_type Scale>
inline constexpr int fp8_exponent = Scale == scale_type::ue5m3 ? 0 : 8;
template <scale_type Scale>
inline constexpr float fp8_factor = 1.0f * (1 << fp8_exponent<Scale>);

// The bits of an FP8 number as a float: with a factor 2^raw_scale_exponent and that of its type its
// value.
__device__ inline float raw_scale(std::uint32_t bits) { return __uint_as_float(bits << 20); }
inline constexpr int raw_scale_exponent = 112;

// 2^e, -126 <= e <= 127.
__device__ inline float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// One side of a tile's products, in operand registers.
template <int Runs>
struct folded_operand {
  std::uint32_t b[Runs][4];
  int bias[4];  // what sums begin with: that of a[c] zero[c], in units, twice in two parts
  float unit;   // of the integer sums, of numbers whose scales are still to be multiplied with
};

// Folds the steps of the tile into the numbers of each block, which get(block, q, w, a) gives.
// `largest`: at least |a|, of each block. A unit is a power of two, so that products with steps are
// below 2^15 (signed) or 2^16 of them. `bias`: sum of a[c] zero[c], of each block; it takes part in
// the integer sums, and where it is 2^30 units these are larger (then codes hardly count).
template <bool Signed, tile_layout Layout, class Order, int Runs, int Blocks, class Get>
__device__ inline void fold(const std::byte* record, const float (&largest)[Blocks],
                            const float (&bias)[Blocks], Get get,
                            folded_operand<Runs> (&out)[Blocks]) {
  using order = Order;
  constexpr int cols = Layout.cols();
  constexpr bool is_padded = 64 * Runs != cols;
  const std::byte* const steps = record + Layout.step_offset();
  const int base = order::base(Runs);
  std::uint32_t words[Runs][2];
  unsigned pair = 0;
#pragma unroll
  for (int q = 0; q < Runs; ++q)
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const int c = base + 16 * q + order::word_stride * w;
      words[q][w] = 0;
      if (!is_padded || c < cols)
        words[q][w] = order::swap_bytes(*reinterpret_cast<const std::uint32_t*>(steps + c));
      pair = __vmaxu2(pair, __vmaxu2(words[q][w], words[q][w] << 8));
    }
  pair = max(pair & 0xffffu, pair >> 16);
  const float largest_step = raw_scale(__reduce_max_sync(all_lanes, pair) >> 8);

  // Numbers that are added to have a product's multiple of the unit in their low 16 bits, 128 more
  // where it has a sign; with codes times 4, of four units.
  constexpr float magic = Signed ? 12582912.0f + 128.0f : 8388608.0f;
  int exponent[Blocks];  // of the unit
  float even_magic[Blocks];
  float odd_magic[Blocks];
#pragma unroll
  for (int block = 0; block < Blocks; ++block) {
    const float product = largest_step * (largest[block] * 1.0001f);  // rounded numbers stay below
    constexpr int product_bits = 127 - raw_scale_exponent + (Signed ? 15 : 16) - 1;
    constexpr int bias_bits = 127 + 30 - 1 + fp8_exponent<Layout.scale>;
    exponent[block] = max(max((__float_as_int(product) >> 23) - product_bits,
                              (__float_as_int(std::fabs(bias[block])) >> 23) - bias_bits),
                          -24);
    const int shift = exponent[block] << 23;
    constexpr float odd_factor = Layout.bits == 4 ? 1.0f : 4.0f;
    even_magic[block] = __int_as_float(__float_as_int(magic) + shift);
    odd_magic[block] = __int_as_float(__float_as_int(odd_factor * magic) + shift);
    if (order::swap() != 0) {
      const float odd = odd_magic[block];
      odd_magic[block] = even_magic[block];
      even_magic[block] = odd;
    }
  }
#pragma unroll
  for (int q = 0; q < Runs; ++q) {
    float step[2][4];
#pragma unroll
    for (int w = 0; w < 2; ++w) widen_bytes(halves_of(words[q][w]), step[w]);
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
      std::uint32_t t[2][4];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        float a[4];
        get(block, q, w, a);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          t[w][e] = __float_as_uint(
              std::fma(a[e], step[w][e], e % 2 == 0 ? even_magic[block] : odd_magic[block]));
      }
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        // Low bytes of both, high bytes of both: two elements of the matrix.
        std::uint32_t& b = out[block].b[q][u];
        b = transpose_matrix(__byte_perm(t[order::word(u, 0)][order::element(u, 0)],
                                         t[order::word(u, 1)][order::element(u, 1)], 0x5140));
        if constexpr (Signed) b ^= (lane_index() & 4) == 0 ? 0x80808080u : 0u;
      }
    }
  }
#pragma unroll
  for (int block = 0; block < Blocks; ++block) {
    out[block].unit = power_of_two(exponent[block] + fp8_exponent<Layout.scale>);
    const int whole =
        __float2int_rn(bias[block] * power_of_two(-fp8_exponent<Layout.scale> - exponent[block]));
    // Four numbers, so that the compiler keeps them and does not copy one for each product.
    out[block].bias[0] = whole & 0xff;
    out[block].bias[1] = whole >> 8;
    out[block].bias[2] = whole & 0xffff;
    out[block].bias[3] = (whole >> 16) << 8;
  }
}

// Sums over the codes of N pairs of rows of the tile, `first(n)` and `second(n)`; lanes of r see
// them as rows r and r + 8 of 16. Several at a time, since a multiplication waits for the one
// before it that it adds to.
template <bool Signed, bool Swaps, int N, int Blocks, tile_layout Layout, int Runs, class First,
          class Second>
__device__ inline void multiply_rows(const code_rows<Layout, Runs>& rows, First first,
                                     Second second, const folded_operand<Runs> (&operands)[Blocks],
                                     float (&sums)[Blocks][N][2]) {
  std::uint32_t low[N][2][Runs];
  std::uint32_t high[N][2][Runs];
  int c[Blocks][N][4];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    rows.load(first(n), low[n][0], high[n][0]);
    rows.load(second(n), low[n][1], high[n][1]);
  }
#pragma unroll
  for (int q = 0; q < Runs; ++q)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      std::uint32_t x[4];
      std::uint32_t y[4];
      spread_codes<Layout.bits, Swaps>(low[n][0][q], high[n][0][q], x);
      spread_codes<Layout.bits, Swaps>(low[n][1][q], high[n][1][q], y);
#pragma unroll
      for (int u = 0; u < 4; u += 2) {
        const std::uint32_t a[4] = {x[u], y[u], x[u + 1], y[u + 1]};
#pragma unroll
        for (int block = 0; block < Blocks; ++block) {
          const std::uint32_t(&b)[4] = operands[block].b[q];
          if (q == 0 && u == 0)
            multiply_bytes<Signed>(c[block][n], a, b[u], b[u + 1], operands[block].bias);
          else
            multiply_bytes<Signed>(c[block][n], a, b[u], b[u + 1], c[block][n]);
        }
      }
    }
#pragma unroll
  for (int block = 0; block < Blocks; ++block)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int(&sum)[4] = c[block][n];
      sums[block][n][0] = static_cast<float>(sum[0] + 256 * sum[1]);
      sums[block][n][1] = static_cast<float>(sum[2] + 256 * sum[3]);
    }
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
