// The reader of GGUF files: one pass that believes nothing.
#include "gguf.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "utf8.hpp"

namespace kvarn_engine {

static_assert(std::endian::native == std::endian::little,
              "GGUF files are little endian, and are read as they stand in memory");

namespace detail {

// For messages: a name out of a file, short and printable.
std::string quoted(std::string_view text) {
  constexpr std::size_t longest = 80;
  std::string shown = "'";
  for (std::string_view left = text.substr(0, longest); !left.empty();) {
    const std::size_t length = first_character(left).length;
    const bool is_control = static_cast<unsigned char>(left[0]) < 0x20 || left[0] == 0x7f;
    shown += length == 0 || is_control ? "?" : left.substr(0, length);
    left.remove_prefix((std::max)(length, std::size_t{1}));
  }
  return shown + (text.size() > longest ? "...'" : "'");
}

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
    return load<T>(take(sizeof(T), what));
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
      fail("metadata key " + quoted(twice->key) + " stands there twice");
  }

  gguf_type read_type(const std::string& what) {
    const auto type = read<gguf_type>("the type of " + what);
    if (!is_type(type))
      fail(what + " has " + name_of(type) + "; types 0 to " +
           std::to_string(std::size(gguf_types) - 1) + " are known");
    return type;
  }

  gguf_file::entry read_value(std::string_view key) {
    const std::string what = "metadata " + quoted(key);
    gguf_file::entry entry{key, nullptr, 1, read_type(what), false};
    if (entry.type == gguf_type::array) {
      entry.is_array = true;
      entry.type = read_type("the elements of " + what);
      if (entry.type == gguf_type::array) fail(what + " is an array of arrays, which is not read");
      entry.count = read_count("elements of " + what, bytes_of(entry.type));
    }
    entry.values = bytes_.data() + at_;
    if (entry.type == gguf_type::string) {
      for (std::uint64_t i = 0; i < entry.count; ++i) read_string(what);
      return entry;
    }
    take(entry.count * bytes_of(entry.type), what);  // read_count bounds the product
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
    const std::string what = "tensor " + quoted(tensor.name);
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
      const std::string what = "tensor " + quoted(tensor.name);
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
        fail("tensors " + quoted(before.name) + " and " + quoted(file_.tensors_[i].name) +
             " overlap");
    }
    std::ranges::sort(file_.tensors_, {}, &gguf_tensor::name);
    const auto twice = std::ranges::adjacent_find(file_.tensors_, {}, &gguf_tensor::name);
    if (twice != file_.tensors_.end())
      fail("tensor " + quoted(twice->name) + " stands there twice");
  }

  gguf_file& file_;
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::uint64_t tensors_ = 0;
  std::uint64_t entries_ = 0;
  std::vector<std::uint64_t> offsets_;  // of the tensors, in the order of the file, and their bytes
  std::vector<std::uint64_t> sizes_;
};

}  // namespace detail

std::string name_of(gguf_type type) {
  if (detail::is_type(type))
    return std::string(detail::gguf_types[static_cast<std::size_t>(type)].name);
  return "type " + std::to_string(static_cast<std::uint32_t>(type));
}

kvarn::result<gguf_file> gguf_file::open(const std::string& path) {
  auto mapped = file_bytes::map(path);
  if (!mapped) return mapped.why();
  return parse(std::move(mapped).value(), path);
}

kvarn::result<gguf_file> gguf_file::from_bytes(std::vector<std::byte> bytes,
                                               const std::string& name) {
  return parse(file_bytes(std::move(bytes)), name);
}

kvarn::result<gguf_file> gguf_file::parse(file_bytes bytes, const std::string& name) {
  return kvarn::or_out_of_memory([&]() -> kvarn::result<gguf_file> {
    gguf_file file;
    file.bytes_ = std::move(bytes);
    file.name_ = name;
    try {
      detail::gguf_parser(file, file.bytes_.bytes()).run();
    } catch (const kvarn::error& error) {
      return kvarn::status(error.code(), error.what());
    }
    return file;
  });
}

const gguf_file::entry* gguf_file::find_entry(std::string_view key) const {
  const auto at = std::ranges::lower_bound(entries_, key, {}, &entry::key);
  return at == entries_.end() || at->key != key ? nullptr : &*at;
}

kvarn::status gguf_file::mismatch(const entry& found, const std::byte* integer,
                                  const std::string& wanted) const {
  std::string what = (found.is_array ? "is an array of " : "is of type ") + name_of(found.type);
  if (integer != nullptr) {
    const auto number = detail::load_integer<std::int64_t>(found.type, integer);
    const auto large = detail::load_integer<std::uint64_t>(found.type, integer);
    if (number || large)
      what = "has the value " + (number ? std::to_string(*number) : std::to_string(*large));
  }
  return {kvarn::error_code::invalid_data,
          name_ + ": " + detail::quoted(found.key) + " " + what + "; wanted: " + wanted};
}

const gguf_tensor* gguf_file::find_tensor(std::string_view name) const {
  const auto at = std::ranges::lower_bound(tensors_, name, {}, &gguf_tensor::name);
  return at == tensors_.end() || at->name != name ? nullptr : &*at;
}

kvarn::result<gguf_tensor> gguf_file::get_tensor(std::string_view name) const {
  const gguf_tensor* const tensor = find_tensor(name);
  if (tensor == nullptr)
    return kvarn::status(kvarn::error_code::invalid_data,
                         name_ + ": no tensor " + detail::quoted(name));
  return *tensor;
}

}  // namespace kvarn_engine
