// The headers of cache files: docs/cache-file.md in code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../config.hpp"
#include "../format/float16.hpp"
#include "exact_run.hpp"
#include "page_table.hpp"

namespace kvarn {

// Of files of sequences and of query moments.
inline constexpr std::uint64_t cache_file_magic = 0x45484341434e564bu;    // "KVNCACHE"
inline constexpr std::uint64_t moments_file_magic = 0x544e4d4f4d4e564bu;  // "KVNMOMNT"
inline constexpr std::uint32_t cache_file_version = 1;

// The type of exact rows in a file.
template <class T>
extern const std::uint32_t exact_type;
template <>
inline constexpr std::uint32_t exact_type<float> = 0;
template <>
inline constexpr std::uint32_t exact_type<float16> = 1;
template <>
inline constexpr std::uint32_t exact_type<bfloat16> = 2;

// Its name for a message.
constexpr const char* exact_type_name(std::uint32_t type) {
  return type == exact_type<float>      ? "float"
         : type == exact_type<float16>  ? "float16"
         : type == exact_type<bfloat16> ? "bfloat16"
                                        : "unknown";
}

struct cache_file_header {
  std::uint64_t magic = cache_file_magic;
  std::uint32_t version = cache_file_version;
  std::uint32_t exact_type = 0;
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t key_head_dim = 0;
  std::uint32_t value_head_dim = 0;
  std::uint32_t group = 0;
  std::uint32_t sink = 0;
  std::uint32_t pages = 0;
  std::uint32_t sequences = 0;
};

struct sequence_file_header {
  std::uint64_t length = 0;  // tokens
  std::uint64_t first = 0;   // position of the first token behind the sink
  std::uint32_t pages = 0;   // entries of its list
  std::uint32_t has_moments = 0;
};

struct moments_file_header {
  std::uint64_t magic = moments_file_magic;
  std::uint32_t version = cache_file_version;
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
};

inline namespace KVARN_ISA_NAMESPACE {
namespace detail {

// The header of a file of sequences of a cache, without its pages and sequences.
template <class T>
cache_file_header header_of(const page_table& table, const row_shape& shape) {
  cache_file_header header;
  header.exact_type = exact_type<T>;
  header.layers = static_cast<std::uint32_t>(table.layers());
  header.kv_heads = static_cast<std::uint32_t>(shape.kv_heads);
  header.key_head_dim = static_cast<std::uint32_t>(shape.key_head_dim);
  header.value_head_dim = static_cast<std::uint32_t>(shape.value_head_dim);
  header.group = static_cast<std::uint32_t>(table.group());
  header.sink = static_cast<std::uint32_t>(table.sink());
  return header;
}

}  // namespace detail
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
