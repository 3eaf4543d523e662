#include "row_store.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kvarn/attention/attend.hpp"
#include "kvarn/baselines/baselines.hpp"

namespace kvarn_eval {

namespace {

// Copies head `head` of `tokens` tokens [tokens][heads][head_dim] to rows of the head.
void copy_head(const float* from, int heads, int head, int head_dim, int tokens, float* to) {
  for (int t = 0; t < tokens; ++t)
    std::copy_n(from + (std::ptrdiff_t{t} * heads + head) * head_dim, head_dim,
                to + std::ptrdiff_t{t} * head_dim);
}

}  // namespace

row_store::row_store(const kvarn_engine::model_config& model, const layout& l, const method* m,
                     int most_tokens, const recording* stored,
                     const kvarn_examples::thread_pool& pool, bool keep_queries)
    : model_(model),
      layout_(l),
      method_(m),
      most_tokens_(most_tokens),
      stored_(stored),
      pool_(&pool),
      keeps_queries_(keep_queries),
      rows_(model, most_tokens, keep_queries) {
  kvarn::validate(
      kvarn::cache_format{.key_head_dim = model.head_dim, .value_head_dim = model.head_dim})
      .or_throw();
  if (method_ == nullptr) return;
  policy_ = policy_of(*method_, layout_);
  for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value})
    kvarn::validate(*method_->baseline, settings_of(*method_, layout_, model_.head_dim, kind))
        .or_throw();
}

void row_store::attend(int layer, const kvarn_engine::attention_step& step) {
  const int head_dim = model_.head_dim;
  const auto first = static_cast<int>(length_);
  if (step.tokens > most_tokens_ - first)
    throw std::runtime_error("row store: " + std::to_string(first + step.tokens) +
                             " tokens; there is room for " + std::to_string(most_tokens_));
  step_tokens_ = step.tokens;
  const std::ptrdiff_t offset = std::ptrdiff_t{first} * head_dim;
  for (int h = 0; h < model_.kv_heads; ++h) {
    copy_head(step.keys, model_.kv_heads, h, head_dim, step.tokens,
              rows_.keys.at(layer, h).data() + offset);
    copy_head(step.values, model_.kv_heads, h, head_dim, step.tokens,
              rows_.values.at(layer, h).data() + offset);
  }
  for (int h = 0; keeps_queries_ && h < model_.query_heads; ++h)
    copy_head(step.queries, model_.query_heads, h, head_dim, step.tokens,
              rows_.queries.at(layer, h).data() + offset);

  // Rotating keys and queries changes no score, so nothing is rotated: all tokens count as a sink.
  using task = kvarn::attention_task<float, float, float>;
  const int shared = model_.query_heads / model_.kv_heads;
  std::vector<task> tasks;
  for (int h = 0; h < model_.kv_heads; ++h) {
    task t;
    const std::ptrdiff_t heads_before = std::ptrdiff_t{h} * shared * head_dim;
    const std::ptrdiff_t gap = std::ptrdiff_t{model_.query_heads - shared} * head_dim;
    t.queries = {{step.queries + heads_before, head_dim}, step.tokens, shared, first, gap};
    t.memory.format.key_head_dim = t.memory.format.value_head_dim = head_dim;
    t.memory.sink = {{rows_.keys.at(layer, h).data(), head_dim},
                     {rows_.values.at(layer, h).data(), head_dim},
                     0,
                     first + step.tokens};
    t.options.softmax_scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    t.options.queries_rotated = true;
    t.options.rotate_output = false;
    t.out = {step.out + heads_before, head_dim};
    t.out_token_gap = gap;
    tasks.push_back(t);
  }
  const kvarn::attention_batch<task> batch(tasks);
  workspace_.resize((std::max)(workspace_.size(), batch.workspace()));
  batch.run(workspace_.data(), *pool_);
}

void row_store::commit() {
  length_ += step_tokens_;
  const int heads = model_.kv_heads;
  (*pool_)(static_cast<std::size_t>(model_.layers * heads), [&](std::size_t i) {
    const int layer = static_cast<int>(i) / heads;
    const int head = static_cast<int>(i) % heads;
    for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value}) {
      if (stored_ != nullptr) {
        const auto from =
            (kind == kvarn::tile_kind::key ? stored_->keys : stored_->values).at(layer, head);
        const auto width = static_cast<std::size_t>(model_.head_dim);
        const auto count = static_cast<std::size_t>(step_tokens_) * width;
        const auto start = static_cast<std::size_t>(length_) * width - count;
        std::ranges::copy(from.subspan(start, count), rows_of(kind).at(layer, head).begin() +
                                                          static_cast<std::ptrdiff_t>(start));
      }
      if (method_ != nullptr) quantise(layer, head, kind);
    }
  });
  step_tokens_ = 0;
}

kvarn::token_range row_store::quantised_of(int layer, kvarn::tile_kind kind,
                                           std::int64_t tokens) const {
  if (method_ == nullptr || kvarn::is_exact_layer(policy_, layer, model_.layers)) return {};
  const auto together = static_cast<std::size_t>(
      method_->baseline->tokens_together(settings_of(*method_, layout_, model_.head_dim, kind)));
  return kvarn::quantised_tokens(policy_.of(kind), together, static_cast<std::size_t>(tokens));
}

// What this step has completed.
void row_store::quantise(int layer, int head, kvarn::tile_kind kind) {
  const kvarn::token_range before = quantised_of(layer, kind, length_ - step_tokens_);
  const kvarn::token_range now = quantised_of(layer, kind, length_);
  const std::size_t first = before.count() > 0 ? before.end : now.first;
  if (first >= now.end) return;
  const auto width = static_cast<std::size_t>(model_.head_dim);
  const auto rows = rows_of(kind).at(layer, head).subspan(first * width, (now.end - first) * width);
  kvarn::quantize_dequantize(*method_->baseline,
                             settings_of(*method_, layout_, model_.head_dim, kind), rows, rows)
      .or_throw();
}

kvarn::token_range row_store::quantised(int layer, kvarn::tile_kind kind) const {
  return quantised_of(layer, kind, length_);
}

void row_store::reconstruct(int layer, int head, kvarn::tile_kind kind,
                            std::span<float> rows) const {
  const auto from = (kind == kvarn::tile_kind::key ? rows_.keys : rows_.values).at(layer, head);
  const kvarn::token_range range = quantised(layer, kind);
  const auto width = static_cast<std::size_t>(model_.head_dim);
  std::ranges::copy(from.subspan(range.first * width, range.count() * width),
                    rows.begin() + static_cast<std::ptrdiff_t>(range.first * width));
}

}  // namespace kvarn_eval
