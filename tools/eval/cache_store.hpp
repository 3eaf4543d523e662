// The library's cache as a memory of the evaluation: exact rows in FP32 or FP16, complete groups in
// packed pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "../../examples/engine/cache_memory.hpp"
#include "row_store.hpp"

namespace kvarn_eval {

// `T`: the type of exact rows.
template <class T>
class cache_store : public measured_memory {
 public:
  // As row_store. `m` is exact or packed.
  cache_store(const kvarn_engine::model_config& model, const layout& l, const method& m,
              int most_tokens, const recording* stored, const kvarn_examples::thread_pool& pool)
      : model_(model), memory_(model, choice_of(l, m), most_tokens, pool), stored_(stored) {}

  void attend(int layer, const kvarn_engine::attention_step& step) override {
    if (stored_ == nullptr) return memory_.attend(layer, step);
    memory_.append(layer, kvarn::token_major(step.keys, model_.kv_heads, model_.head_dim),
                   kvarn::token_major(step.values, model_.kv_heads, model_.head_dim), step.tokens);
    memory_.attend_appended(layer, step);
    step_tokens_ = step.tokens;
  }

  void commit() override {
    if (stored_ != nullptr) store_recorded();
    memory_.commit();
  }

  void discard() override { memory_.discard(); }

  std::int64_t length() const override { return memory_.length(); }

  kvarn::token_range quantised(int layer, kvarn::tile_kind) const override {
    const auto& table = memory_.cache().table();
    if (table.is_exact_layer(layer)) return {};
    const auto extent = table.extent(memory_.id(), layer);
    const auto end = static_cast<std::size_t>((std::min)(extent.length, extent.tail_position));
    return {(std::min)(static_cast<std::size_t>(extent.sink_count), end), end};
  }

  void reconstruct(int layer, int head, kvarn::tile_kind kind,
                   std::span<float> rows) const override {
    const auto& cache = memory_.cache();
    if (cache.table().is_exact_layer(layer)) return;
    const bool is_key = kind == kvarn::tile_kind::key;
    const kvarn::cache_format& format = cache.storage().format(layer);
    const auto tile = is_key ? format.key_layout() : format.value_layout();
    const auto offset = is_key ? format.key_offset(head) : format.value_offset(head);
    for (const kvarn::sealed_page& page : cache.table().pages(memory_.id())) {
      const kvarn::const_tile_view record{cache.storage().page(layer, page.page) + offset, tile};
      kvarn::decode_tile(record,
                         kvarn::tokens_view<float>{rows.data() + page.position * model_.head_dim,
                                                   model_.head_dim});
    }
  }

 private:
  static kvarn_engine::cache_choice choice_of(const layout& l, const method& m) {
    kvarn_engine::cache_choice choice{.sink = l.sink, .group = l.group};
    choice.method = m.encoder;
    if (m.int8) choice.precision = kvarn::operand_precision::int8;
    choice.bits =
        m.kind == storage::exact ? kvarn::exact_layer : kvarn::layer_bits{m.key_bits, m.value_bits};
    return choice;
  }

  // The run's own tokens of this step are forgotten, as a draft that was rejected.
  void store_recorded() {
    const std::int64_t first = memory_.length();
    memory_.discard();
    for (int layer = 0; layer < model_.layers; ++layer) {
      memory_.append(layer, view(stored_->keys, layer, first), view(stored_->values, layer, first),
                     step_tokens_);
      memory_.observe(layer, view(stored_->queries, layer, first), step_tokens_);
    }
  }
  kvarn::heads_view<const float> view(const head_rows& rows, int layer, std::int64_t first) const {
    return {rows.at(layer, 0).data() + first * model_.head_dim, model_.head_dim,
            static_cast<std::ptrdiff_t>(rows.at(layer, 0).size()), 1};
  }

  kvarn_engine::model_config model_;
  kvarn_engine::cache_memory<T> memory_;
  const recording* stored_;
  int step_tokens_ = 0;
};

}  // namespace kvarn_eval
