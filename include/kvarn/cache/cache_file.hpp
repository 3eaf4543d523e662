// Saving and restoring sequences and query moments: docs/cache-file.md describes every byte.
//
// What is saved is what is committed; a restored sequence continues with the same bytes. Files from
// elsewhere are not trusted: sizes are compared with the stream's before memory is taken for them,
// every section has a checksum, and records and rows must hold finite numbers. Errors leave the
// cache as it was:
//   invalid_argument  a sequence that does not exist; a stream that cannot be read or written, or
//                     cannot tell its size
//   invalid_format    not a file of this kind and version, or of another model shape or format
//   invalid_data      truncated or damaged
//   short_buffer      not enough free pages, sequences or memory for exact rows
//   out_of_memory     an allocation failed
// Query moments: save_moments and load_moments in moments_file.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <map>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "../config.hpp"
#include "../error.hpp"
#include "cache_base.hpp"
#include "cache_reader.hpp"
#include "cache_state.hpp"
#include "file_format.hpp"
#include "file_sections.hpp"
#include "kv_cache.hpp"
#include "moments_file.hpp"
#include "page_table.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

template <class State>
status write_sequences(const cache_base<State>& cache, std::span<const sequence_id> ids,
                       std::ostream& stream) {
  using element = typename State::element;
  using storage_type = typename State::storage_type;
  const page_table& table = cache.table();
  const storage_type& storage = cache.storage();
  const row_shape& shape = storage.shape();
  std::map<std::int32_t, std::int32_t> index;  // of a page in the file
  std::vector<std::int32_t> pages;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!cache.is_live(ids[i]))
      return failure(error_code::invalid_argument,
                     {"sequence ", i, " of those to save does not exist"});
    for (const sealed_page& p : table.pages(ids[i]))
      if (index.emplace(p.page, static_cast<std::int32_t>(pages.size())).second)
        pages.push_back(p.page);
  }

  section_writer out(stream);
  cache_file_header header = header_of<element>(table, shape);
  header.pages = static_cast<std::uint32_t>(pages.size());
  header.sequences = static_cast<std::uint32_t>(ids.size());
  out.write(header);
  for (int layer = 0; layer < table.layers(); ++layer)
    out.write(table.is_exact_layer(layer) ? format_id{0} : storage.format(layer).id());
  out.write_checksum();

  for (const std::int32_t page : pages) {
    storage.fetch_page(page);
    for (int layer = 0; layer < table.layers(); ++layer)
      out.write(storage.file_page(layer, page), storage.page_bytes(layer));
    out.write_checksum();
  }

  for (const sequence_id id : ids) {
    sequence_file_header h;
    h.length = static_cast<std::uint64_t>(table.committed(id));
    h.first = static_cast<std::uint64_t>(table.first(id));
    h.pages = static_cast<std::uint32_t>(table.pages(id).size());
    h.has_moments = cache.statistics(id) != nullptr;
    out.write(h);
    for (sealed_page p : table.pages(id)) {
      p.page = index.at(p.page);
      out.write(p);
    }
    out.write_checksum();
    for (int layer = 0; layer < table.layers(); ++layer) {
      const sequence_extent extent = table.extent(id, layer);
      const auto uncommitted = static_cast<int>(extent.length - table.committed(id));
      const auto write = [&](const typename storage_type::run& run, int count) {
        storage.read_rows(run, count, [&](const element* values, std::size_t elements) {
          out.write(values, elements * sizeof(element));
        });
      };
      const int from_sink =
          static_cast<int>((std::min)(std::int64_t{extent.sink_count}, table.committed(id)));
      write(storage.rows(id, layer).sink, from_sink);
      write(storage.rows(id, layer).tail, (std::max)(extent.tail_count - uncommitted, 0));
      out.write_checksum();
    }
    if (h.has_moments != 0) write_moments(out, *cache.statistics(id));
  }
  if (status bad = storage.transfer_status(); !bad.ok()) return bad;
  return out.result();
}

}  // namespace detail

// Writes the committed tokens of some sequences; pages that they share are written once. Open
// streams as binary. Precondition: nobody else uses the sequences.
template <class State>
status save_sequences(const cache_base<State>& cache, std::span<const sequence_id> ids,
                      std::ostream& stream) {
  return or_out_of_memory([&] { return detail::write_sequences(cache, ids, stream); });
}

// Creates the sequences of a file, in its order. The cache must have the shape, formats, sink and
// type of exact rows of the one that saved; the tail, the encoder and the memory may differ. The
// stream must be able to tell its size, and is left behind the last byte of the file.
template <class State>
result<std::vector<sequence_id>> restore_sequences(cache_base<State>& cache, std::istream& stream) {
  return or_out_of_memory([&]() -> result<std::vector<sequence_id>> {
    return cache_reader<State>(cache, stream).read();
  });
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
