// docs/format.md says what the code does: its tables, its matrices and its reference decoder.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "kvarn/codec/hadamard.hpp"
#include "kvarn/codec/tile_codec.hpp"
#include "kvarn/format/float16.hpp"
#include "kvarn/format/float8.hpp"
#include "kvarn/format/tile_layout.hpp"
#include "support/layouts.hpp"

// The functions below are the text of the document.
namespace document {
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#endif
#include "reference_decoder.inc"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
}  // namespace document

namespace {

using kvarn::cache_format;
using kvarn::scale_type;
using kvarn::tile_kind;
using kvarn::tile_layout;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::string tests_dir = std::string(KVARN_TEST_DATA_DIR) + "/../";

const std::string& text() {
  static const std::string content = read_file(tests_dir + "../docs/format.md");
  return content;
}

using table = std::vector<std::map<std::string, std::string>>;

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::stringstream stream(line.substr(1));
  for (std::string cell; std::getline(stream, cell, '|');) {
    const auto first = cell.find_first_not_of(' ');
    const auto last = cell.find_last_not_of(' ');
    cells.push_back(first == std::string::npos ? "" : cell.substr(first, last - first + 1));
  }
  return cells;
}

// The table whose header line is `header`: one map from column name to cell for each row.
table find_table(const std::string& header) {
  table rows;
  std::stringstream stream(text());
  std::string line;
  while (std::getline(stream, line))
    if (line == header) break;
  EXPECT_EQ(line, header) << "no such table";
  std::getline(stream, line);  // the rule below the header
  const auto names = cells_of(header);
  while (std::getline(stream, line) && !line.empty()) {
    const auto cells = cells_of(line);
    EXPECT_EQ(cells.size(), names.size()) << line;
    auto& row = rows.emplace_back();
    for (std::size_t i = 0; i < (std::min)(cells.size(), names.size()); ++i)
      row[names[i]] = cells[i];
  }
  return rows;
}

std::vector<int> numbers_in(const std::string& cell) {
  std::vector<int> numbers;
  std::stringstream stream(cell);
  for (std::string each; std::getline(stream, each, ',');) numbers.push_back(std::stoi(each));
  return numbers;
}

// The contents of the fenced blocks that open with ```LANGUAGE.
std::vector<std::string> blocks(const std::string& language) {
  std::vector<std::string> found;
  const std::string fence = "```" + language + "\n";
  for (auto at = text().find(fence); at != std::string::npos; at = text().find(fence, at + 1)) {
    const auto start = at + fence.size();
    found.push_back(text().substr(start, text().find("```", start) - start));
  }
  return found;
}

TEST(FormatDocument, AllowedParameters) {
  auto rows = find_table("| parameter | allowed |");
  ASSERT_EQ(rows.size(), 3u);
  const auto expect = [](const std::string& cell, auto& allowed) {
    EXPECT_EQ(numbers_in(cell), std::vector<int>(std::begin(allowed), std::end(allowed)));
  };
  expect(rows[0]["allowed"], kvarn::supported_head_dims);
  expect(rows[1]["allowed"], kvarn::supported_groups);
  expect(rows[2]["allowed"], kvarn::supported_bits);
}

TEST(FormatDocument, Records) {
  auto rows =
      find_table("| kind | D | G | bits | zero | step | scale | record | bits per element |");
  ASSERT_GE(rows.size(), 20u);
  std::set<int> head_dims, groups, bits;
  for (auto& row : rows) {
    ASSERT_TRUE(row["kind"] == "key" || row["kind"] == "value");
    const tile_layout layout{row["kind"] == "key" ? tile_kind::key : tile_kind::value,
                             std::stoi(row["D"]), std::stoi(row["G"]), std::stoi(row["bits"])};
    ASSERT_TRUE(kvarn::validate(layout).ok());
    head_dims.insert(layout.head_dim);
    groups.insert(layout.group);
    bits.insert(layout.bits);
    EXPECT_EQ(std::stoul(row["zero"]), layout.zero_offset());
    EXPECT_EQ(std::stoul(row["step"]), layout.step_offset());
    EXPECT_EQ(std::stoul(row["scale"]), layout.scale_offset());
    EXPECT_EQ(std::stoul(row["record"]), layout.record_bytes());
    EXPECT_NEAR(std::stod(row["bits per element"]), layout.bits_per_element(), 0.500001e-4);
  }
  EXPECT_EQ(head_dims.size(), std::size(kvarn::supported_head_dims));
  EXPECT_EQ(groups.size(), std::size(kvarn::supported_groups));
  EXPECT_EQ(bits.size(), std::size(kvarn::supported_bits));
}

TEST(FormatDocument, NumberTypes) {
  auto rows = find_table(
      "| type | sign | exponent bits | mantissa bits | bias | smallest code | smallest | largest "
      "code | largest |");
  ASSERT_EQ(rows.size(), 3u);
  const auto expect = [&](std::size_t index, const std::string& type, int width, auto number) {
    auto& row = rows[index];
    using T = decltype(number);
    using pattern = decltype(T::bits);
    const auto value_of = [](unsigned long code) {
      return static_cast<double>(static_cast<float>(T::from_bits(static_cast<pattern>(code))));
    };
    ASSERT_EQ(row["type"], type);
    const int exponent_bits = std::stoi(row["exponent bits"]);
    const int mantissa_bits = std::stoi(row["mantissa bits"]);
    EXPECT_EQ(std::stoi(row["sign"]) + exponent_bits + mantissa_bits, width);
    EXPECT_EQ(std::stoi(row["bias"]), (1 << (exponent_bits - 1)) - 1);
    const auto smallest = std::stoul(row["smallest code"], nullptr, 16);
    const auto largest = std::stoul(row["largest code"], nullptr, 16);
    EXPECT_EQ(smallest, 1u);
    EXPECT_EQ(std::stod(row["smallest"]), value_of(smallest));
    EXPECT_EQ(std::stod(row["largest"]), value_of(largest));
    for (auto code = smallest; code <= largest; ++code)
      ASSERT_EQ(document::number(static_cast<unsigned>(code), exponent_bits, mantissa_bits),
                value_of(code));
    EXPECT_FALSE(std::isfinite(value_of(largest + 1)));
  };
  expect(0, "binary16", 16, kvarn::float16());
  expect(1, "UE5M3", 8, kvarn::ue5m3());
  expect(2, "E4M3", 8, kvarn::e4m3());
}

TEST(FormatDocument, Float8Codes) {
  auto rows = find_table("| code | UE5M3 | E4M3 |");
  ASSERT_GE(rows.size(), 15u);
  for (auto& row : rows) {
    const auto code = static_cast<std::uint8_t>(std::stoul(row["code"], nullptr, 16));
    const auto expect = [&](const std::string& cell, auto number) {
      ASSERT_EQ(number.is_valid(), cell != "invalid") << row["code"];
      if (number.is_valid()) {
        EXPECT_EQ(std::stod(cell), static_cast<double>(static_cast<float>(number)));
      }
    };
    expect(row["UE5M3"], kvarn::ue5m3::from_bits(code));
    expect(row["E4M3"], kvarn::e4m3::from_bits(code));
  }
}

TEST(FormatDocument, FormatIdFields) {
  auto rows = find_table("| field | first bit | bits | value |");
  ASSERT_EQ(rows.size(), 7u);
  const cache_format format{192, 80, 64, 4, 3, scale_type::e4m3};
  const std::uint64_t expected[] = {192, 80, 64, 4, 3, 1, cache_format::layout_version};
  int next_bit = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int first = std::stoi(rows[i]["first bit"]);
    const int bits = std::stoi(rows[i]["bits"]);
    EXPECT_EQ(first, next_bit);
    next_bit = first + bits;
    EXPECT_EQ(format.id() >> first & ((std::uint64_t{1} << bits) - 1), expected[i]);
  }
  EXPECT_EQ(next_bit, 64);
  EXPECT_EQ(rows.back()["value"].substr(0, 1), std::to_string(cache_format::layout_version));
}

TEST(FormatDocument, Pages) {
  auto rows = find_table(
      "| key D | value D | G | key bits | value bits | scale type | format id | value record at | "
      "bytes per head | bits per element |");
  ASSERT_GE(rows.size(), 5u);
  for (auto& row : rows) {
    const cache_format format{std::stoi(row["key D"]),
                              std::stoi(row["value D"]),
                              std::stoi(row["G"]),
                              std::stoi(row["key bits"]),
                              std::stoi(row["value bits"]),
                              row["scale type"] == "E4M3" ? scale_type::e4m3 : scale_type::ue5m3};
    ASSERT_TRUE(kvarn::validate(format).ok());
    EXPECT_EQ(std::stoull(row["format id"], nullptr, 16), format.id());
    EXPECT_EQ(std::stoul(row["value record at"]), format.value_offset(0));
    EXPECT_EQ(std::stoul(row["bytes per head"]), format.head_bytes());
    const double elements =
        static_cast<double>(format.group) * (format.key_head_dim + format.value_head_dim);
    EXPECT_NEAR(std::stod(row["bits per element"]),
                8.0 * static_cast<double>(format.page_bytes(1)) / elements, 0.500001e-4);
  }
}

// The matrices of the document, put together as it says.
TEST(FormatDocument, Rotation) {
  std::map<int, std::vector<std::string>> conference;  // by m
  for (const std::string& block : blocks("text")) {
    std::stringstream stream(block);
    std::vector<std::string> rows;
    for (std::string row; std::getline(stream, row);) rows.push_back(row);
    const int m = 2 * static_cast<int>(rows.size());
    EXPECT_NE(text().find("m = " + std::to_string(m) + ":\n\n```text\n" + block),
              std::string::npos);
    conference[m] = rows;
  }
  ASSERT_EQ(conference.size(), 3u);

  // "+ + / + -" and so on, by the sign of C.
  std::map<char, std::string> block_of;
  for (auto& row : find_table("| C[i][j] | block of H_m |"))
    for (const char c : row["block of H_m"])
      if (c == '+' || c == '-') block_of[row["C[i][j]"][0]] += c;

  std::vector<int> head_dims;
  for (auto& row : find_table("| D | m | 2^k |")) {
    const int d = std::stoi(row["D"]);
    const int m = std::stoi(row["m"]);
    const int block = std::stoi(row["2^k"]);
    head_dims.push_back(d);
    ASSERT_EQ(m * block, d);
    for (int j = 0; j < d; ++j) {
      std::vector<float> column(static_cast<std::size_t>(d), 0.0f);
      column[static_cast<std::size_t>(j)] = 1.0f;
      kvarn::hadamard_unnormalized(column.data(), d);
      for (int i = 0; i < d; ++i) {
        const auto p = static_cast<std::size_t>(i / block);
        const auto q = static_cast<std::size_t>(j / block);
        int sign = std::popcount(static_cast<unsigned>((i % block) & (j % block))) % 2 ? -1 : 1;
        if (m != 1) {
          const std::string& signs = block_of.at(conference.at(m).at(p / 2).at(q / 2));
          ASSERT_EQ(signs.size(), 4u);
          if (signs[2 * (p % 2) + q % 2] == '-') sign = -sign;
        }
        ASSERT_EQ(column[static_cast<std::size_t>(i)], static_cast<float>(sign))
            << d << " " << i << " " << j;
      }
    }
  }
  EXPECT_EQ(head_dims, std::vector<int>(std::begin(kvarn::supported_head_dims),
                                        std::end(kvarn::supported_head_dims)));
}

TEST(FormatDocument, ReferenceDecoderIsTheOneThatIsTested) {
  const auto code = blocks("cpp");
  ASSERT_EQ(code.size(), 1u);
  EXPECT_EQ(code[0], read_file(tests_dir + "format/reference_decoder.inc"));
}

TEST(FormatDocument, ReferenceDecoderGivesTheSameBits) {
  std::mt19937 random(5);
  for (const tile_layout& layout : kvarn_test::all_layouts()) {
    std::vector<unsigned char> record(layout.record_bytes());
    for (auto& byte : record) byte = static_cast<unsigned char>(random());
    // Random bytes, but valid: finite zeros, steps and scales that are not negative.
    const unsigned char largest = layout.scale == scale_type::ue5m3 ? 0xf7 : 0x7e;
    for (std::size_t i = layout.step_offset(); i < record.size(); ++i)
      record[i] = (std::min)(record[i], largest);
    for (std::size_t i = layout.zero_offset() + 1; i < layout.step_offset(); i += 2)
      if ((record[i] & 0x7c) == 0x7c) record[i] = static_cast<unsigned char>(record[i] & 0xbf);

    const kvarn::const_tile_view tile{reinterpret_cast<const std::byte*>(record.data()), layout};
    ASSERT_TRUE(kvarn::validate_record(tile, record.size()).ok());
    const int cols = layout.cols();
    std::vector<float> decoded(static_cast<std::size_t>(layout.rows() * cols));
    document::decode_record(record.data(), layout.rows(), cols, layout.bits,
                            layout.scale == scale_type::ue5m3 ? 5 : 4, decoded.data());
    std::vector<float> row(static_cast<std::size_t>(cols));
    for (int r = 0; r < layout.rows(); ++r) {
      kvarn::decode_row(tile, r, row.data());
      for (int c = 0; c < cols; ++c)
        ASSERT_EQ(kvarn::bits_of(row[static_cast<std::size_t>(c)]),
                  kvarn::bits_of(decoded[static_cast<std::size_t>(r * cols + c)]))
            << kvarn_test::name_of(layout) << " " << r << " " << c;
    }
  }
}

}  // namespace
