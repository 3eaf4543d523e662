// Reads a file of sequences that is not trusted into a cache, or takes back all of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <istream>
#include <memory_resource>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../attention/attention.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "../format/float16.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
#include "cache_base.hpp"
#include "cache_state.hpp"
#include "exact_run.hpp"
#include "file_format.hpp"
#include "file_sections.hpp"
#include "fixed_array.hpp"
#include "moments_file.hpp"
#include "page_table.hpp"
#include "query_moments.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace detail {

inline bool is_finite(float16 x) { return x.is_finite(); }
inline bool is_finite(bfloat16 x) { return x.is_finite(); }
inline bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// In which field the format of a layer in a file differs from the cache's, or "". 0: exact.
KVARN_COLD std::string difference(format_id saved, format_id own) {
  if (saved == own) return {};
  if (own == 0) return "it is packed; in the cache it is exact";
  if (saved == 0) return "it is exact; in the cache it is packed";
  const cache_format a = format_of_id(saved);
  const cache_format b = format_of_id(own);
  struct field {
    const char* name;
    int saved;
    int own;
  };
  const field fields[] = {
      {"record layout version", static_cast<int>(saved >> 60), static_cast<int>(own >> 60)},
      {"key head_dim", a.key_head_dim, b.key_head_dim},
      {"value head_dim", a.value_head_dim, b.value_head_dim},
      {"group", a.group, b.group},
      {"key bits", a.key_bits, b.key_bits},
      {"value bits", a.value_bits, b.value_bits},
      {"scale type (0: UE5M3, 1: E4M3)", static_cast<int>(a.scale), static_cast<int>(b.scale)}};
  std::string message;
  for (const field& f : fields)
    if (message.empty() && f.saved != f.own)
      append_parts(message, {f.name, " is ", f.saved, "; the cache has ", f.own});
  return message;
}

template <class T>
bool all_finite(const T* values, std::size_t count) {
  bool finite = true;
  for (std::size_t i = 0; i < count; ++i) finite &= is_finite(values[i]);
  return finite;
}

}  // namespace detail

// Restores one file into one cache.
template <class State>
class cache_reader {
  using element = typename State::element;
  using run = typename State::storage_type::run;

 public:
  cache_reader(cache_base<State>& cache, std::istream& stream)
      : state_(cache.s()), table_(state_.table), in_(stream) {}

  cache_reader(const cache_reader&) = delete;
  cache_reader& operator=(const cache_reader&) = delete;

  // Takes back what has not become complete.
  ~cache_reader() {
    for (std::size_t i = 0; i < made_; ++i) discard(ids_[i]);
  }

  result<std::vector<sequence_id>> read() {
    if (!read_header() || !read_pages() || !read_sequences()) return in_.failure();
    made_ = 0;
    return std::move(ids_);
  }

 private:
  bool read_header() {
    const auto expected = detail::header_of<element>(table_, state_.storage.shape());
    if (!in_.read(header_, "header")) return false;
    if (header_.magic != expected.magic)
      return in_.fail(error_code::invalid_format, "it does not start as one");
    if (header_.version == expected.version && header_.exact_type != expected.exact_type)
      return in_.fail(error_code::invalid_format,
                      std::string("exact rows are ") + exact_type_name(header_.exact_type) +
                          "; those of the cache are " + exact_type_name(expected.exact_type));
    using field = std::uint32_t cache_file_header::*;
    const std::pair<field, const char*> fields[] = {
        {&cache_file_header::version, "version"},
        {&cache_file_header::layers, "number of layers"},
        {&cache_file_header::kv_heads, "number of KV heads"},
        {&cache_file_header::key_head_dim, "key head_dim"},
        {&cache_file_header::value_head_dim, "value head_dim"},
        {&cache_file_header::group, "group"},
        {&cache_file_header::sink, "sink"}};
    for (const auto& [member, name] : fields)
      if (header_.*member != expected.*member)
        return in_.fail(
            error_code::invalid_format,
            message_of({name, " is ", header_.*member, "; the cache has ", expected.*member}));
    for (int layer = 0; layer < table_.layers(); ++layer) {
      format_id id = 0;
      if (!in_.read(id, "format ids")) return false;
      const format_id own = table_.is_exact_layer(layer) ? 0 : state_.storage.format(layer).id();
      if (id != own)
        return in_.fail(error_code::invalid_format,
                        message_of({"layer ", layer, ": ", detail::difference(id, own)}));
    }
    return in_.read_checksum("header");
  }

  bool read_pages() {
    std::uint64_t bytes = sizeof(std::uint64_t);
    for (int layer = 0; layer < table_.layers(); ++layer) bytes += state_.storage.page_bytes(layer);
    if (!in_.has(header_.pages, bytes, "pages")) return false;
    pages_.emplace(table_, header_.pages);
    if (!pages_->claim())
      return in_.fail(error_code::short_buffer,
                      message_of({header_.pages, " pages are needed; ", table_.free_page_count(),
                                  " are free"}));
    for (const std::int32_t page : pages_->numbers()) {
      for (int layer = 0; layer < table_.layers(); ++layer)
        if (!in_.read(state_.storage.file_page(layer, page), state_.storage.page_bytes(layer),
                      "page"))
          return false;
      if (!in_.read_checksum("page") || !check_records(page)) return false;
      state_.storage.put_page(page);
    }
    return true;
  }

  bool check_records(std::int32_t page) {
    for (int layer = 0; layer < table_.layers(); ++layer) {
      if (table_.is_exact_layer(layer)) continue;
      const cache_format& format = state_.storage.format(layer);
      const std::byte* const bytes = state_.storage.file_page(layer, page);
      for (int head = 0; head < state_.storage.shape().kv_heads; ++head)
        for (const const_tile_view& tile :
             {const_tile_view{bytes + format.key_offset(head), format.key_layout()},
              const_tile_view{bytes + format.value_offset(head), format.value_layout()}})
          if (status s = validate_record(tile, tile.layout.record_bytes()); !s.ok())
            return in_.fail(error_code::invalid_data, s.message());
    }
    return true;
  }

  bool read_sequences() {
    if (!in_.has(header_.sequences, sizeof(sequence_file_header), "sequences")) return false;
    if (header_.sequences > static_cast<std::uint32_t>(table_.free_sequence_count()))
      return in_.fail(error_code::short_buffer,
                      message_of({header_.sequences, " sequences are saved; ",
                                  table_.free_sequence_count(), " can be created"}));
    ids_ = std::vector<sequence_id>(header_.sequences);
    users_.emplace(header_.pages, std::pmr::new_delete_resource(), std::size_t{0});
    for (std::uint32_t i = 0; i < header_.sequences; ++i) {
      auto made = table_.create();
      if (!made.ok()) return in_.fail(made.why().code(), made.why().message());
      ids_[made_++] = made.value();
      if (!read_sequence(made.value())) return false;
    }
    for (const std::size_t user : *users_)
      if (user == 0) return in_.fail(error_code::invalid_data, "a page belongs to no sequence");
    const status moved = state_.storage.transfer_status();
    return moved.ok() || in_.fail(moved.code(), moved.message());
  }

  bool read_sequence(sequence_id id) {
    sequence_file_header h;
    if (!in_.read(h, "sequence") || !in_.has(h.pages, sizeof(sealed_page), "list of pages"))
      return false;
    std::vector<sealed_page> list(h.pages);
    in_.read(list.data(), list.size() * sizeof(sealed_page), "list of pages");
    if (!in_.read_checksum("sequence") || !check_list(h, list)) return false;

    table_.reserve(id, list.size());
    table_.share(list);
    table_.adopt(id, static_cast<std::int64_t>(h.length), static_cast<std::int64_t>(h.first), list);
    for (int layer = 0; layer < table_.layers(); ++layer) {
      const sequence_extent extent = table_.extent(id, layer);
      auto& rows = state_.storage.rows(id, layer);
      if (!read_rows(rows.sink, extent.sink_count) || !read_rows(rows.tail, extent.tail_count) ||
          !in_.read_checksum("exact rows"))
        return false;
    }
    return h.has_moments == 0 || read_statistics(id);
  }

  // Whether the list is one that a cache can have; turns indices of the file into pages.
  bool check_list(const sequence_file_header& h, std::vector<sealed_page>& list) {
    const auto bad = [this](std::initializer_list<message_part> parts) {
      return in_.fail(error_code::invalid_data,
                      message_of({"sequence ", made_ - 1, ": ", message_of(parts)}));
    };
    constexpr auto most = static_cast<std::uint64_t>(max_position);
    const auto sink = static_cast<std::uint64_t>(table_.sink());
    if (h.length > most) return bad({"its length is ", h.length, "; allowed are 0 to ", most});
    if (h.first < sink || h.first > (std::max)(h.length, sink))
      return bad({"its first position behind the sink is ", h.first, "; allowed are ", sink, " to ",
                  (std::max)(h.length, sink)});
    if (h.has_moments > 1) return bad({"has moments is ", h.has_moments, "; allowed are 0 and 1"});
    std::uint64_t end = h.first;
    for (std::size_t i = 0; i < list.size(); ++i) {
      sealed_page& p = list[i];
      if (p.position != static_cast<std::int64_t>(end))
        return bad({"the position of entry ", i, " is ", p.position, "; it must be ", end});
      if (p.count < 1 || p.count > table_.group())
        return bad(
            {"the count of entry ", i, " is ", p.count, "; allowed are 1 to ", table_.group()});
      if (p.page < 0 || static_cast<std::uint32_t>(p.page) >= header_.pages)
        return bad({"the page of entry ", i, " is ", p.page, "; the file has ", header_.pages});
      std::size_t& user = (*users_)[static_cast<std::size_t>(p.page)];
      if (user == made_)
        return bad({"the page of entry ", i, " is ", p.page, ", as that of an entry before"});
      user = made_;
      p.page = pages_->numbers()[static_cast<std::size_t>(p.page)];
      end += static_cast<std::uint64_t>(p.count);
    }
    if (!list.empty() && end > h.length)
      return bad({"its pages end at position ", end, ", its length is ", h.length});
    std::uint64_t exact_from = end;
    for (int layer = 0; layer < table_.layers(); ++layer)
      if (table_.is_exact_layer(layer)) exact_from = h.first;
    if (h.length > exact_from && h.length - exact_from > std::uint64_t{max_exact_rows})
      return bad({"a layer has ", h.length - exact_from,
                  " exact tokens behind the sink; allowed are 0 to ", max_exact_rows});
    return true;
  }

  bool read_rows(run& rows, int count) {
    if (!in_.has(static_cast<std::uint64_t>(count), state_.storage.row_bytes(), "exact rows"))
      return false;
    if (!state_.storage.reserve(rows, count, true))
      return in_.fail(error_code::short_buffer,
                      message_of({count, " tokens in a layer need ",
                                  static_cast<std::size_t>(count) * state_.storage.row_bytes(),
                                  " bytes; ", state_.storage.exact_room()}));
    bool finite = true;
    state_.storage.write_rows(rows, count, [&](element* values, std::size_t elements) {
      finite = in_.read(values, elements * sizeof(element), "exact rows") && finite &&
               detail::all_finite(values, elements);
    });
    if (!in_.ok()) return false;
    if (!finite) return in_.fail(error_code::invalid_data, "an exact row is not finite");
    if (count > 0) rows.extend(count);
    return true;
  }

  bool read_statistics(sequence_id id) {
    const row_shape& shape = state_.storage.shape();
    if (!in_.has(1, detail::moments_bytes(header_.layers, header_.kv_heads, header_.key_head_dim),
                 "query moments"))
      return false;
    query_moments moments(table_.layers(), shape.kv_heads, shape.key_head_dim);
    if (!detail::read_moments(in_, moments)) return false;
    if (state_.gathers()) state_.moments[id.slot].set(std::move(moments), state_.memory.statistics);
    return true;
  }

  void discard(sequence_id id) {
    for (int layer = 0; layer < table_.layers(); ++layer) state_.storage.rows(id, layer) = {};
    state_.moments[id.slot] = sequence_moments();
    table_.free(id);
  }

  State& state_;
  page_table& table_;
  detail::section_reader in_;
  cache_file_header header_;
  std::optional<claimed_pages> pages_;  // by index in the file
  // All of them from the start: push_back would leave a function that files for other instruction
  // sets share.
  std::vector<sequence_id> ids_;
  std::size_t made_ = 0;
  // By page in the file: the last sequence that lists it, counted from 1; 0: none.
  std::optional<fixed_array<std::size_t>> users_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
