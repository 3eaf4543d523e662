// Views of records in memory that somebody else owns: any alignment, any stride that fits a record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../config.hpp"
#include "../error.hpp"
#include "codes.hpp"
#include "float16.hpp"
#include "float8.hpp"
#include "tile_layout.hpp"

namespace kvarn {

// One record. `Byte` is std::byte, or const std::byte for a view that only reads.
// Precondition of all members: `data` points to layout.record_bytes() bytes, and
// 0 <= row < layout.rows(), 0 <= col < layout.cols().
template <class Byte>
struct basic_tile_view {
  Byte* data = nullptr;
  tile_layout layout;

  KVARN_INLINE constexpr std::uint8_t code(int row, int col) const {
    unsigned code = 0;
    for (int plane = 0; plane < layout.planes(); ++plane)
      code |= static_cast<unsigned>(packed_element(data + layout.code_offset(plane, row),
                                                   layout.plane_bits(plane), col))
              << layout.plane_shift(plane);
    return static_cast<std::uint8_t>(code);
  }

  KVARN_INLINE constexpr float16 zero(int col) const {
    const Byte* bytes = data + layout.zero_offset() + 2 * static_cast<std::size_t>(col);
    return float16::from_bits(static_cast<std::uint16_t>(static_cast<unsigned>(bytes[0]) |
                                                         static_cast<unsigned>(bytes[1]) << 8));
  }
  KVARN_INLINE constexpr std::uint8_t step_bits(int col) const {
    return static_cast<std::uint8_t>(data[layout.step_offset() + static_cast<std::size_t>(col)]);
  }
  KVARN_INLINE constexpr std::uint8_t scale_bits(int row) const {
    return static_cast<std::uint8_t>(data[layout.scale_offset() + static_cast<std::size_t>(row)]);
  }

  // Steps and scales as numbers.
  KVARN_INLINE constexpr float step(int col) const { return decode(step_bits(col)); }
  KVARN_INLINE constexpr float scale(int row) const { return decode(scale_bits(row)); }

  // All codes of one row, one byte each; `codes` has layout.cols() elements.
  KVARN_INLINE constexpr void unpack_row(int row, std::uint8_t* codes) const {
    for (int col = 0; col < layout.cols(); ++col) codes[col] = 0;
    for (int plane = 0; plane < layout.planes(); ++plane)
      unpack_plane(data + layout.code_offset(plane, row), layout.cols(), layout.plane_bits(plane),
                   layout.plane_shift(plane), codes);
  }

  // The writers below exist for views of mutable bytes.
  KVARN_INLINE constexpr void pack_row(int row, const std::uint8_t* codes) const
      requires(!std::is_const_v<Byte>) {
    for (int plane = 0; plane < layout.planes(); ++plane)
      pack_plane(codes, layout.cols(), layout.plane_bits(plane), layout.plane_shift(plane),
                 data + layout.code_offset(plane, row));
  }
  KVARN_INLINE constexpr void set_zero(int col, float16 value) const
      requires(!std::is_const_v<Byte>) {
    Byte* bytes = data + layout.zero_offset() + 2 * static_cast<std::size_t>(col);
    bytes[0] = static_cast<std::byte>(value.bits & 0xff);
    bytes[1] = static_cast<std::byte>(value.bits >> 8);
  }
  KVARN_INLINE constexpr void set_step_bits(int col, std::uint8_t bits) const
      requires(!std::is_const_v<Byte>) {
    data[layout.step_offset() + static_cast<std::size_t>(col)] = static_cast<std::byte>(bits);
  }
  KVARN_INLINE constexpr void set_scale_bits(int row, std::uint8_t bits) const
      requires(!std::is_const_v<Byte>) {
    data[layout.scale_offset() + static_cast<std::size_t>(row)] = static_cast<std::byte>(bits);
  }

  // A template: of a view that is const already it must not be a conversion to its own type.
  template <class Const>
  requires(std::is_same_v<Const, const Byte> && !std::is_const_v<Byte>) KVARN_INLINE constexpr
  operator basic_tile_view<Const>() const {
    return {data, layout};
  }

 private:
  KVARN_INLINE constexpr float decode(std::uint8_t bits) const {
    return layout.scale == scale_type::ue5m3 ? static_cast<float>(ue5m3::from_bits(bits))
                                             : static_cast<float>(e4m3::from_bits(bits));
  }
};

using tile_view = basic_tile_view<std::byte>;
using const_tile_view = basic_tile_view<const std::byte>;

// `count` records, each `stride` bytes after the one before.
template <class Byte>
struct basic_tile_array {
  Byte* data = nullptr;
  tile_layout layout;
  std::size_t stride = 0;  // bytes, at least layout.record_bytes()
  std::size_t count = 0;

  // Precondition: index < count.
  KVARN_INLINE constexpr basic_tile_view<Byte> operator[](std::size_t index) const {
    return {data + stride * index, layout};
  }
};

inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

// Whether `size` bytes at `data` hold `count` records, `stride` bytes apart.
KVARN_COLD status check_records(const std::byte* data, std::size_t size, const tile_layout& layout,
                                std::size_t stride, std::size_t count) {
  status shape = validate(layout);
  if (!shape.ok()) return shape;
  const std::size_t record = layout.record_bytes();
  if (stride < record)
    return failure(
        error_code::invalid_argument,
        {"record stride is ", stride, " bytes; it must be at least the record's ", record});
  if (count != 0 && data == nullptr)
    return failure(error_code::invalid_argument, {"records: the pointer is null"});
  // Divided rather than multiplied: count and stride may come from a file.
  if (count != 0 && (size < record || (size - record) / stride < count - 1))
    return failure(error_code::short_buffer,
                   {"buffer has ", size, " bytes; ", count, " records of ", record,
                    " bytes with a stride of ", stride, " need more"});
  return shape;
}

}  // namespace detail

// A view of `size` bytes as `count` records, after checking that they fit.
template <class Byte>
result<basic_tile_array<Byte>> view_tiles(Byte* data, std::size_t size, const tile_layout& layout,
                                          std::size_t stride, std::size_t count) {
  status fits = detail::check_records(data, size, layout, stride, count);
  if (!fits.ok()) return fits;
  return basic_tile_array<Byte>{data, layout, stride, count};
}

// Whether foreign bytes are a record: steps, scales and zeros must be finite, steps and scales not
// negative. (Any codes are valid.)
KVARN_COLD status validate_record(const_tile_view tile, std::size_t size) {
  status fits = detail::check_records(tile.data, size, tile.layout, tile.layout.record_bytes(), 1);
  if (!fits.ok()) return fits;
  const auto valid = [&](std::uint8_t bits) {
    return tile.layout.scale == scale_type::ue5m3 ? ue5m3::from_bits(bits).is_valid()
                                                  : e4m3::from_bits(bits).is_valid();
  };
  const auto bad = [](const char* field, int index, unsigned bits) {
    return failure(error_code::invalid_data,
                   {field, " ", index, " has bits ", bits, "; it must be finite and not negative"});
  };
  for (int row = 0; row < tile.layout.rows(); ++row)
    if (!valid(tile.scale_bits(row))) return bad("scale", row, tile.scale_bits(row));
  for (int col = 0; col < tile.layout.cols(); ++col) {
    if (!valid(tile.step_bits(col))) return bad("step", col, tile.step_bits(col));
    if (!tile.zero(col).is_finite())
      return failure(error_code::invalid_data,
                     {"zero ", col, " has bits ", tile.zero(col).bits, "; it must be finite"});
  }
  return fits;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
