#include "evaluate.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../examples/engine/dense.hpp"
#include "cache_store.hpp"
#include "kvarn/metrics.hpp"

namespace kvarn_eval {

namespace {

// The last queries of a window, over which errors of attention are taken.
constexpr int measured_positions = 32;

}  // namespace

std::unique_ptr<measured_memory> make_memory(const kvarn_engine::model_config& model,
                                             const layout& l, const method* m, int most_tokens,
                                             const recording* stored,
                                             const kvarn_examples::thread_pool& pool) {
  if (m == nullptr || m->kind == storage::baseline)
    return std::make_unique<row_store>(model, l, m, most_tokens, stored, pool);
  if (m->kind == storage::exact)
    return std::make_unique<cache_store<kvarn::float16>>(model, l, *m, most_tokens, stored, pool);
  return std::make_unique<cache_store<float>>(model, l, *m, most_tokens, stored, pool);
}

exact_run::exact_run(kvarn_engine::transformer& model, const layout& l, std::vector<int> tokens,
                     int first_scored, const kvarn_examples::thread_pool& pool,
                     const progress& report)
    : model_(&model),
      layout_(l),
      tokens_(std::move(tokens)),
      first_scored_(first_scored),
      pool_(&pool),
      store_(std::make_unique<row_store>(model.config(), l, nullptr,
                                         static_cast<int>(tokens_.size()), nullptr, pool, true)) {
  const auto vocabulary = static_cast<std::size_t>(model.config().vocabulary);
  for (const int token : tokens_)
    if (token < 0 || static_cast<std::size_t>(token) >= vocabulary)
      throw std::runtime_error("the text has token " + std::to_string(token) + "; the model has " +
                               std::to_string(vocabulary));
  hidden_.reserve(tokens_.size() * static_cast<std::size_t>(model.config().hidden));
  std::vector<float> logits, nll(tokens_.size() - 1);
  model.prefill(tokens_, l.group, *store_, [&](std::size_t first, std::span<const float> hidden) {
    hidden_.insert(hidden_.end(), hidden.begin(), hidden.end());
    const std::size_t count = hidden.size() / static_cast<std::size_t>(model.config().hidden);
    logits.resize(count * vocabulary);
    model.logits(hidden.data(), static_cast<int>(count), logits.data());
    pool((std::min)(count, nll.size() - first), [&](std::size_t i) {
      const float* const row = logits.data() + i * vocabulary;
      const auto sum = kvarn_engine::log_softmax(row, model.config().vocabulary);
      nll[first + i] =
          static_cast<float>(sum.log_sum - static_cast<double>(row[tokens_[first + i + 1]]));
    });
    report(static_cast<double>(first + count) / static_cast<double>(tokens_.size()));
  });
  skipped_nll_.assign(nll.begin(), nll.begin() + first_scored_);
  nll_.assign(nll.begin() + first_scored_, nll.end());
}

token_scores exact_run::score(measured_memory& memory, const progress& report) {
  const auto vocabulary = static_cast<std::size_t>(model_->config().vocabulary);
  const auto width = static_cast<std::size_t>(model_->config().hidden);
  const auto scored_from = static_cast<std::size_t>(first_scored_);
  const auto count = static_cast<std::size_t>(scored());
  token_scores scores{std::vector<float>(count), std::vector<float>(count),
                      std::vector<char>(count)};
  std::vector<float> logits, exact_logits;
  model_->prefill(
      tokens_, layout_.group, memory, [&](std::size_t first, std::span<const float> hidden) {
        // Positions begin .. end - 1 of this step are scored.
        const std::size_t end = (std::min)(first + hidden.size() / width, tokens_.size() - 1);
        const std::size_t begin = (std::max)(first, scored_from);
        report(static_cast<double>(end) / static_cast<double>(tokens_.size()));
        if (begin >= end) return;
        const auto rows = static_cast<int>(end - begin);
        logits.resize((end - begin) * vocabulary);
        exact_logits.resize(logits.size());
        model_->logits(hidden.data() + (begin - first) * width, rows, logits.data());
        model_->logits(hidden_.data() + begin * width, rows, exact_logits.data());
        (*pool_)(end - begin, [&](std::size_t i) {
          const float* const exact = exact_logits.data() + i * vocabulary;
          const float* const other = logits.data() + i * vocabulary;
          const int size = static_cast<int>(vocabulary);
          const auto exact_sum = kvarn_engine::log_softmax(exact, size);
          const auto other_sum = kvarn_engine::log_softmax(other, size);
          const std::size_t at = begin + i - scored_from;
          scores.kl[at] = static_cast<float>(
              kvarn_engine::kl_divergence(exact, exact_sum, other, other_sum, size));
          scores.nll[at] = static_cast<float>(other_sum.log_sum -
                                              static_cast<double>(other[tokens_[begin + i + 1]]));
          scores.agrees[at] = exact_sum.best == other_sum.best;
        });
      });
  return scores;
}

token_scores exact_run::pseudo_decode(const method& m, const progress& report) {
  const auto memory =
      make_memory(model_->config(), layout_, &m, static_cast<int>(tokens_.size()), nullptr, *pool_);
  return score(*memory, report);
}

token_scores exact_run::static_run(const method& m, std::vector<head_errors>* heads,
                                   const progress& report) {
  const auto memory =
      make_memory(model_->config(), layout_, &m, static_cast<int>(tokens_.size()), &rows(), *pool_);
  token_scores scores = score(*memory, report);
  if (heads != nullptr) *heads = errors_of_heads(*memory);
  return scores;
}

std::vector<head_errors> exact_run::errors_of_heads(const measured_memory& memory) const {
  const kvarn_engine::model_config& c = model_->config();
  const auto width = static_cast<std::size_t>(c.head_dim);
  const auto shared = static_cast<std::size_t>(c.query_heads / c.kv_heads);
  const auto tokens = tokens_.size();
  const auto positions = (std::min)(tokens, std::size_t{measured_positions});
  std::vector<head_errors> all(static_cast<std::size_t>(c.layers * c.kv_heads));

  (*pool_)(all.size(), [&](std::size_t i) {
    head_errors& e = all[i];
    e.layer = static_cast<int>(i) / c.kv_heads;
    e.head = static_cast<int>(i) % c.kv_heads;
    const auto keys = rows().keys.at(e.layer, e.head);
    const auto values = rows().values.at(e.layer, e.head);
    std::vector<float> approx_keys(keys.begin(), keys.end());
    std::vector<float> approx_values(values.begin(), values.end());
    memory.reconstruct(e.layer, e.head, kvarn::tile_kind::key, approx_keys);
    memory.reconstruct(e.layer, e.head, kvarn::tile_kind::value, approx_values);

    const auto part = [&](std::span<const float> rows, kvarn::tile_kind kind) {
      const kvarn::token_range range = memory.quantised(e.layer, kind);
      return rows.subspan(range.first * width, range.count() * width);
    };
    const auto k = part(keys, kvarn::tile_kind::key);
    const auto approx_k = part(approx_keys, kvarn::tile_kind::key);
    e.key = kvarn::relative_squared_error(k, approx_k);
    e.value = kvarn::relative_squared_error(part(values, kvarn::tile_kind::value),
                                            part(approx_values, kvarn::tile_kind::value));
    e.magnitude_share = kvarn::split_error(k, approx_k, width).magnitude_share();
    e.token_scale = kvarn::mean_norm_error(k, approx_k, width);

    std::vector<float> queries;  // [positions][shared][head_dim]
    for (std::size_t p = tokens - positions; p < tokens; ++p)
      for (std::size_t q = 0; q < shared; ++q) {
        const auto head =
            rows().queries.at(e.layer, e.head * static_cast<int>(shared) + static_cast<int>(q));
        const auto row = head.subspan(p * width, width);
        queries.insert(queries.end(), row.begin(), row.end());
      }
    const auto attention = kvarn::compare_attention({.tokens = tokens,
                                                     .query_heads = shared,
                                                     .key_dim = width,
                                                     .value_dim = width,
                                                     .queries = queries,
                                                     .keys = keys,
                                                     .values = values,
                                                     .approx_keys = approx_keys,
                                                     .approx_values = approx_values});
    e.attention_kl = attention.kl;
    e.output = attention.output;
  });
  return all;
}

}  // namespace kvarn_eval
