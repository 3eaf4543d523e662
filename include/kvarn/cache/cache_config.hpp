// What a cache holds: shape of the model, formats, exact regions, memory; and the checks of these.
//
// The positions of a sequence fall in three regions: the first `sink` tokens, kept exact; sealed
// tiles of format.group tokens each, packed; and an exact tail. Exact rows are stored rotated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <span>
#include <string>

#include "../codec/encoder.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "../format/tile_layout.hpp"

namespace kvarn {

// Bits per code of one layer's keys and values, or exact_layer: none of its tokens is ever packed.
struct layer_bits {
  int key = 2;
  int value = 2;

  friend constexpr bool operator==(const layer_bits&, const layer_bits&) = default;
};
inline constexpr layer_bits exact_layer{0, 0};

struct cache_config {
  int layers = 0;
  int kv_heads = 0;
  int query_heads = 0;       // a multiple of kv_heads
  cache_format format = {};  // head dims, group, scale type; bits where `bits` is empty
  std::span<const layer_bits> bits =
      {};                           // one per layer; need not outlive the call that takes them
  encoder method = encoder::tuned;  // query_aware: see query_moments.hpp
  int sink = 128;                   // first tokens of a sequence that stay exact
  int tail = 0;                     // tokens at the end of a sequence that sealing leaves exact
  bool keys_rotated = false;        // keys come rotated, for example by folded weights
  bool values_rotated = false;      // values come rotated
  int max_sequences = 64;           // that exist at once

  // Sealed pages, one of these two: a count, or bytes of which as many pages are made as fit. One
  // page holds one group of tokens in all layers.
  std::int64_t page_count = 0;
  std::size_t page_memory = 0;
  // Bytes that exact rows of all sequences may take; 0: no limit.
  std::size_t exact_memory = 0;
  // Memory of the pages, at any alignment; must outlive the cache. Empty: taken from `memory`.
  std::span<std::byte> pages = {};
  // Where exact rows and tables come from (sums of query statistics come from the global heap);
  // must outlive the cache, and be safe for threads if they share the cache. Null:
  // std::pmr::get_default_resource().
  std::pmr::memory_resource* memory = nullptr;
};

inline namespace KVARN_ISA_NAMESPACE {

inline bool is_exact(const cache_config& config, int layer) {
  return !config.bits.empty() && config.bits[static_cast<std::size_t>(layer)] == exact_layer;
}

// Of an exact layer the bits mean nothing.
inline cache_format format_of(const cache_config& config, int layer) {
  cache_format format = config.format;
  if (!config.bits.empty() && !is_exact(config, layer)) {
    format.key_bits = config.bits[static_cast<std::size_t>(layer)].key;
    format.value_bits = config.bits[static_cast<std::size_t>(layer)].value;
  }
  return format;
}

// Bytes of one page in one layer, and in all.
inline std::size_t page_bytes(const cache_config& config, int layer) {
  return is_exact(config, layer) ? 0 : format_of(config, layer).page_bytes(config.kv_heads);
}
inline std::size_t page_bytes(const cache_config& config) {
  std::size_t bytes = 0;
  for (int layer = 0; layer < config.layers; ++layer) bytes += page_bytes(config, layer);
  return bytes;
}

// Precondition: validate(config) is ok.
inline std::int64_t page_count_of(const cache_config& config) {
  if (config.page_count > 0) return config.page_count;
  return static_cast<std::int64_t>(config.page_memory / page_bytes(config));
}

namespace detail {

inline constexpr int max_layers = 1 << 12;
inline constexpr int max_heads = 1 << 12;
inline constexpr int max_exact = 1 << 24;  // tokens of a sink or a tail
inline constexpr int max_sequence_slots = 1 << 20;
inline constexpr std::int64_t max_pages = std::numeric_limits<std::int32_t>::max();

inline status check_between(const char* name, std::int64_t value, std::int64_t low,
                            std::int64_t high) {
  if (value >= low && value <= high) return {};
  return failure(error_code::invalid_argument,
                 {name, " is ", value, "; allowed are ", low, " to ", high});
}

inline status check_pages(const cache_config& config) {
  if ((config.page_count != 0) == (config.page_memory != 0))
    return failure(error_code::invalid_argument,
                   {"page_count is ", config.page_count, " and page_memory is ", config.page_memory,
                    "; exactly one of them must be given"});
  if (config.page_memory != 0) {
    const std::size_t bytes = page_bytes(config);
    if (bytes == 0)
      return {error_code::invalid_argument,
              "page_memory is given, but every layer is exact; give page_count"};
    if (config.page_memory < bytes)
      return failure(error_code::invalid_argument,
                     {"page_memory is ", config.page_memory, " bytes; one page takes ", bytes});
    if (config.page_memory / bytes > static_cast<std::size_t>(max_pages))
      return check_between("page_memory / bytes of a page", max_pages + 1, 1, max_pages);
  } else if (status s = check_between("page_count", config.page_count, 1, max_pages); !s.ok()) {
    return s;
  }
  const auto count = static_cast<std::size_t>(page_count_of(config));
  const std::size_t bytes = page_bytes(config);
  if (bytes != 0 && count > std::numeric_limits<std::size_t>::max() / 2 / bytes)
    return failure(error_code::invalid_argument,
                   {count, " pages of ", bytes, " bytes do not fit the address space"});
  if (!config.pages.empty() && config.pages.size() < count * bytes)
    return failure(error_code::short_buffer, {"pages has ", config.pages.size(), " bytes; ", count,
                                              " pages need ", count * bytes});
  return {};
}

}  // namespace detail

inline status validate(const cache_config& config) {
  using detail::check_between;
  for (const status& s :
       {check_between("layers", config.layers, 1, detail::max_layers),
        check_between("kv_heads", config.kv_heads, 1, detail::max_heads),
        check_between("query_heads", config.query_heads, 1, detail::max_heads),
        check_between("sink", config.sink, 0, detail::max_exact),
        check_between("tail", config.tail, 0, detail::max_exact),
        check_between("max_sequences", config.max_sequences, 1, detail::max_sequence_slots)})
    if (!s.ok()) return s;
  if (config.query_heads % config.kv_heads != 0)
    return failure(error_code::invalid_argument,
                   {"query_heads is ", config.query_heads,
                    "; it must be a multiple of kv_heads, which is ", config.kv_heads});
  if (status s = validate(config.method); !s.ok()) return s;
  if (!config.bits.empty() && config.bits.size() != static_cast<std::size_t>(config.layers))
    return failure(error_code::invalid_argument,
                   {"bits has ", config.bits.size(), " entries; it must have none or ",
                    config.layers, ", one per layer"});
  if (status s = validate(config.format); !s.ok()) return s;
  for (int layer = 0; layer < config.layers; ++layer)
    if (status s = validate(format_of(config, layer)); !s.ok())
      return failure(s.code(),
                     {"layer ", layer, ": ", s.message(), "; or 0 for both: an exact layer"});
  return detail::check_pages(config);
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
