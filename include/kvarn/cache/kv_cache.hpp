// The KV cache that an engine talks to: sequences of tokens in sealed pages and exact rows.
//
// A step of an engine: for each layer append keys and values and attend; when all layers have them,
// commit; then seal what may be sealed. Tokens that are not committed (drafts) can be attended to
// and are never sealed; truncate takes back any tokens. The user's page: docs/cache.md.
//
// Errors are a status or result and leave the cache as it was:
//   invalid_argument  a sequence that does not exist, a layer, count or position out of range
//   short_buffer      pages, sequences or the memory for exact rows are used up
//   out_of_memory     the memory resource, or the system, gave nothing
// Without exceptions a program ends where memory does.
//
// Threads: different sequences may be used from different threads at once. One sequence by one
// thread at a time; fork and save count as use of their source. Moving or destroying the cache
// counts as use of all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "../attention/attend.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "../format/float16.hpp"
#include "../simd/target.hpp"
#include "cache_base.hpp"
#include "cache_config.hpp"
#include "cache_state.hpp"
#include "exact_run.hpp"
#include "heads_view.hpp"
#include "page_table.hpp"
#include "query_moments.hpp"

namespace kvarn {

inline namespace KVARN_ISA_NAMESPACE {

// `T`: the type of exact rows: float16, bfloat16 or float. What it has of cache_base.hpp is as much
// a part of it: create, fork, free, clear, commit, truncate, drop_oldest, lengths, accounting.
template <class T = float16>
class kv_cache : public cache_base<cache_state<T>> {
  using base = cache_base<cache_state<T>>;

 public:
  using base::free_pages;
  using base::is_live;
  using base::memory;
  using base::sealable;

  // An empty cache, or what is wrong with the configuration. `factors`: for encoder::query_aware,
  // frozen for all sequences; must outlive the cache. Null: every sequence gathers its own, see
  // observe.
  static result<kv_cache> make(const cache_config& config, const query_factors* factors = nullptr) {
    if (status s = validate(config); !s.ok()) return s;
    if (status s = detail::check_factors(config, factors); !s.ok()) return s;
    return or_out_of_memory(
        [&]() -> result<kv_cache> { return kv_cache(std::make_unique<state>(config, factors)); });
  }

  // ---- Tokens

  // Appends `tokens` tokens to one layer: keys after RoPE, values. [tokens][kv_heads][head_dim].
  // Not-finite numbers are replaced (sanitize in tokens.hpp); how many is added to `replaced`.
  template <class K, class V>
  status append(sequence_id id, int layer, heads_view<K> keys, heads_view<V> values, int tokens,
                replaced_values* replaced = nullptr, target on = default_target()) {
    if (status bad = check(id, layer); !bad.ok()) return bad;
    if (tokens < 0) return bad_value("tokens", tokens, "it must not be negative");
    if (tokens > 0) {
      if (keys.data == nullptr) return null_data("keys");
      if (values.data == nullptr) return null_data("values");
    }
    const sequence_extent extent = s().table.extent(id, layer);
    if (const std::int64_t most = (std::min)(std::int64_t{max_exact_rows} - extent.tail_count,
                                             max_position - extent.length);
        tokens > most)
      return bad_value("tokens", tokens,
                       message_of({"allowed are 0 to ", most, ": a tail has at most ",
                                   max_exact_rows, ", a sequence ", max_position}));
    replaced_values none;
    return or_out_of_memory([&]() -> status {
      if (!s().storage.append(id, layer, extent, keys, values, tokens,
                              replaced != nullptr ? *replaced : none, on))
        return failure(error_code::short_buffer,
                       {tokens, " tokens more in layer ", layer, " need ",
                        static_cast<std::size_t>(tokens) * s().storage.row_bytes(),
                        " bytes, and a copy of its rows while these move; ",
                        s().storage.exact_room().c_str()});
      s().table.append(id, layer, tokens);
      return {};
    });
  }

  // ---- Sealing

  // Seals at most `max_tiles` of the sealable tiles, oldest first, and returns how many. Without
  // enough free pages for them: short_buffer, and none is sealed. Every KV head of every layer is
  // an item of work; `executor` (attend.hpp) gets `parts` functions that share them.
  template <class Executor = serial_executor>
  result<int> seal(sequence_id id, int max_tiles, cache_workspace& workspace,
                   const Executor& executor = {}, int parts = 1, target on = default_target()) {
    if (status bad = check(id); !bad.ok()) return bad;
    if (max_tiles < 0) return bad_value("tiles to seal", max_tiles, "it must not be negative");
    if (parts < 1) return bad_value("parts", parts, "it must be positive");
    const auto tiles =
        static_cast<int>((std::min)(s().table.sealable(id), std::int64_t{max_tiles}));
    if (tiles == 0) return 0;
    return or_out_of_memory([&]() -> result<int> {
      if (s().seal(id, tiles, workspace, executor, parts, on)) return tiles;
      return failure(error_code::short_buffer, {tiles, " pages are needed; ", free_pages(), " of ",
                                                s().table.page_count(), " are free"});
    });
  }

  // ---- Attention

  // Attends from the queries of one sequence to its tokens in one layer.
  template <class Q, class O>
  status attend(sequence_id id, int layer, const cache_queries<Q, O>& q,
                const attention_options& options, cache_workspace& workspace,
                target on = default_target()) const {
    if (status bad = check_queries(id, layer, q, options); !bad.ok()) return bad;
    return or_out_of_memory([&]() -> status {
      s().attend(id, layer, q, options, workspace, on);
      return {};
    });
  }

  // The same for many sequences as one set of work items for an executor: queries[i] belong to
  // ids[i]. The results are those of attend, bit for bit.
  template <class Q, class O, class Executor>
  status attend(std::span<const sequence_id> ids, int layer,
                std::span<const cache_queries<Q, O>> queries, const attention_options& options,
                cache_workspace& workspace, const Executor& executor,
                target on = default_target()) const {
    if (ids.size() != queries.size())
      return bad_value("number of queries", static_cast<std::int64_t>(queries.size()),
                       message_of({"there are ", ids.size(), " sequences"}));
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (status bad = check_queries(ids[i], layer, queries[i], options); !bad.ok())
        return failure(bad.code(), {"sequence ", i, ": ", bad.message()});
    return or_out_of_memory([&]() -> status {
      s().attend(ids, layer, queries, options, workspace, executor, on);
      return {};
    });
  }

  // ---- Query statistics

  // Adds the queries of `tokens` tokens, [tokens][query_heads][key head_dim], to the statistics by
  // which encoder::query_aware rounds keys that are sealed later. Does nothing for other encoders,
  // frozen factors and exact layers. Truncation does not take queries back.
  template <class Q>
  status observe(sequence_id id, int layer, heads_view<Q> queries, int tokens,
                 target on = default_target()) {
    if (status bad = check(id, layer); !bad.ok()) return bad;
    if (tokens < 0) return bad_value("tokens", tokens, "it must not be negative");
    if (!s().gathers() || tokens == 0 || s().table.is_exact_layer(layer)) return {};
    if (queries.data == nullptr) return null_data("queries");
    return or_out_of_memory([&]() -> status {
      const row_shape& shape = s().storage.shape();
      s().moments[id.slot]
          .own(layers(), shape.kv_heads, shape.key_head_dim, s().memory.statistics)
          .add(layer, queries, tokens, s().query_heads, s().rotate_queries, on);
      return {};
    });
  }

 private:
  using state = cache_state<T>;
  using base::bad_value;
  using base::check;
  using base::layers;
  using base::s;

  explicit kv_cache(std::unique_ptr<state> made) : base(std::move(made)) {}

  static status null_data(const char* name) {
    return failure(error_code::invalid_argument, {"the data of ", name, " is null"});
  }

  template <class Q, class O>
  status check_queries(sequence_id id, int layer, const cache_queries<Q, O>& q,
                       const attention_options& options) const {
    if (status bad = check(id, layer); !bad.ok()) return bad;
    if (q.tokens < 0) return bad_value("query tokens", q.tokens, "it must not be negative");
    if (const int most = std::numeric_limits<int>::max() / s().query_heads; q.tokens > most)
      return bad_value("query tokens", q.tokens, message_of({"allowed are 0 to ", most}));
    if (q.position < -1 || q.position > max_position)
      return bad_value("query position", q.position,
                       message_of({"allowed are 0 to ", max_position}));
    if (options.window < 0 || options.window > max_position)
      return bad_value("window", options.window, message_of({"allowed are 0 to ", max_position}));
    const std::int64_t appended = s().table.appended(id, layer);
    if (q.position == -1 && q.tokens > appended)
      return bad_value("query tokens", q.tokens,
                       message_of({"layer ", layer, " has ", appended,
                                   " tokens; append to this layer first, or give a position"}));
    if (q.tokens > 0) {
      if (q.queries.data == nullptr) return null_data("queries");
      if (q.out.data == nullptr) return null_data("out");
    }
    // All that it multiplies stays finite.
    if (!(options.softmax_scale > 0.0f && options.softmax_scale <= 1e6f))
      return {error_code::invalid_argument,
              "softmax_scale must be given: a positive number up to 1e6"};
    return {};
  }
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
