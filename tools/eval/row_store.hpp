// Exact rows of one sequence, FP32, for all layers: the memory of the exact run, and of a baseline
// that replaces complete groups by its reconstruction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../../examples/engine/kv_memory.hpp"
#include "../../examples/engine/model_config.hpp"
#include "../../examples/executors/thread_pool.hpp"
#include "kvarn/baselines/exact_rule.hpp"
#include "kvarn/format/tile_layout.hpp"
#include "method.hpp"

namespace kvarn_eval {

// Rows of `tokens` tokens of every layer and head: [layer][head][tokens][head_dim].
class head_rows {
 public:
  head_rows() = default;
  head_rows(int layers, int heads, int tokens, int head_dim)
      : heads_(heads),
        per_head_(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(head_dim)),
        values_(static_cast<std::size_t>(layers) * static_cast<std::size_t>(heads) * per_head_) {}

  std::span<float> at(int layer, int head) {
    return std::span(values_).subspan(start(layer, head), per_head_);
  }
  std::span<const float> at(int layer, int head) const {
    return std::span(values_).subspan(start(layer, head), per_head_);
  }

 private:
  std::size_t start(int layer, int head) const {
    return (static_cast<std::size_t>(layer) * static_cast<std::size_t>(heads_) +
            static_cast<std::size_t>(head)) *
           per_head_;
  }

  int heads_ = 0;
  std::size_t per_head_ = 0;
  std::vector<float> values_;
};

// What one run has computed, after RoPE.
struct recording {
  recording(const kvarn_engine::model_config& model, int most_tokens, bool with_queries)
      : keys(model.layers, model.kv_heads, most_tokens, model.head_dim),
        values(model.layers, model.kv_heads, most_tokens, model.head_dim),
        queries(model.layers, model.query_heads, with_queries ? most_tokens : 0, model.head_dim) {}

  head_rows keys, values, queries;
};

// A memory whose quantised tokens can be looked at.
class measured_memory : public kvarn_engine::kv_memory {
 public:
  // The tokens that are quantised.
  virtual kvarn::token_range quantised(int layer, kvarn::tile_kind kind) const = 0;

  // Overwrites these among rows [tokens][head_dim] by what attention sees of them.
  virtual void reconstruct(int layer, int head, kvarn::tile_kind kind,
                           std::span<float> rows) const = 0;
};

class row_store : public measured_memory {
 public:
  // Room for `most_tokens`. `m`: null for exact rows, or a baseline. `stored`: null, or a recording
  // of the same tokens whose keys and values are stored in the place of the run's own when a step
  // ends. Throws kvarn::error where the baseline does not serve the model. What a pointer points
  // to, and the pool, must outlive the store. `keep_queries`: in rows().
  row_store(const kvarn_engine::model_config& model, const layout& l, const method* m,
            int most_tokens, const recording* stored, const kvarn_examples::thread_pool& pool,
            bool keep_queries = false);

  void attend(int layer, const kvarn_engine::attention_step& step) override;
  void commit() override;
  void discard() override { step_tokens_ = 0; }
  std::int64_t length() const override { return length_; }
  kvarn::token_range quantised(int layer, kvarn::tile_kind kind) const override;
  void reconstruct(int layer, int head, kvarn::tile_kind kind,
                   std::span<float> rows) const override;

  // What is stored; the queries, if they are kept.
  const recording& rows() const { return rows_; }

 private:
  head_rows& rows_of(kvarn::tile_kind kind) {
    return kind == kvarn::tile_kind::key ? rows_.keys : rows_.values;
  }
  kvarn::token_range quantised_of(int layer, kvarn::tile_kind kind, std::int64_t tokens) const;
  void quantise(int layer, int head, kvarn::tile_kind kind);

  kvarn_engine::model_config model_;
  layout layout_;
  const method* method_;
  kvarn::exact_policy policy_;
  int most_tokens_;
  const recording* stored_;
  const kvarn_examples::thread_pool* pool_;
  bool keeps_queries_;
  recording rows_;
  std::int64_t length_ = 0;
  int step_tokens_ = 0;  // of the step that is not committed
  std::vector<float> workspace_;
};

}  // namespace kvarn_eval
