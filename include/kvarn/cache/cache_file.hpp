// Saving and restoring sequences and query moments: docs/cache-file.md describes every byte.
//
// What is saved is what is committed; a restored sequence continues with the same bytes. Files from
// elsewhere are not trusted: sizes are compared with the stream's before memory is taken for them,
// every section has a checksum, and records and rows must hold finite numbers. Errors leave the
// cache as it was:
//   invalid_format  not a file of this kind and version, or of another model shape or format
//   invalid_data    truncated or damaged
//   short_buffer    not enough free pages, sequences or memory for exact rows
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <map>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../config.hpp"
#include "../error.hpp"
#include "../format/float16.hpp"
#include "../format/tile_view.hpp"
#include "checksum.hpp"
#include "kv_cache.hpp"
#include "page_table.hpp"
#include "query_moments.hpp"

namespace kvarn {

// Of files of sequences and of query moments.
inline constexpr std::uint64_t cache_file_magic = 0x45484341434e564bu;    // "KVNCACHE"
inline constexpr std::uint64_t moments_file_magic = 0x544e4d4f4d4e564bu;  // "KVNMOMNT"
inline constexpr std::uint32_t cache_file_version = 1;

// The type of exact rows in a file.
template <class T>
inline constexpr std::uint32_t exact_type = 0;
template <>
inline constexpr std::uint32_t exact_type<float> = 0;
template <>
inline constexpr std::uint32_t exact_type<float16> = 1;
template <>
inline constexpr std::uint32_t exact_type<bfloat16> = 2;

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

  bool ok() const { return failure_.ok(); }
  const status& failure() const { return failure_; }
  bool fail(error_code code, const std::string& message) {
    if (failure_.ok()) failure_ = {code, "cache file: " + message};
    return false;
  }

  // Whether `count` items of `size` bytes are there; else fails.
  bool has(std::uint64_t count, std::uint64_t size, const char* what) {
    if (!ok()) return false;
    if (size == 0 || count <= left_ / size) return true;
    return fail(error_code::invalid_data, std::string("ends within the ") + what + ": " +
                                              std::to_string(count) + " of " +
                                              std::to_string(size) + " bytes are announced, " +
                                              std::to_string(left_) + " bytes are left");
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
      return fail(error_code::invalid_data, std::string("the ") + what + " is damaged");
    return ok();
  }

 private:
  std::istream& stream_;
  std::uint64_t left_ = 0;
  checksum sum_;
  status failure_;
};

inline bool is_finite(float16 x) { return x.is_finite(); }
inline bool is_finite(bfloat16 x) { return x.is_finite(); }
inline bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

template <class T>
bool all_finite(const T* values, std::size_t count) {
  bool finite = true;
  for (std::size_t i = 0; i < count; ++i) finite &= is_finite(values[i]);
  return finite;
}

// Keys of all heads, then values: rows 0 .. count() - 1.
template <class T, class Visit>
void for_each_block(const row_shape& shape, const exact_run<T>& run, int count,
                    const Visit& visit) {
  const auto elements = [count](int dim) {
    return static_cast<std::size_t>(count) * static_cast<std::size_t>(dim);
  };
  for (int head = 0; head < shape.kv_heads; ++head)
    visit(run.keys(shape, head, 0).data, elements(shape.key_head_dim));
  for (int head = 0; head < shape.kv_heads; ++head)
    visit(run.values(shape, head, 0).data, elements(shape.value_head_dim));
}

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

}  // namespace detail

// Restores one file into one cache.
template <class T>
class cache_reader {
 public:
  cache_reader(kv_cache<T>& cache, std::istream& stream)
      : table_(cache.s().table), state_(cache.s()), in_(stream) {}

  cache_reader(const cache_reader&) = delete;
  cache_reader& operator=(const cache_reader&) = delete;

  // Takes back what has not become complete.
  ~cache_reader() {
    for (const sequence_id id : ids_) discard(id);
    table_.release(pages_);
  }

  result<std::vector<sequence_id>> read() {
    if (!read_header() || !read_pages() || !read_sequences()) return in_.failure();
    return std::exchange(ids_, {});
  }

 private:
  bool read_header() {
    const row_shape& shape = state_.storage.shape();
    cache_file_header expected;
    expected.exact_type = exact_type<T>;
    expected.layers = static_cast<std::uint32_t>(table_.layers());
    expected.kv_heads = static_cast<std::uint32_t>(shape.kv_heads);
    expected.key_head_dim = static_cast<std::uint32_t>(shape.key_head_dim);
    expected.value_head_dim = static_cast<std::uint32_t>(shape.value_head_dim);
    expected.group = static_cast<std::uint32_t>(table_.group());
    expected.sink = static_cast<std::uint32_t>(table_.sink());
    if (!in_.read(header_, "header")) return false;
    if (header_.magic != expected.magic)
      return in_.fail(error_code::invalid_format, "it does not start as one");
    using field = std::uint32_t cache_file_header::*;
    const std::pair<field, const char*> fields[] = {
        {&cache_file_header::version, "version"},
        {&cache_file_header::exact_type, "type of exact rows"},
        {&cache_file_header::layers, "number of layers"},
        {&cache_file_header::kv_heads, "number of KV heads"},
        {&cache_file_header::key_head_dim, "key head_dim"},
        {&cache_file_header::value_head_dim, "value head_dim"},
        {&cache_file_header::group, "group"},
        {&cache_file_header::sink, "sink"}};
    for (const auto& [member, name] : fields)
      if (header_.*member != expected.*member)
        return in_.fail(error_code::invalid_format,
                        std::string(name) + " is " + std::to_string(header_.*member) +
                            "; the cache has " + std::to_string(expected.*member));
    for (int layer = 0; layer < table_.layers(); ++layer) {
      format_id id = 0;
      if (!in_.read(id, "format ids")) return false;
      const format_id own = table_.is_exact_layer(layer) ? 0 : state_.storage.format(layer).id();
      if (id != own)
        return in_.fail(error_code::invalid_format, "format id of layer " + std::to_string(layer) +
                                                        " is " + std::to_string(id) +
                                                        "; the cache has " + std::to_string(own));
    }
    return in_.read_checksum("header");
  }

  bool read_pages() {
    std::uint64_t bytes = sizeof(std::uint64_t);
    for (int layer = 0; layer < table_.layers(); ++layer) bytes += state_.storage.page_bytes(layer);
    if (!in_.has(header_.pages, bytes, "pages")) return false;
    std::vector<std::int32_t> pages(header_.pages);
    if (!table_.claim(pages))
      return in_.fail(error_code::short_buffer,
                      std::to_string(header_.pages) + " pages are needed; " +
                          std::to_string(table_.free_page_count()) + " are free");
    pages_ = std::move(pages);
    for (const std::int32_t page : pages_) {
      for (int layer = 0; layer < table_.layers(); ++layer)
        if (!in_.read(state_.storage.page(layer, page), state_.storage.page_bytes(layer), "page"))
          return false;
      if (!in_.read_checksum("page") || !check_records(page)) return false;
    }
    return true;
  }

  bool check_records(std::int32_t page) {
    for (int layer = 0; layer < table_.layers(); ++layer) {
      if (table_.is_exact_layer(layer)) continue;
      const cache_format& format = state_.storage.format(layer);
      const std::byte* const bytes = state_.storage.page(layer, page);
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
                      std::to_string(header_.sequences) + " sequences are saved; " +
                          std::to_string(table_.free_sequence_count()) + " can be created");
    ids_.reserve(header_.sequences);
    used_.assign(pages_.size(), false);
    for (std::uint32_t i = 0; i < header_.sequences; ++i) {
      auto made = table_.create();
      if (!made.ok()) return in_.fail(made.why().code(), made.why().message());
      ids_.push_back(made.value());
      if (!read_sequence(made.value())) return false;
    }
    for (const bool used : used_)
      if (!used) return in_.fail(error_code::invalid_data, "a page belongs to no sequence");
    return true;
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
    const auto bad = [this](const char* what) {
      return in_.fail(error_code::invalid_data, std::string("a sequence has ") + what);
    };
    constexpr std::uint64_t most = std::uint64_t{1} << 62;
    const auto sink = static_cast<std::uint64_t>(table_.sink());
    if (h.length > most || h.first > most || h.has_moments > 1) return bad("numbers out of range");
    if (h.first < sink || (h.first > sink && h.first > h.length))
      return bad("a first position that is out of range");
    std::uint64_t end = h.first;
    for (sealed_page& p : list) {
      if (p.position != static_cast<std::int64_t>(end)) return bad("pages that do not follow");
      if (p.count < 1 || p.count > table_.group()) return bad("a page with a wrong count");
      if (p.page < 0 || static_cast<std::uint32_t>(p.page) >= header_.pages)
        return bad("a page that is not in the file");
      used_[static_cast<std::size_t>(p.page)] = true;
      p.page = pages_[static_cast<std::size_t>(p.page)];
      end += static_cast<std::uint64_t>(p.count);
    }
    if (!list.empty() && end > h.length) return bad("more tokens than its length");
    const std::uint64_t behind = h.length > h.first ? h.length - h.first : 0;
    if (behind > (std::uint64_t{1} << 30)) return bad("more exact tokens than can be");
    return true;
  }

  bool read_rows(exact_run<T>& run, int count) {
    const row_shape& shape = state_.storage.shape();
    if (!in_.has(static_cast<std::uint64_t>(count), state_.storage.row_bytes(), "exact rows"))
      return false;
    if (!run.reserve(shape, state_.memory.exact, count, true))
      return in_.fail(error_code::short_buffer,
                      std::to_string(count) + " exact rows would pass exact_memory");
    bool finite = true;
    detail::for_each_block(shape, run, count, [&](T* values, std::size_t elements) {
      finite = in_.read(values, elements * sizeof(T), "exact rows") && finite &&
               detail::all_finite(values, elements);
    });
    if (!in_.ok()) return false;
    if (!finite) return in_.fail(error_code::invalid_data, "an exact row is not finite");
    if (count > 0) run.extend(count);
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

  page_table& table_;
  typename kv_cache<T>::state& state_;
  detail::section_reader in_;
  cache_file_header header_;
  std::vector<std::int32_t> pages_;  // by index in the file; each holds one reference
  std::vector<sequence_id> ids_;
  std::vector<bool> used_;
};

// Writes the committed tokens of some sequences; pages that they share are written once. Open
// streams as binary. Precondition: nobody else uses the sequences.
template <class T>
status save_sequences(const kv_cache<T>& cache, std::span<const sequence_id> ids,
                      std::ostream& stream) {
  const page_table& table = cache.table();
  const host_storage<T>& storage = cache.storage();
  const row_shape& shape = storage.shape();
  std::map<std::int32_t, std::int32_t> index;  // of a page in the file
  std::vector<std::int32_t> pages;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!cache.is_live(ids[i]))
      return {error_code::invalid_argument,
              "sequence " + std::to_string(i) + " of those to save does not exist"};
    for (const sealed_page& p : table.pages(ids[i]))
      if (index.emplace(p.page, static_cast<std::int32_t>(pages.size())).second)
        pages.push_back(p.page);
  }

  detail::section_writer out(stream);
  cache_file_header header;
  header.exact_type = exact_type<T>;
  header.layers = static_cast<std::uint32_t>(table.layers());
  header.kv_heads = static_cast<std::uint32_t>(shape.kv_heads);
  header.key_head_dim = static_cast<std::uint32_t>(shape.key_head_dim);
  header.value_head_dim = static_cast<std::uint32_t>(shape.value_head_dim);
  header.group = static_cast<std::uint32_t>(table.group());
  header.sink = static_cast<std::uint32_t>(table.sink());
  header.pages = static_cast<std::uint32_t>(pages.size());
  header.sequences = static_cast<std::uint32_t>(ids.size());
  out.write(header);
  for (int layer = 0; layer < table.layers(); ++layer)
    out.write(table.is_exact_layer(layer) ? format_id{0} : storage.format(layer).id());
  out.write_checksum();

  for (const std::int32_t page : pages) {
    for (int layer = 0; layer < table.layers(); ++layer)
      out.write(storage.page(layer, page), storage.page_bytes(layer));
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
      const auto write = [&](const exact_run<T>& run, int count) {
        detail::for_each_block(shape, run, count, [&](const T* values, std::size_t elements) {
          out.write(values, elements * sizeof(T));
        });
      };
      const int from_sink =
          static_cast<int>((std::min)(std::int64_t{extent.sink_count}, table.committed(id)));
      write(storage.rows(id, layer).sink, from_sink);
      write(storage.rows(id, layer).tail, (std::max)(extent.tail_count - uncommitted, 0));
      out.write_checksum();
    }
    if (h.has_moments != 0) detail::write_moments(out, *cache.statistics(id));
  }
  return out.result();
}

// Creates the sequences of a file, in its order. The cache must have the shape, formats, sink and
// type of exact rows of the one that saved; the tail, the encoder and the memory may differ. The
// stream must be able to tell its size, and is left behind the last byte of the file.
template <class T>
result<std::vector<sequence_id>> restore_sequences(kv_cache<T>& cache, std::istream& stream) {
  return cache_reader<T>(cache, stream).read();
}

// A calibration file.
inline status save_moments(const query_moments& moments, std::ostream& stream) {
  detail::section_writer out(stream);
  moments_file_header header;
  header.layers = static_cast<std::uint32_t>(moments.layers());
  header.kv_heads = static_cast<std::uint32_t>(moments.kv_heads());
  header.head_dim = static_cast<std::uint32_t>(moments.head_dim());
  out.write(header);
  out.write_checksum();
  detail::write_moments(out, moments);
  return out.result();
}

inline result<query_moments> load_moments(std::istream& stream) {
  detail::section_reader in(stream);
  moments_file_header header;
  if (!in.read(header, "header")) return in.failure();
  if (header.magic != moments_file_magic || header.version != cache_file_version) {
    in.fail(error_code::invalid_format,
            "not a file of query moments, version " + std::to_string(cache_file_version));
    return in.failure();
  }
  if (!in.read_checksum("header")) return in.failure();
  const auto head_dim = static_cast<int>((std::min)(header.head_dim, std::uint32_t{1} << 16));
  if (status s = validate(tile_layout{.head_dim = head_dim});
      !s.ok() || header.layers < 1 || header.layers > detail::max_layers || header.kv_heads < 1 ||
      header.kv_heads > detail::max_heads) {
    in.fail(error_code::invalid_format, "the shape of the moments is out of range");
    return in.failure();
  }
  if (!in.has(1, detail::moments_bytes(header.layers, header.kv_heads, header.head_dim),
              "query moments"))
    return in.failure();
  query_moments moments(static_cast<int>(header.layers), static_cast<int>(header.kv_heads),
                        head_dim);
  if (!detail::read_moments(in, moments)) return in.failure();
  return moments;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
