// Reads a numpy .npy file (format 1.0 or 2.0) of float16 or float32 numbers.
//
// Accepted: little endian ('<f2', '<f4'), C order, 1 to 4 dimensions, exactly as many bytes as the
// shape says. Anything else throws std::runtime_error with the file's name and the value at fault.
// The header is believed only after it has been compared with the file's size, so that no file
// makes the reader allocate more than a small multiple of its own size.
#pragma once

#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <ios>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kvarn/format/float16.hpp"

namespace kvarn_examples {

struct npy_array {
  std::vector<std::size_t> shape;  // outermost dimension first
  std::vector<float> values;       // the product of the shape, last dimension contiguous
};

npy_array read_npy(const std::string& path);

// implementation

namespace detail {

// The header: a Python dictionary literal with the keys descr, fortran_order and shape.
class npy_header {
 public:
  npy_header(const std::string& path, std::string_view text) : path_(path), rest_(text) {
    bool has_descr = false, has_order = false, has_shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && !has_descr) {
        has_descr = true;
        descr = quoted();
      } else if (key == "fortran_order" && !has_order) {
        has_order = true;
        fortran_order = boolean();
      } else if (key == "shape" && !has_shape) {
        has_shape = true;
        shape = tuple();
      } else {
        fail("unknown or repeated key '" + key + "'");
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (!rest_.empty()) fail("text after the dictionary");
    if (!has_descr || !has_order || !has_shape) fail("no descr, fortran_order or shape");
  }

  std::string descr;
  bool fortran_order = false;
  std::vector<std::size_t> shape;

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(path_ + ": npy header: " + what);
  }
  void skip_space() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\n')) rest_.remove_prefix(1);
  }
  bool accept(char wanted) {
    skip_space();
    if (rest_.empty() || rest_[0] != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char wanted) {
    if (!accept(wanted))
      fail(std::string("expected '") + wanted + "' before '" + std::string(rest_.substr(0, 20)) +
           "'");
  }
  std::string quoted() {
    skip_space();
    const char quote = rest_.empty() ? '\0' : rest_[0];
    if (quote != '\'' && quote != '"')
      fail("expected a string before '" + std::string(rest_.substr(0, 20)) + "'");
    const std::size_t end = rest_.find(quote, 1);
    if (end == std::string_view::npos) fail("a string without an end");
    std::string text(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return text;
  }
  bool boolean() {
    skip_space();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (rest_.substr(0, word.size()) == word) {
        rest_.remove_prefix(word.size());
        return value;
      }
    }
    fail("fortran_order is neither True nor False");
  }
  std::vector<std::size_t> tuple() {
    std::vector<std::size_t> extents;
    expect('(');
    while (!accept(')')) {
      skip_space();
      std::size_t extent = 0;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), extent);
      if (error != std::errc())
        fail("shape has '" + std::string(rest_.substr(0, 20)) + "'; it must be whole numbers");
      rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
      if (extents.size() == 4) fail("shape has more than 4 dimensions");
      extents.push_back(extent);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    if (extents.empty()) fail("shape has no dimension; 1 to 4 are read");
    return extents;
  }

  const std::string& path_;
  std::string_view rest_;
};

}  // namespace detail

inline npy_array read_npy(const std::string& path) {
  const auto fail = [&path](const std::string& what) {
    throw std::runtime_error(path + ": " + what);
  };
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff end = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  // A directory can be opened on some systems and claims the largest possible size.
  if (end < 0 || !file.seekg(0) || (end > 0 && file.peek() == std::ifstream::traits_type::eof()))
    fail("cannot be opened or is not a regular file");
  std::uint64_t left = static_cast<std::uint64_t>(end);  // bytes not yet read

  const auto read = [&](char* bytes, std::uint64_t count, const char* what) {
    if (count > left)
      fail(std::string("ends within the ") + what + ": " + std::to_string(count) +
           " bytes expected, " + std::to_string(left) + " left");
    if (!file.read(bytes, static_cast<std::streamsize>(count)))
      fail(std::string("cannot read the ") + what);
    left -= count;
  };
  const auto little_endian = [](const char* bytes, int count) {
    std::uint32_t value = 0;
    for (int i = 0; i < count; ++i)
      value |= static_cast<std::uint32_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    return value;
  };

  char start[8];
  read(start, sizeof start, "npy signature");
  if (std::string_view(start, 6) != std::string_view("\x93NUMPY", 6))
    fail("does not start with the npy signature");
  const int major = static_cast<unsigned char>(start[6]);
  const int minor = static_cast<unsigned char>(start[7]);
  if ((major != 1 && major != 2) || minor != 0)
    fail("npy format is " + std::to_string(major) + "." + std::to_string(minor) +
         "; 1.0 and 2.0 are read");

  char length[4];
  const int length_bytes = major == 1 ? 2 : 4;
  read(length, static_cast<std::uint64_t>(length_bytes), "npy header length");
  const std::uint32_t header_bytes = little_endian(length, length_bytes);
  if (header_bytes > left)
    fail("npy header length is " + std::to_string(header_bytes) + "; the file has " +
         std::to_string(left) + " bytes left");
  std::string text(header_bytes, '\0');
  read(text.data(), text.size(), "npy header");
  const detail::npy_header header(path, text);

  if (header.descr != "<f2" && header.descr != "<f4")
    fail("descr is '" + header.descr + "'; '<f2' and '<f4' are read");
  if (header.fortran_order) fail("fortran_order is True; C order is read");
  const int item = header.descr == "<f2" ? 2 : 4;
  const std::uint64_t items = left / static_cast<std::uint64_t>(item);
  std::uint64_t count = 1;
  for (const std::size_t extent : header.shape) {
    if (extent == 0) fail("shape has an extent of 0; all must be positive");
    if (count > items / extent)  // compared by division: a product may overflow
      fail("shape extent " + std::to_string(extent) + " needs more than the " +
           std::to_string(left) + " bytes of data in the file");
    count *= extent;
  }
  if (count * static_cast<std::uint64_t>(item) != left)
    fail("shape needs " + std::to_string(count * static_cast<std::uint64_t>(item)) +
         " bytes of data; the file has " + std::to_string(left));

  npy_array array{header.shape, std::vector<float>(static_cast<std::size_t>(count))};
  std::vector<char> bytes(static_cast<std::size_t>(left));
  read(bytes.data(), bytes.size(), "data");
  for (std::size_t i = 0; i < array.values.size(); ++i) {
    const std::uint32_t bits = little_endian(&bytes[i * static_cast<std::size_t>(item)], item);
    array.values[i] =
        item == 2 ? static_cast<float>(kvarn::float16::from_bits(static_cast<std::uint16_t>(bits)))
                  : std::bit_cast<float>(bits);
  }
  return array;
}

}  // namespace kvarn_examples
