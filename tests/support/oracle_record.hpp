// Records read and written from their description alone, bit by bit. For tests; of the library it
// takes the name of a layout, none of its offsets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvarn/format/tile_layout.hpp"

namespace kvarn_test::oracle {

// The fields of one record; codes are row-major.
struct record_fields {
  std::vector<int> codes;
  std::vector<int> zero_bits;   // cols, binary16
  std::vector<int> step_code;   // cols, FP8
  std::vector<int> scale_code;  // rows, FP8

  friend bool operator==(const record_fields&, const record_fields&) = default;
};

struct extent {
  int rows;
  int cols;
};

inline extent extent_of(const kvarn::tile_layout& layout) {
  if (layout.kind == kvarn::tile_kind::key) return {layout.group, layout.head_dim};
  return {layout.head_dim, layout.group};
}

// The bits of a record in the order of the format: for each, where it belongs. Calls
// bit(field value, position in the value) for every bit from the first byte on.
template <class Fields, class Bit>
void walk_record(Fields& fields, const kvarn::tile_layout& layout, Bit bit) {
  const auto [rows, cols] = extent_of(layout);
  fields.codes.resize(static_cast<std::size_t>(rows * cols));
  fields.zero_bits.resize(static_cast<std::size_t>(cols));
  fields.step_code.resize(static_cast<std::size_t>(cols));
  fields.scale_code.resize(static_cast<std::size_t>(rows));
  const int low_bits = layout.bits == 3 ? 2 : layout.bits;
  for (int& code : fields.codes)
    for (int b = 0; b < low_bits; ++b) bit(code, b);
  if (layout.bits == 3)
    for (int& code : fields.codes) bit(code, 2);
  for (int& zero : fields.zero_bits)
    for (int b = 0; b < 16; ++b) bit(zero, b);
  for (int& step : fields.step_code)
    for (int b = 0; b < 8; ++b) bit(step, b);
  for (int& scale : fields.scale_code)
    for (int b = 0; b < 8; ++b) bit(scale, b);
}

inline record_fields read_record(const std::byte* record, const kvarn::tile_layout& layout) {
  record_fields fields;
  std::size_t position = 0;
  walk_record(fields, layout, [&](int& value, int b) {
    const auto byte = static_cast<unsigned>(record[position / 8]);
    value |= static_cast<int>(byte >> (position % 8) & 1u) << b;
    ++position;
  });
  return fields;
}

inline std::vector<std::byte> write_record(record_fields fields, const kvarn::tile_layout& layout) {
  std::vector<std::byte> record;
  std::size_t position = 0;
  walk_record(fields, layout, [&](int& value, int b) {
    if (position % 8 == 0) record.push_back(std::byte{0});
    record.back() |= static_cast<std::byte>((value >> b & 1) << (position % 8));
    ++position;
  });
  return record;
}

}  // namespace kvarn_test::oracle
