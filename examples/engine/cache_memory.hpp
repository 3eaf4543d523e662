// The library's cache as the transformer's memory: one sequence of a kvarn::kv_cache.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "../executors/thread_pool.hpp"
#include "kv_memory.hpp"
#include "kvarn/cache/kv_cache.hpp"
#include "model_config.hpp"

namespace kvarn_engine {

// How a cache stores tokens. `bits` both 0: all of them exact.
struct cache_choice {
  kvarn::layer_bits bits = {2, 2};
  kvarn::encoder method = kvarn::encoder::tuned;
  int sink = 128;
  int tail = 0;
  int group = 128;
  kvarn::scale_type scale = kvarn::scale_type::ue5m3;
  kvarn::operand_precision precision = kvarn::operand_precision::int16;

  bool is_exact() const { return bits == kvarn::exact_layer; }
};

// `T`: the type of exact rows.
template <class T>
class cache_memory : public kv_memory {
 public:
  // Room for `tokens` tokens. Throws kvarn::error where the model or the choice does not fit the
  // library. The pool must outlive it.
  cache_memory(const model_config& model, const cache_choice& choice, std::int64_t tokens,
               const kvarn_examples::thread_pool& pool)
      : model_(model), choice_(choice), pool_(&pool), cache_(make(model, choice, tokens)) {
    id_ = cache_.create().value();
  }

  void attend(int layer, const attention_step& step) override {
    append(layer, kvarn::token_major(step.keys, model_.kv_heads, model_.head_dim),
           kvarn::token_major(step.values, model_.kv_heads, model_.head_dim), step.tokens);
    // The queries count for the group that they stand in: it is sealed after them.
    observe(layer, kvarn::token_major(step.queries, model_.query_heads, model_.head_dim),
            step.tokens);
    attend_appended(layer, step);
  }

  void commit() override {
    cache_.commit(id_).or_throw();
    cache_.seal(id_, std::numeric_limits<int>::max(), workspace_, *pool_, pool_->threads()).value();
  }

  void discard() override { cache_.truncate(id_, length()).or_throw(); }

  std::int64_t length() const override { return cache_.length(id_); }

  // The parts of attend, for who feeds the cache otherwise.
  void append(int layer, kvarn::heads_view<const float> keys, kvarn::heads_view<const float> values,
              int tokens) {
    cache_.append(id_, layer, keys, values, tokens).or_throw();
  }
  void observe(int layer, kvarn::heads_view<const float> queries, int tokens) {
    cache_.observe(id_, layer, queries, tokens).or_throw();
  }
  void attend_appended(int layer, const attention_step& step) {
    const kvarn::cache_queries<float, float> queries{
        kvarn::token_major(step.queries, model_.query_heads, model_.head_dim),
        kvarn::token_major(step.out, model_.query_heads, model_.head_dim), step.tokens};
    kvarn::attention_options options;
    options.softmax_scale = 1.0f / std::sqrt(static_cast<float>(model_.head_dim));
    options.precision = choice_.precision;
    cache_.attend(std::span(&id_, 1), layer, std::span(&queries, 1), options, workspace_, *pool_)
        .or_throw();
  }
  const kvarn::kv_cache<T>& cache() const { return cache_; }
  kvarn::sequence_id id() const { return id_; }

  // Bytes of the tokens that are stored now: pages in use and exact rows.
  double stored_bytes() const {
    const kvarn::sequence_extent extent = cache_.table().extent(id_, 0);
    const double exact = static_cast<double>(extent.sink_count + extent.tail_count);
    const auto pages = static_cast<double>(extent.page_count);
    return exact * static_cast<double>(cache_.exact_token_bytes()) +
           pages * choice_.group * cache_.sealed_token_bytes();
  }

 private:
  static kvarn::kv_cache<T> make(const model_config& model, const cache_choice& choice,
                                 std::int64_t tokens) {
    kvarn::cache_config config{
        .layers = model.layers, .kv_heads = model.kv_heads, .query_heads = model.query_heads};
    config.format.key_head_dim = config.format.value_head_dim = model.head_dim;
    config.format.group = choice.group;
    config.format.scale = choice.scale;
    std::vector<kvarn::layer_bits> bits;
    if (choice.is_exact()) {
      bits.assign(static_cast<std::size_t>(model.layers), kvarn::exact_layer);
      config.bits = bits;
    } else {
      config.format.key_bits = choice.bits.key;
      config.format.value_bits = choice.bits.value;
    }
    config.method = choice.method;
    config.sink = choice.sink;
    config.tail = choice.tail;
    config.max_sequences = 1;
    kvarn::validate(config.format).or_throw();  // what follows divides by the group
    config.page_count = tokens / choice.group + 1;
    return kvarn::kv_cache<T>::make(config).value();
  }

  model_config model_;
  cache_choice choice_;
  const kvarn_examples::thread_pool* pool_;
  kvarn::kv_cache<T> cache_;
  kvarn::sequence_id id_;
  kvarn::cache_workspace workspace_;
};

}  // namespace kvarn_engine
