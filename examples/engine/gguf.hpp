// Reads GGUF files, versions 2 and 3: metadata by key and tensors by name.
//
// The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file may come from
// anyone: open() and from_bytes() check every count, length, type and offset before they believe
// it, and allocate no more than a small multiple of the file's size. Little endian only.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
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

static_assert(std::endian::native == std::endian::little,
              "GGUF files are little endian, and are read as they stand in memory");

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
  friend class gguf_parser;

  struct entry {
    std::string_view key;
    const std::byte* values;  // the first one
    std::uint64_t count;      // 1 unless an array
    gguf_type type;           // of an array: its elements
    bool is_array;
  };

  static kvarn::result<gguf_file> parse(file_bytes bytes, const std::string& name);

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
inline std::string quoted(std::string_view text) {
  constexpr std::size_t longest = 80;
  std::string shown = "'";
  for (const char c : text.substr(0, longest))
    shown += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return shown + (text.size() > longest ? "...'" : "'");
}

// The integer at `bytes` as a T, or nothing where it is none or does not fit.
template <std::integral T>
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

// One pass over a file. Throws kvarn::error; gguf_file::parse makes a status of it.
class gguf_parser {
 public:
  gguf_parser(gguf_file& file, std::span<const std::byte> bytes) : file_(file), bytes_(bytes) {}

  void run() {
    read_header();
    read_metadata();
    read_tensors();
    place_tensors();
  }

 private:
  // Limits of the format.
  static constexpr std::size_t longest_key = 65535;
  static constexpr std::uint32_t most_dimensions = 4;

  // The least bytes that a count stands for: a count beyond what they allow is refused before
  // anything is allocated for it.
  static constexpr std::size_t least_entry = 8 + 4 + 1;  // key, type, value
  static constexpr std::size_t least_tensor =
      8 + 4 + 8 + 4 + 8;  // name, dimensions, extent, type, offset

  [[noreturn]] void fail(const std::string& what) const {
    throw kvarn::error(kvarn::error_code::invalid_data, file_.name_ + ": " + what);
  }

  std::size_t left() const { return bytes_.size() - at_; }

  const std::byte* take(std::uint64_t count, const std::string& what) {
    if (count > left())
      fail("ends within " + what + ": " + std::to_string(count) + " bytes needed at byte " +
           std::to_string(at_) + ", " + std::to_string(left()) + " are left");
    const std::byte* const start = bytes_.data() + at_;
    at_ += static_cast<std::size_t>(count);
    return start;
  }

  template <class T>
  T read(const std::string& what) {
    return detail::load<T>(take(sizeof(T), what));
  }

  std::string_view read_string(const std::string& what) {
    const auto length = read<std::uint64_t>("the length of " + what);
    return {reinterpret_cast<const char*>(take(length, what)), static_cast<std::size_t>(length)};
  }

  std::uint64_t read_count(const std::string& what, std::size_t least_bytes) {
    const auto count = read<std::uint64_t>("the number of " + what);
    if (count > bytes_.size() / least_bytes)
      fail("the number of " + what + " is " + std::to_string(count) + "; " +
           std::to_string(bytes_.size()) + " bytes cannot hold more than " +
           std::to_string(bytes_.size() / least_bytes));
    return count;
  }

  void read_header() {
    if (std::memcmp(take(4, "the signature"), "GGUF", 4) != 0)
      fail("does not start with the signature GGUF");
    file_.version_ = read<std::uint32_t>("the version");
    if (file_.version_ == 0x02000000 || file_.version_ == 0x03000000)
      fail("is big endian; little-endian files are read");
    if (file_.version_ != 2 && file_.version_ != 3)
      fail("is of GGUF version " + std::to_string(file_.version_) + "; 2 and 3 are read");
    tensors_ = read_count("tensors", least_tensor);
    entries_ = read_count("metadata keys", least_entry);
  }

  void read_metadata() {
    file_.entries_.reserve(static_cast<std::size_t>(entries_));
    for (std::uint64_t i = 0; i < entries_; ++i) {
      const std::string_view key = read_string("metadata key " + std::to_string(i));
      if (key.size() > longest_key)
        fail("metadata key " + std::to_string(i) + " has " + std::to_string(key.size()) +
             " bytes; at most " + std::to_string(longest_key) + " are allowed");
      file_.entries_.push_back(read_value(key));
    }
    std::ranges::sort(file_.entries_, {}, &gguf_file::entry::key);
    const auto twice = std::ranges::adjacent_find(file_.entries_, {}, &gguf_file::entry::key);
    if (twice != file_.entries_.end())
      fail("metadata key " + detail::quoted(twice->key) + " stands there twice");
  }

  gguf_type read_type(const std::string& what) {
    const auto type = read<gguf_type>("the type of " + what);
    if (!detail::is_type(type))
      fail(what + " has " + name_of(type) + "; types 0 to " +
           std::to_string(std::size(detail::gguf_types) - 1) + " are known");
    return type;
  }

  gguf_file::entry read_value(std::string_view key) {
    const std::string what = "metadata " + detail::quoted(key);
    gguf_file::entry entry{key, nullptr, 1, read_type(what), false};
    if (entry.type == gguf_type::array) {
      entry.is_array = true;
      entry.type = read_type("the elements of " + what);
      if (entry.type == gguf_type::array) fail(what + " is an array of arrays, which is not read");
      entry.count = read_count("elements of " + what, detail::bytes_of(entry.type));
    }
    entry.values = bytes_.data() + at_;
    if (entry.type == gguf_type::string) {
      for (std::uint64_t i = 0; i < entry.count; ++i) read_string(what);
      return entry;
    }
    take(entry.count * detail::bytes_of(entry.type), what);  // read_count bounds the product
    if (entry.type == gguf_type::boolean)
      for (std::uint64_t i = 0; i < entry.count; ++i)
        if (entry.values[i] > std::byte{1})
          fail(what + " has a boolean of " + std::to_string(std::to_integer<int>(entry.values[i])) +
               "; 0 and 1 are allowed");
    return entry;
  }

  void read_tensors() {
    file_.tensors_.reserve(static_cast<std::size_t>(tensors_));
    for (std::uint64_t i = 0; i < tensors_; ++i) file_.tensors_.push_back(read_tensor(i));
  }

  // Its `bytes` start at the beginning of the data for now: the size of the tensor, and the offset
  // in offsets_.
  gguf_tensor read_tensor(std::uint64_t index) {
    gguf_tensor tensor;
    tensor.name = read_string("the name of tensor " + std::to_string(index));
    const std::string what = "tensor " + detail::quoted(tensor.name);
    const auto dimensions = read<std::uint32_t>("the dimensions of " + what);
    if (dimensions == 0 || dimensions > most_dimensions)
      fail(what + " has " + std::to_string(dimensions) + " dimensions; 1 to " +
           std::to_string(most_dimensions) + " are allowed");
    tensor.dimensions = static_cast<int>(dimensions);
    tensor.extents.fill(1);
    for (std::uint32_t d = 0; d < dimensions; ++d)
      tensor.extents[d] = read<std::uint64_t>("an extent of " + what);
    tensor.type = read<ggml_type>("the type of " + what);
    offsets_.push_back(read<std::uint64_t>("the offset of " + what));
    sizes_.push_back(size_of(tensor, what));
    return tensor;
  }

  std::uint64_t size_of(const gguf_tensor& tensor, const std::string& what) const {
    const ggml_block* const block = find_block(tensor.type);
    if (block == nullptr) fail(what + " has the unknown " + name_of(tensor.type));
    if (tensor.cols() % block->elements != 0)
      fail(what + " has rows of " + std::to_string(tensor.cols()) + "; blocks of " +
           std::string(block->name) + " have " + std::to_string(block->elements));
    std::uint64_t blocks = tensor.cols() / block->elements;
    const std::uint64_t most = bytes_.size() / block->bytes;
    for (std::size_t d = 0; d < tensor.extents.size(); ++d) {
      const std::uint64_t extent = d == 0 ? blocks : tensor.extents[d];
      if (extent == 0) fail(what + " has an extent of 0; all must be positive");
      if (d == 0) continue;
      if (blocks > most / extent)
        blocks = most + 1;  // compared by division: a product overflows
      else
        blocks *= extent;
    }
    if (blocks > most)
      fail(what + " has more elements than the " + std::to_string(bytes_.size()) +
           " bytes of the file hold");
    return blocks * block->bytes;
  }

  std::uint64_t alignment() const {
    const auto found = file_.find<std::uint32_t>("general.alignment");
    found.why().or_throw();
    const std::uint32_t alignment = found.value().value_or(32);
    if (alignment < 8 || !std::has_single_bit(alignment))
      fail("general.alignment is " + std::to_string(alignment) +
           "; powers of two from 8 on are allowed");
    return alignment;
  }

  void place_tensors() {
    const std::uint64_t alignment = this->alignment();
    // Without tensors the file may end before the padding.
    const std::uint64_t start =
        (std::min)((at_ + alignment - 1) / alignment * alignment, std::uint64_t{bytes_.size()});
    const std::uint64_t room = bytes_.size() - start;
    std::vector<std::size_t> order(file_.tensors_.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
      gguf_tensor& tensor = file_.tensors_[i];
      const std::string what = "tensor " + detail::quoted(tensor.name);
      if (offsets_[i] % alignment != 0)
        fail(what + " is at offset " + std::to_string(offsets_[i]) + "; multiples of " +
             std::to_string(alignment) + " are allowed");
      if (offsets_[i] > room || sizes_[i] > room - offsets_[i])
        fail(what + " of " + std::to_string(sizes_[i]) + " bytes at offset " +
             std::to_string(offsets_[i]) + " ends beyond the " + std::to_string(room) +
             " bytes of data");
      tensor.bytes = bytes_.subspan(static_cast<std::size_t>(start + offsets_[i]),
                                    static_cast<std::size_t>(sizes_[i]));
    }
    // Shared bytes would let a small file ask for any amount of memory.
    std::ranges::sort(file_.tensors_, {}, [](const auto& t) { return t.bytes.data(); });
    for (std::size_t i = 1; i < file_.tensors_.size(); ++i) {
      const gguf_tensor& before = file_.tensors_[i - 1];
      if (before.bytes.data() + before.bytes.size() > file_.tensors_[i].bytes.data())
        fail("tensors " + detail::quoted(before.name) + " and " +
             detail::quoted(file_.tensors_[i].name) + " overlap");
    }
    std::ranges::sort(file_.tensors_, {}, &gguf_tensor::name);
    const auto twice = std::ranges::adjacent_find(file_.tensors_, {}, &gguf_tensor::name);
    if (twice != file_.tensors_.end())
      fail("tensor " + detail::quoted(twice->name) + " stands there twice");
  }

  gguf_file& file_;
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::uint64_t tensors_ = 0;
  std::uint64_t entries_ = 0;
  std::vector<std::uint64_t> offsets_;  // of the tensors, in the order of the file, and their bytes
  std::vector<std::uint64_t> sizes_;
};

inline std::string name_of(gguf_type type) {
  if (detail::is_type(type))
    return std::string(detail::gguf_types[static_cast<std::size_t>(type)].name);
  return "type " + std::to_string(static_cast<std::uint32_t>(type));
}

inline kvarn::result<gguf_file> gguf_file::open(const std::string& path) {
  auto mapped = file_bytes::map(path);
  if (!mapped) return mapped.why();
  return parse(std::move(mapped).value(), path);
}

inline kvarn::result<gguf_file> gguf_file::from_bytes(std::vector<std::byte> bytes,
                                                      const std::string& name) {
  return parse(file_bytes(std::move(bytes)), name);
}

inline kvarn::result<gguf_file> gguf_file::parse(file_bytes bytes, const std::string& name) {
  return kvarn::or_out_of_memory([&]() -> kvarn::result<gguf_file> {
    gguf_file file;
    file.bytes_ = std::move(bytes);
    file.name_ = name;
    try {
      gguf_parser(file, file.bytes_.bytes()).run();
    } catch (const kvarn::error& error) {
      return kvarn::status(error.code(), error.what());
    }
    return file;
  });
}

template <class T>
kvarn::result<std::optional<T>> gguf_file::find(std::string_view key) const {
  const auto at = std::ranges::lower_bound(entries_, key, {}, &entry::key);
  if (at == entries_.end() || at->key != key) return std::optional<T>();
  const auto mismatch = [&] {
    return kvarn::status(kvarn::error_code::invalid_data,
                         name_ + ": " + detail::quoted(key) + " is " +
                             (at->is_array ? "an array of " : "of type ") + name_of(at->type) +
                             " or out of range; wanted: " + detail::wanted_name<T>());
  };
  if constexpr (gguf_value<T>) {
    std::optional<T> value;
    if (!at->is_array) value = detail::load_value<T>(at->type, at->values);
    if (!value) return mismatch();
    return value;
  } else {
    if (!at->is_array) return mismatch();
    T values;
    values.reserve(static_cast<std::size_t>(at->count));
    const std::byte* next = at->values;
    for (std::uint64_t i = 0; i < at->count; ++i) {
      const auto value = detail::load_value<typename T::value_type>(at->type, next);
      if (!value) return mismatch();
      values.push_back(*value);
      next += detail::bytes_of(at->type);
      if constexpr (std::same_as<typename T::value_type, std::string_view>) next += value->size();
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

inline const gguf_tensor* gguf_file::find_tensor(std::string_view name) const {
  const auto at = std::ranges::lower_bound(tensors_, name, {}, &gguf_tensor::name);
  return at == tensors_.end() || at->name != name ? nullptr : &*at;
}

inline kvarn::result<gguf_tensor> gguf_file::get_tensor(std::string_view name) const {
  const gguf_tensor* const tensor = find_tensor(name);
  if (tensor == nullptr)
    return kvarn::status(kvarn::error_code::invalid_data,
                         name_ + ": no tensor " + detail::quoted(name));
  return *tensor;
}

}  // namespace kvarn_engine
