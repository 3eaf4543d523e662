// The bytes of a cache in host memory: pages of records, and exact rows of every sequence.
//
// Pages of one layer stand one after another; page p of a layer starts at
// layer_offset(layer) + p * page_bytes(layer), in 64 bits. What belongs where is page_table's.
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
#include "fixed_array.hpp"
#include "heads_view.hpp"
#include "memory_account.hpp"
#include "page_table.hpp"

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
class host_storage {
 public:
  // The exact rows of one sequence in one layer.
  struct layer_rows {
    exact_run<T> sink;
    exact_run<T> tail;
  };

  // Precondition: validate(config) is ok.
  host_storage(const cache_config& config, memory_accounts& memory)
      : shape_{config.kv_heads, config.format.key_head_dim, config.format.value_head_dim},
        sink_(config.sink),
        rotate_keys_(!config.keys_rotated),
        rotate_values_(!config.values_rotated),
        memory_(&memory),
        layers_(static_cast<std::size_t>(config.layers), &memory.tables),
        rows_(layers_.size() * static_cast<std::size_t>(config.max_sequences), &memory.tables) {
    const auto pages = static_cast<std::size_t>(page_count_of(config));
    std::size_t offset = 0;
    for (int layer = 0; layer < config.layers; ++layer) {
      const std::size_t bytes = kvarn::page_bytes(config, layer);
      layers_[static_cast<std::size_t>(layer)] = {format_of(config, layer), bytes, offset};
      offset += pages * bytes;
    }
    if (config.pages.empty() && offset > 0) {
      own_bytes_ = offset;
      pages_ = static_cast<std::byte*>(memory.pages.allocate(own_bytes_, page_alignment));
    } else {
      pages_ = config.pages.data();
    }
  }
  host_storage(const host_storage&) = delete;
  host_storage& operator=(const host_storage&) = delete;
  ~host_storage() {
    if (own_bytes_ != 0) memory_->pages.deallocate(pages_, own_bytes_, page_alignment);
  }

  const row_shape& shape() const noexcept { return shape_; }
  const cache_format& format(int layer) const { return at(layer).format; }

  // Bytes of a page in one layer; 0 in exact layers.
  std::size_t page_bytes(int layer) const { return at(layer).page_bytes; }
  // Bytes from the first page of the first layer to that of another.
  std::size_t layer_offset(int layer) const { return at(layer).offset; }
  std::byte* page(int layer, std::int32_t index) const {
    return pages_ + layer_offset(layer) + static_cast<std::size_t>(index) * page_bytes(layer);
  }

  layer_rows& rows(sequence_id id, int layer) { return rows_[row_index(id, layer)]; }
  const layer_rows& rows(sequence_id id, int layer) const { return rows_[row_index(id, layer)]; }

  // Bytes of one exact token in one layer.
  std::size_t row_bytes() const noexcept { return shape_.elements() * sizeof(T); }

  // Stores `count` tokens of one layer behind those of `extent`. False, with nothing changed, where
  // the limit of exact rows is met.
  template <class K, class V>
  bool append(sequence_id id, int layer, const sequence_extent& extent, heads_view<K> keys,
              heads_view<V> values, int count, replaced_values& replaced, target on) {
    layer_rows& r = rows(id, layer);
    const int to_sink = (std::min)(count, sink_ - extent.sink_count);
    if (!r.sink.reserve(shape_, memory_->exact, to_sink) ||
        !r.tail.reserve(shape_, memory_->exact, count - to_sink))
      return false;
    store(r.sink, keys, values, to_sink, replaced, on);
    store(r.tail, keys.from(to_sink), values.from(to_sink), count - to_sink, replaced, on);
    return true;
  }

  // Encodes keys and values of one head: tokens first .. first + group - 1 of the tail.
  void encode(sequence_id id, int layer, int head, int first, std::int32_t index, encoder method,
              const query_factor* factor, float* workspace, target on) const {
    const cache_format& format = at(layer).format;
    const exact_run<T>& tail = rows(id, layer).tail;
    std::byte* const bytes = page(layer, index);
    const encode_options options{.method = method, .rotate = false, .factor = factor};
    encode_tile(tail.keys(shape_, head, first),
                tile_view{bytes + format.key_offset(head), format.key_layout()}, options, workspace,
                on);
    encode_tile(tail.values(shape_, head, first),
                tile_view{bytes + format.value_offset(head), format.value_layout()}, options,
                workspace, on);
  }

  // Floats of workspace that encode needs in any layer.
  std::size_t encode_workspace() const {
    std::size_t floats = 0;
    for (const layer_info& layer : layers_)
      floats = (std::max)({floats, kvarn::encode_workspace(layer.format.key_layout()),
                           kvarn::encode_workspace(layer.format.value_layout())});
    return floats;
  }

  // The memory of one KV head for attention. `groups` takes the list of `pages`.
  attention_memory<T> memory(sequence_id id, int layer, int head, const sequence_extent& extent,
                             std::span<const sealed_page> pages, sealed_group* groups) const {
    const layer_info& info = at(layer);
    const layer_rows& r = rows(id, layer);
    const std::size_t to_keys = info.format.key_offset(head);
    const std::size_t to_values = info.format.value_offset(head);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const std::byte* const bytes = page(layer, pages[i].page);
      groups[i] = {bytes + to_keys, bytes + to_values, pages[i].position, pages[i].count};
    }
    return {info.format, exact(r.sink, head, 0, extent.sink_count),
            std::span<const sealed_group>(groups, pages.size()),
            exact(r.tail, head, extent.tail_position, extent.tail_count)};
  }

 private:
  static constexpr std::size_t page_alignment = 64;

  struct layer_info {
    cache_format format = {};
    std::size_t page_bytes = 0;
    std::size_t offset = 0;  // of page 0
  };

  const layer_info& at(int layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  std::size_t row_index(sequence_id id, int layer) const {
    return std::size_t{id.slot} * layers_.size() + static_cast<std::size_t>(layer);
  }

  exact_tokens<T> exact(const exact_run<T>& run, int head, std::int64_t position, int count) const {
    KVARN_ASSERT(run.count() == count);
    const auto keys = run.keys(shape_, head, 0);
    const auto values = run.values(shape_, head, 0);
    return {{keys.data, keys.token_stride}, {values.data, values.token_stride}, position, count};
  }

  template <class K, class V>
  void store(exact_run<T>& run, heads_view<K> keys, heads_view<V> values, int count,
             replaced_values& replaced, target on) {
    if (count == 0) return;
    const auto store_head = [&](auto in, tokens_view<T> out, int dim, bool rotate) {
      const replaced_values now = rotate ? rotate_tokens(in, out, count, dim, on)
                                         : detail::copy_tokens(in, out, count, dim);
      replaced.nan += now.nan;
      replaced.saturated += now.saturated;
    };
    for (int head = 0; head < shape_.kv_heads; ++head) {
      store_head(keys.head(head), run.keys(shape_, head, run.count()), shape_.key_head_dim,
                 rotate_keys_);
      store_head(values.head(head), run.values(shape_, head, run.count()), shape_.value_head_dim,
                 rotate_values_);
    }
    run.extend(count);
  }

  const row_shape shape_;
  const int sink_;
  const bool rotate_keys_;
  const bool rotate_values_;
  memory_accounts* memory_;
  fixed_array<layer_info> layers_;
  std::byte* pages_ = nullptr;
  std::size_t own_bytes_ = 0;
  fixed_array<layer_rows> rows_;  // [max_sequences][layers]
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
