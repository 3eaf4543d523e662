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
#include "cache_config.hpp"
#include "cache_state.hpp"
#include "heads_view.hpp"
#include "host_storage.hpp"
#include "memory_account.hpp"
#include "page_table.hpp"
#include "query_moments.hpp"

namespace kvarn {

inline namespace KVARN_ISA_NAMESPACE {

// `T`: the type of exact rows: float16, bfloat16 or float.
template <class T = float16>
class kv_cache {
 public:
  // An empty cache, or what is wrong with the configuration. `factors`: for encoder::query_aware,
  // frozen for all sequences; must outlive the cache. Null: every sequence gathers its own, see
  // observe.
  static result<kv_cache> make(const cache_config& config, const query_factors* factors = nullptr) {
    if (status s = validate(config); !s.ok()) return s;
    if (factors != nullptr) {
      if (config.method != encoder::query_aware)
        return status{error_code::invalid_argument,
                      "query factors are given; they need encoder query_aware"};
      if (factors->layers() != config.layers || factors->kv_heads() != config.kv_heads ||
          factors->head_dim() != config.format.key_head_dim)
        return status{error_code::invalid_argument,
                      "query factors have " + std::to_string(factors->layers()) + " layers, " +
                          std::to_string(factors->kv_heads()) + " KV heads and head_dim " +
                          std::to_string(factors->head_dim()) + "; the cache has " +
                          std::to_string(config.layers) + ", " + std::to_string(config.kv_heads) +
                          " and " + std::to_string(config.format.key_head_dim)};
    }
    return or_out_of_memory(
        [&]() -> result<kv_cache> { return kv_cache(std::make_unique<state>(config, factors)); });
  }

  // ---- Sequences

  result<sequence_id> create() { return s().table.create(); }

  // A new sequence with the first `position` tokens of another; -1: those that are committed. Both
  // share pages and rows until one of them changes.
  result<sequence_id> fork(sequence_id id, std::int64_t position = -1) {
    if (status bad = check(id); !bad.ok()) return bad;
    if (position < 0) position = s().table.committed(id);
    if (status bad = check_position(id, position); !bad.ok()) return bad;
    return or_out_of_memory([&] { return s().fork(id, position); });
  }

  status free(sequence_id id) {
    if (status bad = clear(id); !bad.ok()) return bad;
    s().table.free(id);
    return {};
  }

  // Forgets all tokens and query statistics; the sequence stays.
  status clear(sequence_id id) {
    if (status bad = check(id); !bad.ok()) return bad;
    s().truncate(id, 0);
    s().moments[id.slot] = sequence_moments();
    return {};
  }

  bool is_live(sequence_id id) const { return s().table.is_live(id); }

  // ---- Tokens

  // Appends `tokens` tokens to one layer: keys after RoPE, values. [tokens][kv_heads][head_dim].
  // Not-finite numbers are replaced (sanitize in tokens.hpp) and counted in `replaced`.
  template <class K, class V>
  status append(sequence_id id, int layer, heads_view<K> keys, heads_view<V> values, int tokens,
                replaced_values* replaced = nullptr, target on = default_target()) {
    if (status bad = check(id, layer); !bad.ok()) return bad;
    if (tokens < 0) return bad_value("tokens", tokens, "it must not be negative");
    const sequence_extent extent = s().table.extent(id, layer);
    if (tokens > std::numeric_limits<int>::max() / 2 - extent.tail_count)
      return bad_value("tokens", tokens, "the exact tail would be too long");
    replaced_values none;
    return or_out_of_memory([&]() -> status {
      if (!s().storage.append(id, layer, extent, keys, values, tokens,
                              replaced != nullptr ? *replaced : none, on))
        return {error_code::short_buffer, "exact rows take " + std::to_string(memory().exact) +
                                              " bytes; " + std::to_string(tokens) +
                                              " tokens more in layer " + std::to_string(layer) +
                                              " would pass exact_memory"};
      s().table.append(id, layer, tokens);
      return {};
    });
  }

  // Commits the first `tokens` of the tokens that are appended and not committed; without a number
  // all of them. Every layer must have them.
  status commit(sequence_id id) {
    if (status bad = check(id); !bad.ok()) return bad;
    for (int layer = 1; layer < layers(); ++layer)
      if (s().table.appended(id, layer) != s().table.appended(id, 0))
        return {error_code::invalid_argument, "layer " + std::to_string(layer) + " has " +
                                                  std::to_string(s().table.appended(id, layer)) +
                                                  " tokens, layer 0 has " +
                                                  std::to_string(s().table.appended(id, 0)) +
                                                  "; a step must append to every layer"};
    return commit(id, s().table.appended(id) - s().table.committed(id));
  }
  status commit(sequence_id id, std::int64_t tokens) {
    if (status bad = check(id); !bad.ok()) return bad;
    const std::int64_t most = s().table.appended(id) - s().table.committed(id);
    if (tokens < 0 || tokens > most)
      return bad_value("tokens to commit", tokens,
                       "every layer has " + std::to_string(most) + " that are not committed");
    s().table.commit(id, tokens);
    return {};
  }

  // Forgets the tokens from `position` on, committed or not. A sealed tile that is cut stays, and
  // its first tokens count; new tokens go to the tail. truncate(id, length(id)) rejects a draft,
  // and undoes a step that stopped between layers.
  status truncate(sequence_id id, std::int64_t position) {
    if (status bad = check(id); !bad.ok()) return bad;
    if (status bad = check_position(id, position); !bad.ok()) return bad;
    s().truncate(id, position);
    return {};
  }

  // Context shift: forgets the `pages` oldest sealed pages. The tokens behind keep their positions
  // and the bytes of their keys.
  status drop_oldest(sequence_id id, std::int64_t pages) {
    if (status bad = check(id); !bad.ok()) return bad;
    const auto most = static_cast<std::int64_t>(s().table.pages(id).size());
    if (pages < 0 || pages > most)
      return bad_value("pages to drop", pages,
                       "the sequence has " + std::to_string(most) + " sealed pages");
    s().drop_oldest(id, static_cast<std::size_t>(pages));
    return {};
  }

  // Committed tokens: the position of the next token if nothing is drafted.
  std::int64_t length(sequence_id id) const {
    KVARN_ASSERT(is_live(id));
    return s().table.committed(id);
  }
  // The same with what is appended to one layer.
  std::int64_t length(sequence_id id, int layer) const {
    KVARN_ASSERT(is_live(id));
    return s().table.appended(id, layer);
  }

  // ---- Sealing

  // Tiles (groups of tokens, in all layers) that seal could seal now, or after `more` tokens are
  // committed. Each takes one page.
  std::int64_t sealable(sequence_id id, std::int64_t more = 0) const {
    KVARN_ASSERT(is_live(id));
    return s().table.sealable(id, more);
  }
  std::int64_t free_pages() const { return s().table.free_page_count(); }

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
      return status{error_code::short_buffer,
                    std::to_string(tiles) + " pages are needed; " + std::to_string(free_pages()) +
                        " of " + std::to_string(s().table.page_count()) + " are free"};
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
                       "there are " + std::to_string(ids.size()) + " sequences");
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (status bad = check_queries(ids[i], layer, queries[i], options); !bad.ok())
        return {bad.code(), "sequence " + std::to_string(i) + ": " + bad.message()};
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
    return or_out_of_memory([&]() -> status {
      const row_shape& shape = s().storage.shape();
      s().moments[id.slot]
          .own(layers(), shape.kv_heads, shape.key_head_dim, s().memory.statistics)
          .add(layer, queries, tokens, s().query_heads, s().rotate_queries, on);
      return {};
    });
  }

  // What a sequence has gathered; null: nothing yet. Valid until the sequence is used again.
  const query_moments* statistics(sequence_id id) const {
    KVARN_ASSERT(is_live(id));
    return s().moments[id.slot].get();
  }

  // ---- Accounting

  // Bytes held now: every byte that came from the memory resource, and the sums of query
  // statistics, which come from the global heap. The caller's pages are not counted.
  memory_use memory() const noexcept { return s().memory.use(); }

  // Bytes of one token in all layers: sealed in a full page, and exact.
  double sealed_token_bytes() const {
    std::size_t bytes = 0;
    for (int layer = 0; layer < layers(); ++layer)
      bytes += s().table.is_exact_layer(layer)
                   ? s().storage.row_bytes() * static_cast<std::size_t>(s().table.group())
                   : s().storage.page_bytes(layer);
    return static_cast<double>(bytes) / s().table.group();
  }
  std::size_t exact_token_bytes() const {
    return s().storage.row_bytes() * static_cast<std::size_t>(layers());
  }
  // Tokens that all pages, and all free pages, can hold sealed.
  std::int64_t capacity() const noexcept { return s().table.page_count() * s().table.group(); }
  std::int64_t free_capacity() const { return free_pages() * s().table.group(); }

  // ---- What lies below, to read: bookkeeping and bytes.

  const page_table& table() const noexcept { return s().table; }
  const host_storage<T>& storage() const noexcept { return s().storage; }

 private:
  template <class>
  friend class cache_reader;

  using state = cache_state<T>;

  explicit kv_cache(std::unique_ptr<state> made) : state_(std::move(made)) {}

  state& s() noexcept { return *state_; }
  const state& s() const noexcept { return *state_; }
  int layers() const noexcept { return s().table.layers(); }

  static status bad_value(const char* what, std::int64_t value, const std::string& allowed) {
    return {error_code::invalid_argument,
            std::string(what) + " is " + std::to_string(value) + "; " + allowed};
  }

  status check(sequence_id id) const {
    if (is_live(id)) return {};
    return {error_code::invalid_argument,
            "there is no sequence in slot " + std::to_string(id.slot) + " of generation " +
                std::to_string(id.generation) + "; it was freed, or never created here"};
  }
  status check(sequence_id id, int layer) const {
    if (layer < 0 || layer >= layers())
      return bad_value("layer", layer, "allowed are 0 to " + std::to_string(layers() - 1));
    return check(id);
  }
  status check_position(sequence_id id, std::int64_t position) const {
    const std::int64_t most = s().table.appended(id);
    if (position >= 0 && position <= most) return {};
    return bad_value("position", position, "allowed are 0 to " + std::to_string(most));
  }
  template <class Q, class O>
  status check_queries(sequence_id id, int layer, const cache_queries<Q, O>& q,
                       const attention_options& options) const {
    if (status bad = check(id, layer); !bad.ok()) return bad;
    if (q.tokens < 0) return bad_value("query tokens", q.tokens, "it must not be negative");
    if (q.position < -1 || q.position > max_position)
      return bad_value("query position", q.position,
                       "allowed are 0 to " + std::to_string(max_position));
    if (options.window < 0 || options.window > max_position)
      return bad_value("window", options.window,
                       "allowed are 0 to " + std::to_string(max_position));
    if (q.position == -1 && q.tokens > s().table.appended(id, layer))
      return bad_value("query tokens", q.tokens,
                       "the layer has " + std::to_string(s().table.appended(id, layer)) +
                           " tokens; give a position");
    if (!(options.softmax_scale > 0.0f))
      return {error_code::invalid_argument, "softmax_scale must be given: a positive number"};
    return {};
  }

  std::unique_ptr<state> state_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
