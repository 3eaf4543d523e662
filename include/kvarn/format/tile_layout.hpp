// The record: where each byte of a packed tile stands. No other file knows an offset.
//
// A tile is rows x cols numbers of one KV head; `cols` is the axis that attention contracts over:
//
//   kind    rows              cols              attention computes
//   key     group tokens      head_dim channels score[t] = sum_d q[d] K[t][d]
//   value   head_dim channels group tokens      out[d]   = sum_t p[t] V[t][d]
//
//   x^[r][c] = (code[r][c] * step[c] + zero[c]) * scale[r]
//
// A record is little endian and has no padding:
//
//   field  type                count        note
//   codes  `bits` per element  rows * cols  rows one after another; element c of a row at bit
//                                           bits*c, least significant first. 3 bits: the plane of
//                                           the low 2 bits of all rows, then that of the high bits
//   zero   binary16            cols         the value at code 0
//   step   FP8                 cols         the value of one code step
//   scale  FP8                 rows
//
// 128 x 128 at 2 bits: 4096 + 256 + 128 + 128 = 4608 bytes, 2.25 bits per element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>

#include "../config.hpp"
#include "../error.hpp"
#include "codes.hpp"

namespace kvarn {

enum class tile_kind : std::uint8_t { key, value };

// The FP8 type of steps and scales; the values stand in format ids.
enum class scale_type : std::uint8_t { ue5m3 = 0, e4m3 = 1 };

// The shape and coding of one tile: all that is needed to read a record.
struct tile_layout {
  tile_kind kind = tile_kind::key;
  int head_dim = 128;  // channels
  int group = 128;     // tokens
  int bits = 2;        // per code: 2, 3 or 4
  scale_type scale = scale_type::ue5m3;

  KVARN_INLINE constexpr int rows() const { return kind == tile_kind::key ? group : head_dim; }
  KVARN_INLINE constexpr int cols() const { return kind == tile_kind::key ? head_dim : group; }
  KVARN_INLINE constexpr int max_code() const { return (1 << bits) - 1; }

  // Codes are stored in one plane, or with 3 bits in two.
  KVARN_INLINE constexpr int planes() const { return bits == 3 ? 2 : 1; }
  KVARN_INLINE constexpr int plane_bits(int plane) const {
    return bits != 3 ? bits : plane == 0 ? 2 : 1;
  }
  // Position of a plane's bits within a code.
  KVARN_INLINE constexpr int plane_shift(int plane) const { return 2 * plane; }

  // Sizes and offsets in bytes from the start of the record.
  KVARN_INLINE constexpr std::size_t plane_row_bytes(int plane) const {
    return packed_bytes(cols(), plane_bits(plane));
  }
  KVARN_INLINE constexpr std::size_t plane_offset(int plane) const {
    return plane == 0 ? 0 : plane_row_bytes(0) * static_cast<std::size_t>(rows());
  }
  KVARN_INLINE constexpr std::size_t code_offset(int plane, int row) const {
    return plane_offset(plane) + plane_row_bytes(plane) * static_cast<std::size_t>(row);
  }
  KVARN_INLINE constexpr std::size_t zero_offset() const {
    return packed_bytes(rows() * cols(), bits);
  }
  KVARN_INLINE constexpr std::size_t step_offset() const {
    return zero_offset() + 2 * static_cast<std::size_t>(cols());
  }
  KVARN_INLINE constexpr std::size_t scale_offset() const {
    return step_offset() + static_cast<std::size_t>(cols());
  }
  KVARN_INLINE constexpr std::size_t record_bytes() const {
    return scale_offset() + static_cast<std::size_t>(rows());
  }

  KVARN_INLINE constexpr double bits_per_element() const {
    return 8.0 * static_cast<double>(record_bytes()) / (static_cast<double>(rows()) * cols());
  }

  friend constexpr bool operator==(const tile_layout&, const tile_layout&) = default;
};

static_assert(tile_layout{}.record_bytes() == 128 * 128 * 2 / 8 + 128 * 2 + 128 + 128);
static_assert(tile_layout{}.bits_per_element() == 2.25);
static_assert(tile_layout{.kind = tile_kind::value, .head_dim = 64, .bits = 3}.record_bytes() ==
              64 * 128 * 3 / 8 + 128 * 2 + 128 + 64);

// The head dimensions that have a rotation and a record.
inline constexpr int supported_head_dims[] = {64, 80, 96, 112, 128, 160, 192, 256, 512};
inline constexpr int supported_groups[] = {64, 128};
inline constexpr int supported_bits[] = {2, 3, 4};
inline constexpr int max_head_dim = 512;
inline constexpr int max_group = 128;
static_assert([] {
  for (const int head_dim : supported_head_dims)
    if (head_dim > max_head_dim || head_dim % 16 != 0) return false;  // kernels take 16 lanes
  for (const int group : supported_groups)
    if (group > max_group || group % 16 != 0) return false;
  return true;
}());

// Identifies a cache_format in memory, in files and on devices.
using format_id = std::uint64_t;

// How one layer stores its keys and values. A page holds one group of tokens: the key record and
// then the value record of KV head 0, of KV head 1, and so on.
struct cache_format {
  int key_head_dim = 128;
  int value_head_dim = 128;
  int group = 128;
  int key_bits = 2;
  int value_bits = 2;
  scale_type scale = scale_type::ue5m3;

  KVARN_INLINE constexpr tile_layout key_layout() const {
    return {tile_kind::key, key_head_dim, group, key_bits, scale};
  }
  KVARN_INLINE constexpr tile_layout value_layout() const {
    return {tile_kind::value, value_head_dim, group, value_bits, scale};
  }

  // Sizes and offsets in bytes within a page.
  KVARN_INLINE constexpr std::size_t head_bytes() const {
    return key_layout().record_bytes() + value_layout().record_bytes();
  }
  KVARN_INLINE constexpr std::size_t key_offset(int kv_head) const {
    return head_bytes() * static_cast<std::size_t>(kv_head);
  }
  KVARN_INLINE constexpr std::size_t value_offset(int kv_head) const {
    return key_offset(kv_head) + key_layout().record_bytes();
  }
  KVARN_INLINE constexpr std::size_t page_bytes(int kv_heads) const {
    return head_bytes() * static_cast<std::size_t>(kv_heads);
  }

  // From bit 0: key head_dim (16 bits), value head_dim (16), group (16), key bits (4), value bits
  // (4), scale type (4), version of the record layout (4).
  KVARN_INLINE constexpr format_id id() const {
    return static_cast<format_id>(key_head_dim) | static_cast<format_id>(value_head_dim) << 16 |
           static_cast<format_id>(group) << 32 | static_cast<format_id>(key_bits) << 48 |
           static_cast<format_id>(value_bits) << 52 | static_cast<format_id>(scale) << 56 |
           format_id{layout_version} << 60;
  }

  static constexpr unsigned layout_version = 1;

  friend constexpr bool operator==(const cache_format&, const cache_format&) = default;
};

// The fields of an id, whatever they hold; parse_format_id checks them.
KVARN_INLINE constexpr cache_format format_of_id(format_id id) {
  return {static_cast<int>(id & 0xffff),       static_cast<int>(id >> 16 & 0xffff),
          static_cast<int>(id >> 32 & 0xffff), static_cast<int>(id >> 48 & 0xf),
          static_cast<int>(id >> 52 & 0xf),    static_cast<scale_type>(id >> 56 & 0xf)};
}
static_assert(format_of_id(cache_format{192, 80, 64, 3, 4, scale_type::e4m3}.id()) ==
              cache_format{192, 80, 64, 3, 4, scale_type::e4m3});

inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

// A number and what it may be. `names`: how a message lists that, where numbers do not say it.
struct checked_field {
  const char* name;
  int value;
  std::span<const int> allowed;
  const char* names = nullptr;
};

// Ok, or what is wrong with the first field that has a value it may not have.
KVARN_COLD status check_fields(std::initializer_list<checked_field> fields) {
  for (const checked_field& field : fields) {
    bool found = false;
    for (const int candidate : field.allowed) found = found || candidate == field.value;
    if (found) continue;
    std::string message;
    append_parts(message, {field.name, " is ", field.value, "; allowed are"});
    if (field.names != nullptr) append_parts(message, {" ", field.names});
    if (field.names == nullptr)
      for (const int candidate : field.allowed) append_parts(message, {" ", candidate});
    return {error_code::invalid_format, std::move(message)};
  }
  return {};
}

inline constexpr int zero_or_one[] = {0, 1};
constexpr checked_field check_scale_type(scale_type type) {
  return {"scale type", static_cast<int>(type), zero_or_one, "0 (UE5M3) and 1 (E4M3)"};
}

}  // namespace detail

// Whether records of this shape exist.
KVARN_COLD status validate(const tile_layout& layout) {
  return detail::check_fields(
      {{"tile kind", static_cast<int>(layout.kind), detail::zero_or_one, "0 (key) and 1 (value)"},
       {"head_dim", layout.head_dim, supported_head_dims},
       {"group", layout.group, supported_groups},
       {"bits", layout.bits, supported_bits},
       detail::check_scale_type(layout.scale)});
}

KVARN_COLD status validate(const cache_format& format) {
  return detail::check_fields({{"key head_dim", format.key_head_dim, supported_head_dims},
                               {"value head_dim", format.value_head_dim, supported_head_dims},
                               {"group", format.group, supported_groups},
                               {"key bits", format.key_bits, supported_bits},
                               {"value bits", format.value_bits, supported_bits},
                               detail::check_scale_type(format.scale)});
}

// The format that an id names, or why it names none.
inline result<cache_format> parse_format_id(format_id id) {
  if (const auto version = static_cast<unsigned>(id >> 60); version != cache_format::layout_version)
    return failure(error_code::invalid_format, {"record layout version is ", version,
                                                "; allowed is ", cache_format::layout_version});
  const cache_format format = format_of_id(id);
  if (status s = validate(format); !s.ok()) return s;
  return format;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
