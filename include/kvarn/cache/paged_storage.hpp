// What storages of all kinds share: where pages of records and exact rows of every sequence stand.
//
// Pages of one layer stand one after another; page p of a layer starts at
// layer_offset(layer) + p * page_bytes(layer), in 64 bits. What belongs where is page_table's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../config.hpp"
#include "../format/tile_layout.hpp"
#include "cache_config.hpp"
#include "exact_run.hpp"
#include "fixed_array.hpp"
#include "memory_account.hpp"
#include "page_table.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// `T`: the type of exact rows. `Space`: where they stand (exact_run.hpp).
template <class T, class Space>
class paged_storage {
 public:
  using element = T;
  using run = exact_run<T, Space>;

  // The exact rows of one sequence in one layer.
  struct layer_rows {
    run sink;
    run tail;
  };

  // Precondition: validate(config) is ok. `rows`: the account of exact rows.
  paged_storage(const cache_config& config, memory_accounts& memory,
                typename Space::account& rows_account)
      : shape_{config.kv_heads, config.format.key_head_dim, config.format.value_head_dim},
        sink_(config.sink),
        exact_limit_(config.exact_memory),
        rotate_keys_(!config.keys_rotated),
        rotate_values_(!config.values_rotated),
        memory_(&memory),
        rows_account_(&rows_account),
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
  paged_storage(const paged_storage&) = delete;
  paged_storage& operator=(const paged_storage&) = delete;
  ~paged_storage() {
    if (own_bytes_ != 0) memory_->pages.deallocate(pages_, own_bytes_, page_alignment);
  }

  const row_shape& shape() const noexcept { return shape_; }
  int layers() const noexcept { return static_cast<int>(layers_.size()); }
  int sink() const noexcept { return sink_; }
  bool rotates_keys() const noexcept { return rotate_keys_; }
  bool rotates_values() const noexcept { return rotate_values_; }
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

  // exact_run::reserve.
  bool reserve(run& rows, int more, bool tight = false, int least = 0) {
    return rows.reserve(shape_, *rows_account_, more, tight, least);
  }
  // How much of exact_memory is taken, for the message where reserve is false.
  std::string exact_room() const {
    return message_of({"exact rows take ", memory_->exact.bytes(), " of the ", exact_limit_,
                       " bytes of exact_memory"});
  }
  // exact_run::shrink.
  void shrink(run& rows, int slack) { rows.shrink(shape_, *rows_account_, slack); }

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

  const row_shape shape_;
  const int sink_;
  const std::size_t exact_limit_;
  const bool rotate_keys_;
  const bool rotate_values_;
  memory_accounts* memory_;
  typename Space::account* rows_account_;
  fixed_array<layer_info> layers_;
  std::byte* pages_ = nullptr;
  std::size_t own_bytes_ = 0;
  fixed_array<layer_rows> rows_;  // [max_sequences][layers]
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
