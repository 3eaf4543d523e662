// Writing and reading sections that end with a checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <optional>
#include <ostream>
#include <string>

#include "../config.hpp"
#include "../error.hpp"
#include "checksum.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace detail {

class section_writer {
 public:
  explicit section_writer(std::ostream& stream) : stream_(stream) {}

  void write(const void* data, std::size_t size) {
    sum_.add(data, size);
    stream_.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
  }
  template <class Value>
  void write(const Value& value) {
    write(&value, sizeof(value));
  }
  // Ends a section.
  void write_checksum() {
    const std::uint64_t value = sum_.value();
    stream_.write(reinterpret_cast<const char*>(&value), sizeof(value));
    sum_ = checksum();
  }
  status result() const {
    if (stream_.good()) return {};
    return {error_code::invalid_argument, "the stream cannot be written to"};
  }

 private:
  std::ostream& stream_;
  checksum sum_;
};

// Reads no more than what is left, and remembers the first failure.
class section_reader {
 public:
  explicit section_reader(std::istream& stream) : stream_(stream) {
    const std::istream::pos_type here = stream.tellg();
    if (here != std::istream::pos_type(-1) && stream.seekg(0, std::ios::end)) {
      left_ = static_cast<std::uint64_t>(stream.tellg() - here);
      stream.seekg(here);
    }
    if (here == std::istream::pos_type(-1) || !stream.good())
      fail(error_code::invalid_argument, "the stream cannot be read, or cannot tell its size");
  }

  bool ok() const { return !failure_; }
  // Precondition: something has failed.
  const status& failure() const { return *failure_; }
  bool fail(error_code code, const std::string& message) {
    if (!failure_) failure_.emplace(code, "cache file: " + message);
    return false;
  }

  // Whether `count` items of `size` bytes are there; else fails.
  bool has(std::uint64_t count, std::uint64_t size, const char* what) {
    if (!ok()) return false;
    if (size == 0 || count <= left_ / size) return true;
    const std::string times = count == 1 ? "" : message_of({count, " x "});
    return fail(error_code::invalid_data,
                message_of({"it ends within the ", what, ": ", times, size, " bytes are needed; ",
                            left_, " are left"}));
  }
  bool read(void* data, std::size_t size, const char* what) {
    if (size == 0 || !has(1, size, what)) return ok();
    if (!stream_.read(static_cast<char*>(data), static_cast<std::streamsize>(size)))
      return fail(error_code::invalid_data, std::string("cannot read the ") + what);
    left_ -= size;
    sum_.add(data, size);
    return true;
  }
  template <class Value>
  bool read(Value& value, const char* what) {
    return read(&value, sizeof(value), what);
  }
  // Ends a section.
  bool read_checksum(const char* what) {
    const std::uint64_t expected = sum_.value();
    std::uint64_t value = 0;
    read(value, what);
    sum_ = checksum();
    if (ok() && value != expected)
      return fail(error_code::invalid_data,
                  std::string("it is damaged: the checksum of the ") + what + " does not fit");
    return ok();
  }

 private:
  std::istream& stream_;
  std::uint64_t left_ = 0;
  checksum sum_;
  std::optional<status> failure_;
};

}  // namespace detail
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
