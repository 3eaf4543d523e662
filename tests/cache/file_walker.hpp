// Reads a file of sequences by docs/cache-file.md alone: field offsets come from its tables.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "kvarn/cache/checksum.hpp"
#include "kvarn/format/tile_layout.hpp"

namespace kvarn_test {

struct file_field {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// A table of fields of the page, by the heading above it.
class field_table {
 public:
  explicit field_table(const std::string& heading) {
    std::ifstream page(std::string(KVARN_TEST_DATA_DIR) + "/../../docs/cache-file.md");
    std::string line;
    while (std::getline(page, line) && line != heading) continue;
    EXPECT_EQ(line, heading);
    while (std::getline(page, line) && line.rfind("| field |", 0) != 0) continue;
    std::getline(page, line);  // the rule
    while (std::getline(page, line) && !line.empty()) {
      std::stringstream cells(line);
      std::string name, offset, bytes;
      std::getline(cells, name, '|');
      std::getline(cells, name, '|');
      std::getline(cells, offset, '|');
      std::getline(cells, bytes, '|');
      names.push_back(name.substr(1, name.size() - 2));
      fields.push_back({std::stoul(offset), std::stoul(bytes)});
    }
  }

  std::size_t size() const { return fields.back().offset + fields.back().bytes; }
  file_field at(const std::string& name) const {
    const auto found = std::find(names.begin(), names.end(), name);
    EXPECT_NE(found, names.end()) << name;
    return fields[static_cast<std::size_t>(found - names.begin())];
  }

  std::vector<std::string> names;
  std::vector<file_field> fields;
};

class file_walker {
 public:
  struct section {
    std::string kind;
    std::size_t begin, end;  // of its contents; the checksum follows
  };

  explicit file_walker(std::string bytes) : file(std::move(bytes)) {
    const auto layers = read(header, "layers");
    const auto heads = read(header, "KV heads");
    const auto key_dim = read(header, "key head dim");
    const auto value_dim = read(header, "value head dim");
    const auto sink = read(header, "sink");
    const std::uint64_t width = read(header, "exact type") == 0 ? 4 : 2;
    std::vector<std::uint64_t> ids;
    for (std::uint64_t layer = 0; layer < layers; ++layer)
      ids.push_back(number(header.size() + 8 * layer, 8));
    const auto pages = read(header, "pages");
    const auto sequences = read(header, "sequences");
    add("header", header.size() + 8 * layers);
    std::uint64_t page_bytes = 0;
    for (const auto id : ids)
      if (id != 0)
        page_bytes += kvarn::parse_format_id(id).value().page_bytes(static_cast<int>(heads));
    for (std::uint64_t i = 0; i < pages; ++i) add("page", page_bytes);
    for (std::uint64_t i = 0; i < sequences; ++i) {
      const auto length = read(sequence, "length");
      const auto first = read(sequence, "first");
      const auto entries = read(sequence, "pages");
      const bool moments = read(sequence, "has moments") == 1;
      auto end = first;
      for (std::uint64_t k = 0; k < entries; ++k) {
        const auto at = next + sequence.size() + k * entry.size();
        EXPECT_EQ(number(at + entry.at("position").offset, 8), end);
        end += number(at + entry.at("count").offset, 4);
      }
      add("sequence", sequence.size() + entries * entry.size());
      for (const auto id : ids) {
        const auto from = id == 0 ? first : end;
        const auto tokens = (std::min)(length, sink) + (length > from ? length - from : 0);
        add("exact rows", tokens * heads * (key_dim + value_dim) * width);
      }
      if (moments) add("query moments", layers * heads * (8 + 4 * key_dim * key_dim));
    }
    EXPECT_EQ(next, file.size());
  }

  std::uint64_t number(std::size_t at, std::size_t bytes) const {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i)
      value |= std::uint64_t{static_cast<unsigned char>(file.at(at + i))} << (8 * i);
    return value;
  }

  // The file with one field of a section changed, and a checksum that fits.
  std::string changed(const section& s, const file_field& field, std::uint64_t value) const {
    std::string copy = file;
    for (std::size_t i = 0; i < field.bytes; ++i)
      copy[s.begin + field.offset + i] = static_cast<char>(value >> (8 * i));
    kvarn::checksum sum;
    sum.add(copy.data() + s.begin, s.end - s.begin);
    const std::uint64_t check = sum.value();
    for (std::size_t i = 0; i < 8; ++i) copy[s.end + i] = static_cast<char>(check >> (8 * i));
    return copy;
  }

  const section& find(const std::string& kind) const {
    for (const section& s : sections)
      if (s.kind == kind) return s;
    ADD_FAILURE() << "no section " << kind;
    return sections.front();
  }

  const field_table header{"### Header"};
  const field_table sequence{"### Sequence header"};
  const field_table entry{"### Entry of the list of pages"};
  std::string file;
  std::vector<section> sections;

 private:
  std::uint64_t read(const field_table& table, const std::string& name) const {
    return number(next + table.at(name).offset, table.at(name).bytes);
  }
  void add(const char* kind, std::uint64_t bytes) {
    const section s{kind, next, next + static_cast<std::size_t>(bytes)};
    kvarn::checksum sum;
    sum.add(file.data() + s.begin, s.end - s.begin);
    EXPECT_EQ(number(s.end, 8), sum.value()) << kind;
    sections.push_back(s);
    next = s.end + 8;
  }

  std::size_t next = 0;
};

}  // namespace kvarn_test
