// Reads GGUF files, versions 2 and 3: metadata by key and tensors by name.
//
// The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file may come from
// anyone: open() and from_bytes() check every count, length, type and offset before they believe
// it, and allocate no more than a small multiple of the file's size. Little endian only.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "file_bytes.hpp"
#include "ggml_type.hpp"
#include "kvarn/error.hpp"

namespace kvarn_engine {

// The types of metadata, as they are numbered in files.
enum class gguf_type : std::uint32_t {
  uint8 = 0,
  int8 = 1,
  uint16 = 2,
  int16 = 3,
  uint32 = 4,
  int32 = 5,
  float32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  uint64 = 10,
  int64 = 11,
  float64 = 12,
};

// "uint32"; "type 99" for a number that is no type.
std::string name_of(gguf_type type);

// A tensor of a file. Views of the file's bytes: valid while a copy of the gguf_file lives.
struct gguf_tensor {
  std::string_view name;
  ggml_type type = ggml_type::f32;
  int dimensions = 0;                         // 1 to 4
  std::array<std::uint64_t, 4> extents = {};  // [0] is contiguous; 1 from `dimensions` on
  std::span<const std::byte> bytes;           // exactly its blocks

  // As a row-major matrix [rows][cols]. A matrix that maps x to W x has a row per output.
  std::uint64_t cols() const { return extents[0]; }
  std::uint64_t rows() const { return extents[1] * extents[2] * extents[3]; }
  // Whole: the reader refuses rows that end within a block.
  std::uint64_t row_bytes() const { return bytes.size() / rows(); }
};

namespace detail {
class gguf_parser;
}

// What find and get return: bool, an integer type, float, double, a string (a view of the file's
// bytes), or a std::vector of one of these for an array.
template <class T>
concept gguf_value = std::is_arithmetic_v<T> || std::same_as<T, std::string_view>;

class gguf_file {
 public:
  // Errors name the path and what is at fault: invalid_argument where the file cannot be mapped
  // (see file_bytes::map), invalid_data for its content, out_of_memory.
  static kvarn::result<gguf_file> open(const std::string& path);

  // The same from memory. `name` stands for the path in messages.
  static kvarn::result<gguf_file> from_bytes(std::vector<std::byte> bytes,
                                             const std::string& name = "GGUF");

  // The path, or what from_bytes was given.
  const std::string& name() const { return name_; }
  std::uint32_t version() const { return version_; }

  // The value of a key; nothing where the key is absent. Integers of any width convert where the
  // value fits into T, and float32 and float64 into float and double; nothing else converts.
  // Error (invalid_data) where a value does not: names the key, its type and the type wanted.
  template <class T>
  kvarn::result<std::optional<T>> find(std::string_view key) const;

  // The same for a key that must be there: its absence is an error (invalid_data).
  template <class T>
  kvarn::result<T> get(std::string_view key) const;

  // All tensors, sorted by name; one of them by name: null, or an error (invalid_data), where it
  // is absent.
  std::span<const gguf_tensor> tensors() const { return tensors_; }
  const gguf_tensor* find_tensor(std::string_view name) const;
  kvarn::result<gguf_tensor> get_tensor(std::string_view name) const;

 private:
  friend class detail::gguf_parser;

  struct entry {
    std::string_view key;
    const std::byte* values;  // the first one
    std::uint64_t count;      // 1 unless an array
    gguf_type type;           // of an array: its elements
    bool is_array;
  };

  static kvarn::result<gguf_file> parse(file_bytes bytes, const std::string& name);
  const entry* find_entry(std::string_view key) const;  // null where it is absent
  // Of an entry that is not what was wanted. `integer`: where an integer was wanted, the value that
  // may be one out of range; otherwise null.
  kvarn::status mismatch(const entry& found, const std::byte* integer,
                         const std::string& wanted) const;

  file_bytes bytes_;
  std::uint32_t version_ = 0;
  std::string name_;
  std::vector<entry> entries_;  // sorted by key
  std::vector<gguf_tensor> tensors_;
};

// implementation

namespace detail {

struct gguf_type_facts {
  std::string_view name;
  std::size_t bytes;  // of one value; of a string: the least, its length
};

inline constexpr gguf_type_facts gguf_types[] = {
    {"uint8", 1},  {"int8", 1},    {"uint16", 2},  {"int16", 2},  {"uint32", 4},
    {"int32", 4},  {"float32", 4}, {"boolean", 1}, {"string", 8}, {"array", 12},
    {"uint64", 8}, {"int64", 8},   {"float64", 8}};

constexpr bool is_type(gguf_type type) {
  return static_cast<std::size_t>(type) < std::size(gguf_types);
}

constexpr std::size_t bytes_of(gguf_type type) {
  return gguf_types[static_cast<std::size_t>(type)].bytes;
}

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

// Precondition: the whole string has been seen by the reader.
inline std::string_view load_string(const std::byte* bytes) {
  return {reinterpret_cast<const char*>(bytes + sizeof(std::uint64_t)),
          static_cast<std::size_t>(load<std::uint64_t>(bytes))};
}

// For messages: a name out of a file, short and printable.
std::string quoted(std::string_view text);

// The integer at `bytes` as a T, or nothing where it is none or does not fit.
template <class T>
std::optional<T> load_integer(gguf_type type, const std::byte* bytes) {
  const auto fit = [](auto value) -> std::optional<T> {
    if (!std::in_range<T>(value)) return std::nullopt;
    return static_cast<T>(value);
  };
  switch (type) {
    case gguf_type::uint8:
      return fit(load<std::uint8_t>(bytes));
    case gguf_type::int8:
      return fit(load<std::int8_t>(bytes));
    case gguf_type::uint16:
      return fit(load<std::uint16_t>(bytes));
    case gguf_type::int16:
      return fit(load<std::int16_t>(bytes));
    case gguf_type::uint32:
      return fit(load<std::uint32_t>(bytes));
    case gguf_type::int32:
      return fit(load<std::int32_t>(bytes));
    case gguf_type::uint64:
      return fit(load<std::uint64_t>(bytes));
    case gguf_type::int64:
      return fit(load<std::int64_t>(bytes));
    default:
      return std::nullopt;
  }
}

// A number or string as a T, or nothing where it does not convert.
template <gguf_value T>
std::optional<T> load_value(gguf_type type, const std::byte* bytes) {
  if constexpr (std::same_as<T, std::string_view>) {
    if (type == gguf_type::string) return load_string(bytes);
  } else if constexpr (std::same_as<T, bool>) {
    if (type == gguf_type::boolean) return load<std::uint8_t>(bytes) != 0;
  } else if constexpr (std::floating_point<T>) {
    if (type == gguf_type::float32) return static_cast<T>(load<float>(bytes));
    if (type == gguf_type::float64) return static_cast<T>(load<double>(bytes));
  } else {
    return load_integer<T>(type, bytes);
  }
  return std::nullopt;
}

template <class T>
inline constexpr bool is_integer = std::is_integral_v<T> && !std::same_as<T, bool>;

// What a T is called in messages.
template <class T>
std::string wanted_name() {
  if constexpr (std::same_as<T, std::string_view>)
    return "string";
  else if constexpr (std::same_as<T, bool>)
    return "boolean";
  else if constexpr (std::floating_point<T>)
    return "floating-point number";
  else if constexpr (std::integral<T>)
    return (std::signed_integral<T> ? "integer of " : "non-negative integer of ") +
           std::to_string(8 * sizeof(T)) + " bits";
  else
    return "array of " + wanted_name<typename T::value_type>();
}

}  // namespace detail

template <class T>
kvarn::result<std::optional<T>> gguf_file::find(std::string_view key) const {
  const entry* const at = find_entry(key);
  if (at == nullptr) return std::optional<T>();
  if constexpr (gguf_value<T>) {
    if (at->is_array) return mismatch(*at, nullptr, detail::wanted_name<T>());
    const auto value = detail::load_value<T>(at->type, at->values);
    if (!value)
      return mismatch(*at, detail::is_integer<T> ? at->values : nullptr, detail::wanted_name<T>());
    return value;
  } else {
    using element = typename T::value_type;
    if (!at->is_array) return mismatch(*at, nullptr, detail::wanted_name<T>());
    T values;
    values.reserve(static_cast<std::size_t>(at->count));
    const std::byte* next = at->values;
    for (std::uint64_t i = 0; i < at->count; ++i) {
      const auto value = detail::load_value<element>(at->type, next);
      if (!value)
        return mismatch(*at, detail::is_integer<element> ? next : nullptr,
                        detail::wanted_name<T>());
      values.push_back(*value);
      next += detail::bytes_of(at->type);
      if constexpr (std::same_as<element, std::string_view>) next += value->size();
    }
    return std::optional<T>(std::move(values));
  }
}

template <class T>
kvarn::result<T> gguf_file::get(std::string_view key) const {
  auto found = find<T>(key);
  if (!found) return found.why();
  if (!found.value())
    return kvarn::status(
        kvarn::error_code::invalid_data,
        name_ + ": no metadata " + detail::quoted(key) + "; wanted: " + detail::wanted_name<T>());
  return *std::move(found).value();
}

}  // namespace kvarn_engine
