// The bytes of a cache in the program's own memory: pages of records, and exact rows of every
// sequence.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../attention/attention.hpp"
#include "../codec/encoder.hpp"
#include "../codec/tile_codec.hpp"
#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
#include "../simd/target.hpp"
#include "cache_config.hpp"
#include "exact_run.hpp"
#include "heads_view.hpp"
#include "memory_account.hpp"
#include "page_table.hpp"
#include "paged_storage.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

// Rounds `count` tokens that come rotated into rows.
template <class In, class T>
replaced_values copy_tokens(tokens_view<In> in, tokens_view<T> out, int count, int head_dim) {
  replaced_values replaced;
  float x[max_head_dim];
  for (int t = 0; t < count; ++t) {
    load_token(in, t, head_dim, x, replaced);
    for (int d = 0; d < head_dim; ++d) out.store(t, d, x[d]);
  }
  return replaced;
}

}  // namespace detail

template <class T>
class host_storage : public paged_storage<T, host_space> {
  using base = paged_storage<T, host_space>;

 public:
  using typename base::layer_rows;
  using typename base::run;
  using memory_type = memory_accounts;

  // Precondition: validate(config) is ok.
  host_storage(const cache_config& config, memory_accounts& memory)
      : base(config, memory, memory.exact) {}

  // Stores `count` tokens of one layer behind those of `extent`. False, with nothing changed, where
  // the limit of exact rows is met.
  template <class K, class V>
  bool append(sequence_id id, int layer, const sequence_extent& extent, heads_view<K> keys,
              heads_view<V> values, int count, replaced_values& replaced, target on) {
    layer_rows& r = this->rows(id, layer);
    const int to_sink = (std::min)(count, this->sink() - extent.sink_count);
    if (!this->reserve(r.sink, to_sink) || !this->reserve(r.tail, count - to_sink)) return false;
    store(r.sink, keys, values, to_sink, replaced, on);
    store(r.tail, keys.from(to_sink), values.from(to_sink), count - to_sink, replaced, on);
    return true;
  }

  // Encodes keys and values of one head: tokens first .. first + group - 1 of the tail.
  void encode(sequence_id id, int layer, int head, int first, std::int32_t index, encoder method,
              const query_factor* factor, float* workspace, target on) const {
    const cache_format& format = this->format(layer);
    const run& tail = this->rows(id, layer).tail;
    std::byte* const bytes = this->page(layer, index);
    const encode_options options{.method = method, .rotate = false, .factor = factor};
    encode_tile(tail.keys(this->shape(), head, first),
                tile_view{bytes + format.key_offset(head), format.key_layout()}, options, workspace,
                on);
    encode_tile(tail.values(this->shape(), head, first),
                tile_view{bytes + format.value_offset(head), format.value_layout()}, options,
                workspace, on);
  }

  // Floats of workspace that encode needs in any layer.
  std::size_t encode_workspace() const {
    std::size_t floats = 0;
    for (int layer = 0; layer < this->layers(); ++layer) {
      const cache_format& format = this->format(layer);
      floats = (std::max)({floats, kvarn::encode_workspace(format.key_layout()),
                           kvarn::encode_workspace(format.value_layout())});
    }
    return floats;
  }

  // The memory of one KV head for attention. `groups` takes the list of `pages`.
  attention_memory<T> memory(sequence_id id, int layer, int head, const sequence_extent& extent,
                             std::span<const sealed_page> pages, sealed_group* groups) const {
    const cache_format& format = this->format(layer);
    const layer_rows& r = this->rows(id, layer);
    const std::size_t to_keys = format.key_offset(head);
    const std::size_t to_values = format.value_offset(head);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const std::byte* const bytes = this->page(layer, pages[i].page);
      groups[i] = {bytes + to_keys, bytes + to_values, pages[i].position, pages[i].count};
    }
    return {format, exact(r.sink, head, 0, extent.sink_count),
            std::span<const sealed_group>(groups, pages.size()),
            exact(r.tail, head, extent.tail_position, extent.tail_count)};
  }

  // What files of sequences take and bring (cache_file.hpp): here in place. A page between
  // fetch_page and file_page, or file_page and put_page.
  void fetch_page(std::int32_t) const {}
  std::byte* file_page(int layer, std::int32_t page) const { return this->page(layer, page); }
  void put_page(std::int32_t) const {}
  // Keys of all heads, then values: visit(rows, elements) with rows 0 .. count - 1 of each head.
  template <class Visit>
  void read_rows(const run& rows, int count, const Visit& visit) const {
    for_each_block(rows, count, visit);
  }
  // The same to write to; they must be reserved.
  template <class Visit>
  void write_rows(run& rows, int count, const Visit& visit) const {
    for_each_block(rows, count, visit);
  }
  // What went wrong in any of these.
  status transfer_status() const { return {}; }

 private:
  template <class Visit>
  void for_each_block(const run& rows, int count, const Visit& visit) const {
    const row_shape& shape = this->shape();
    const auto elements = [count](int dim) {
      return static_cast<std::size_t>(count) * static_cast<std::size_t>(dim);
    };
    for (int head = 0; head < shape.kv_heads; ++head)
      visit(rows.keys(shape, head, 0).data, elements(shape.key_head_dim));
    for (int head = 0; head < shape.kv_heads; ++head)
      visit(rows.values(shape, head, 0).data, elements(shape.value_head_dim));
  }

  exact_tokens<T> exact(const run& rows, int head, std::int64_t position, int count) const {
    KVARN_ASSERT(rows.count() == count);
    const auto keys = rows.keys(this->shape(), head, 0);
    const auto values = rows.values(this->shape(), head, 0);
    return {{keys.data, keys.token_stride}, {values.data, values.token_stride}, position, count};
  }

  template <class K, class V>
  void store(run& rows, heads_view<K> keys, heads_view<V> values, int count,
             replaced_values& replaced, target on) {
    if (count == 0) return;
    const auto store_head = [&](auto in, tokens_view<T> out, int dim, bool rotate) {
      const replaced_values now = rotate ? rotate_tokens(in, out, count, dim, on)
                                         : detail::copy_tokens(in, out, count, dim);
      replaced.nan += now.nan;
      replaced.saturated += now.saturated;
    };
    for (int head = 0; head < this->shape().kv_heads; ++head) {
      store_head(keys.head(head), rows.keys(this->shape(), head, rows.count()),
                 this->shape().key_head_dim, this->rotates_keys());
      store_head(values.head(head), rows.values(this->shape(), head, rows.count()),
                 this->shape().value_head_dim, this->rotates_values());
    }
    rows.extend(count);
  }
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
