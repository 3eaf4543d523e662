// Reading a record in shared memory a run of 16 codes at a time. What the bytes mean: tile_layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../format/float16.hpp"
#include "../format/float8.hpp"
#include "../format/tile_layout.hpp"
#include "device.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// 16 codes of neighbouring columns.
template <int Bits>
struct code_run {
  std::uint32_t low;   // 2 and 3 bits: the low 2 bits of all; 4 bits: codes 0 to 7
  std::uint32_t high;  // 3 bits: the high bits of all; 4 bits: codes 8 to 15

  __device__ unsigned code(int i) const {
    if constexpr (Bits == 2) return (low >> (2 * i)) & 3u;
    if constexpr (Bits == 3) return ((low >> (2 * i)) & 3u) | (((high >> i) & 1u) << 2);
    if constexpr (Bits == 4) return ((i < 8 ? low : high) >> (4 * (i & 7))) & 15u;
  }
  __device__ float value(int i) const { return static_cast<float>(code(i)); }
  // Codes 8 part .. 8 part + 7, as numbers 0 to 7.
  __device__ code_run half(int part) const {
    if constexpr (Bits == 4) return {part != 0 ? high : low, 0};
    return {low >> (16 * part), high >> (8 * part)};
  }
};

// The number that an FP8 step or scale stands for.
__device__ inline float fp8_value(scale_type type, unsigned bits) {
  // An E4M3 number with its bits in the place of a binary16's is 2^-8 of itself.
  const float value = to_float(static_cast<std::uint16_t>(bits << 7));
  return type == scale_type::ue5m3 ? value : value * 256.0f;
}

// A record in shared memory has 16 free bytes behind the codes of every eight rows, which keep
// threads that read rows eight apart off each other's banks.
inline constexpr int row_gap = 16;

KVARN_INLINE constexpr int gap_bytes(const tile_layout& layout) {  // all of them
  return layout.planes() * layout.rows() / 8 * row_gap;
}
KVARN_INLINE constexpr int shared_record_bytes(const tile_layout& layout) {
  return static_cast<int>(layout.record_bytes()) + gap_bytes(layout);
}
// Where 16 bytes of a record stand there, both counted in 16 bytes.
__device__ inline int shared_record_place(const tile_layout& layout, int quad) {
  int gaps = 0;
  for (int plane = 0; plane < layout.planes(); ++plane) {
    const int first = static_cast<int>(layout.plane_offset(plane) / 16);
    const int eight_rows = static_cast<int>(layout.plane_row_bytes(plane) / 2);
    if (quad >= first) gaps += min((quad - first) / eight_rows, layout.rows() / 8);
  }
  return quad + gaps;
}

// Such a record, at a 16-byte aligned address.
template <int Bits>
class packed_record {
 public:
  __device__ packed_record(const std::byte* data, const tile_layout& layout)
      : data_(data),
        layout_(layout),
        row_bytes_(static_cast<int>(layout.plane_row_bytes(0))),
        high_(data + layout.plane_offset(1) + layout.rows() / 8 * row_gap),
        zero_(reinterpret_cast<const std::uint16_t*>(data + gap_bytes(layout) +
                                                     layout.zero_offset())),
        step_(
            reinterpret_cast<const std::uint8_t*>(data + gap_bytes(layout) + layout.step_offset())),
        scale_(reinterpret_cast<const std::uint8_t*>(data + gap_bytes(layout) +
                                                     layout.scale_offset())) {}

  // Columns 16 run .. 16 run + 15 of row 8 eight + i, i below 8.
  __device__ code_run<Bits> codes(int eight, int i, int run) const {
    const std::byte* const place =
        data_ + eight * (8 * row_bytes_ + row_gap) + i * row_bytes_ + run * (Bits == 4 ? 8 : 4);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(place);
    if constexpr (Bits == 2) return {words[0], 0};
    if constexpr (Bits == 4) return {words[0], words[1]};
    if constexpr (Bits == 3)
      return {words[0],
              *reinterpret_cast<const std::uint16_t*>(high_ + eight * (4 * row_bytes_ + row_gap) +
                                                      i * (row_bytes_ / 2) + run * 2)};
  }
  // The same of a row.
  __device__ code_run<Bits> codes(int row, int run) const { return codes(row >> 3, row & 7, run); }
  __device__ float zero(int col) const { return to_float(zero_[col]); }
  __device__ float step(int col) const { return fp8_value(layout_.scale, step_[col]); }
  __device__ float scale(int row) const { return fp8_value(layout_.scale, scale_[row]); }

 private:
  const std::byte* data_;
  const tile_layout& layout_;
  int row_bytes_;
  const std::byte* high_;
  const std::uint16_t* zero_;
  const std::uint8_t* step_;
  const std::uint8_t* scale_;
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
