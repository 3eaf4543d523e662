// Saving and loading query moments: the calibration files of docs/cache-file.md. Errors are those
// of cache_file.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <istream>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "../codec/query_moment.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "../format/tile_layout.hpp"
#include "cache_config.hpp"
#include "file_format.hpp"
#include "file_sections.hpp"
#include "query_moments.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace detail {

inline void write_moments(section_writer& out, const query_moments& moments) {
  for (int layer = 0; layer < moments.layers(); ++layer)
    for (int head = 0; head < moments.kv_heads(); ++head) {
      const query_moment& m = moments.at(layer, head);
      out.write(m.count());
      out.write(m.sums().data(), m.sums().size_bytes());
    }
  out.write_checksum();
}

inline bool read_moments(section_reader& in, query_moments& moments) {
  std::vector<float> sums(moments.at(0, 0).sums().size());
  for (int layer = 0; layer < moments.layers(); ++layer)
    for (int head = 0; head < moments.kv_heads(); ++head) {
      std::uint64_t count = 0;
      if (!in.read(count, "query moments") ||
          !in.read(sums.data(), sums.size() * sizeof(float), "query moments"))
        return false;
      auto moment = query_moment::from_sums(moments.head_dim(), sums, count);
      if (!moment.ok()) return in.fail(error_code::invalid_data, moment.why().message());
      moments.set(layer, head, std::move(moment).value());
    }
  return in.read_checksum("query moments");
}

// Bytes that read_moments takes from a stream.
inline std::uint64_t moments_bytes(std::uint64_t layers, std::uint64_t kv_heads,
                                   std::uint64_t head_dim) {
  return layers * kv_heads * (head_dim * head_dim * sizeof(float) + sizeof(std::uint64_t));
}

inline status write_moments_file(const query_moments& moments, std::ostream& stream) {
  section_writer out(stream);
  moments_file_header header;
  header.layers = static_cast<std::uint32_t>(moments.layers());
  header.kv_heads = static_cast<std::uint32_t>(moments.kv_heads());
  header.head_dim = static_cast<std::uint32_t>(moments.head_dim());
  out.write(header);
  out.write_checksum();
  write_moments(out, moments);
  return out.result();
}

inline result<query_moments> read_moments_file(std::istream& stream) {
  section_reader in(stream);
  moments_file_header header;
  if (!in.read(header, "header")) return in.failure();
  if (header.magic != moments_file_magic || header.version != cache_file_version) {
    in.fail(error_code::invalid_format,
            message_of({"not a file of query moments, version ", cache_file_version}));
    return in.failure();
  }
  if (!in.read_checksum("header")) return in.failure();
  const auto head_dim = static_cast<int>((std::min)(header.head_dim, std::uint32_t{1} << 16));
  if (status s = validate(tile_layout{.head_dim = head_dim});
      !s.ok() || header.layers < 1 || header.layers > max_layers || header.kv_heads < 1 ||
      header.kv_heads > max_heads) {
    in.fail(error_code::invalid_format, "the shape of the moments is out of range");
    return in.failure();
  }
  if (!in.has(1, moments_bytes(header.layers, header.kv_heads, header.head_dim), "query moments"))
    return in.failure();
  query_moments moments(static_cast<int>(header.layers), static_cast<int>(header.kv_heads),
                        head_dim);
  if (!read_moments(in, moments)) return in.failure();
  return moments;
}

}  // namespace detail

// A calibration file.
inline status save_moments(const query_moments& moments, std::ostream& stream) {
  return or_out_of_memory([&] { return detail::write_moments_file(moments, stream); });
}
inline result<query_moments> load_moments(std::istream& stream) {
  return or_out_of_memory([&] { return detail::read_moments_file(stream); });
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
