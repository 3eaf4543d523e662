// Writes GGUF files in memory, also ones that no reader may accept.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "../examples/engine/gguf.hpp"

namespace kvarn_test {

class gguf_writer {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;  // of the data; add general.alignment where it is another

  // A number, a boolean or a string.
  template <class T>
  gguf_writer& add(std::string_view key, const T& value) {
    start_entry(key, type_of<T>());
    put_value(metadata_, value);
    return *this;
  }
  template <class T>
  gguf_writer& add_array(std::string_view key, const std::vector<T>& values) {
    start_entry(key, kvarn_engine::gguf_type::array);
    put(metadata_, type_of<T>());
    put(metadata_, std::uint64_t{values.size()});
    for (const auto& value : values) put_value(metadata_, static_cast<const T&>(value));
    return *this;
  }
  // Any bytes behind a key and the number of a type.
  gguf_writer& add_raw(std::string_view key, std::uint32_t type, std::string_view bytes) {
    start_entry(key, static_cast<kvarn_engine::gguf_type>(type));
    metadata_ += bytes;
    return *this;
  }
  // Data stands one after the other, aligned.
  gguf_writer& add_tensor(std::string_view name, kvarn_engine::ggml_type type,
                          const std::vector<std::uint64_t>& extents, std::string_view data) {
    pad(data_);
    add_tensor_at(name, type, extents, data_.size());
    data_ += data;
    return *this;
  }
  gguf_writer& add_tensor_at(std::string_view name, kvarn_engine::ggml_type type,
                             const std::vector<std::uint64_t>& extents, std::uint64_t offset) {
    ++tensor_count_;
    put_value(tensors_, name);
    put(tensors_, static_cast<std::uint32_t>(extents.size()));
    for (const std::uint64_t extent : extents) put(tensors_, extent);
    put(tensors_, type);
    put(tensors_, offset);
    return *this;
  }

  std::vector<std::byte> bytes() const {
    std::string file = "GGUF";
    put(file, version);
    put(file, tensor_count_);
    put(file, entry_count_);
    file += metadata_ + tensors_;
    pad(file);
    file += data_;
    std::vector<std::byte> bytes(file.size());
    std::memcpy(bytes.data(), file.data(), file.size());
    return bytes;
  }

 private:
  template <class T>
  static kvarn_engine::gguf_type type_of() {
    using enum kvarn_engine::gguf_type;
    if constexpr (std::convertible_to<T, std::string_view>)
      return string;
    else if constexpr (std::same_as<T, bool>)
      return boolean;
    else if constexpr (std::same_as<T, float>)
      return float32;
    else if constexpr (std::same_as<T, double>)
      return float64;
    else if constexpr (sizeof(T) == 1)
      return std::signed_integral<T> ? int8 : uint8;
    else if constexpr (sizeof(T) == 2)
      return std::signed_integral<T> ? int16 : uint16;
    else if constexpr (sizeof(T) == 4)
      return std::signed_integral<T> ? int32 : uint32;
    else
      return std::signed_integral<T> ? int64 : uint64;
  }

  template <class T>
  static void put(std::string& out, const T& value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  template <class T>
  static void put_value(std::string& out, const T& value) {
    if constexpr (std::convertible_to<T, std::string_view>) {
      const std::string_view text = value;
      put(out, std::uint64_t{text.size()});
      out += text;
    } else {
      put(out, value);
    }
  }
  void start_entry(std::string_view key, kvarn_engine::gguf_type type) {
    ++entry_count_;
    put_value(metadata_, key);
    put(metadata_, type);
  }
  void pad(std::string& out) const {
    out.resize((out.size() + alignment - 1) / alignment * alignment);
  }

  std::string metadata_;
  std::string tensors_;
  std::string data_;
  std::uint64_t entry_count_ = 0;
  std::uint64_t tensor_count_ = 0;
};

}  // namespace kvarn_test
