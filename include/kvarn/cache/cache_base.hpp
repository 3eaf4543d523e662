// What caches of all kinds do with sequences: names, lengths, taking back, forking, accounting.
// Only what touches tokens differs: kv_cache.hpp, and cuda/device_cache.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "../config.hpp"
#include "../error.hpp"
#include "cache_config.hpp"
#include "cache_state.hpp"
#include "memory_account.hpp"
#include "page_table.hpp"
#include "query_moments.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

// Whether factors fit a cache; null always does.
inline status check_factors(const cache_config& config, const query_factors* factors) {
  if (factors == nullptr) return {};
  if (config.method != encoder::query_aware)
    return status{error_code::invalid_argument,
                  "query factors are given; they need encoder query_aware"};
  if (factors->layers() != config.layers || factors->kv_heads() != config.kv_heads ||
      factors->head_dim() != config.format.key_head_dim)
    return failure(error_code::invalid_argument,
                   {"query factors have ", factors->layers(), " layers, ", factors->kv_heads(),
                    " KV heads and head_dim ", factors->head_dim(), "; the cache has ",
                    config.layers, ", ", config.kv_heads, " and ", config.format.key_head_dim});
  return {};
}

}  // namespace detail

// `State`: a cache_state.
template <class State>
class cache_base {
 public:
  using state_type = State;

  // ---- Sequences

  result<sequence_id> create() { return s().table.create(); }

  // A new sequence with the first `position` tokens of another; -1: those that are committed. Both
  // share pages and rows until one of them changes.
  result<sequence_id> fork(sequence_id id, std::int64_t position = -1) {
    if (status bad = check(id); !bad.ok()) return bad;
    if (position == -1) position = s().table.committed(id);
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

  // Commits the first `tokens` of the tokens that are appended and not committed; without a number
  // all of them. Every layer must have them.
  status commit(sequence_id id) {
    if (status bad = check(id); !bad.ok()) return bad;
    for (int layer = 1; layer < layers(); ++layer)
      if (s().table.appended(id, layer) != s().table.appended(id, 0))
        return failure(
            error_code::invalid_argument,
            {"layer ", layer, " has ", s().table.appended(id, layer), " tokens, layer 0 has ",
             s().table.appended(id, 0), "; a step must append to every layer"});
    return commit(id, s().table.appended(id) - s().table.committed(id));
  }
  status commit(sequence_id id, std::int64_t tokens) {
    if (status bad = check(id); !bad.ok()) return bad;
    const std::int64_t most = s().table.appended(id) - s().table.committed(id);
    if (tokens < 0 || tokens > most)
      return bad_value("tokens to commit", tokens,
                       message_of({"every layer has ", most, " that are not committed"}));
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
                       message_of({"the sequence has ", most, " sealed pages"}));
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
  const typename State::storage_type& storage() const noexcept { return s().storage; }

 protected:
  template <class>
  friend class cache_reader;

  explicit cache_base(std::unique_ptr<State> made) : state_(std::move(made)) {}

  State& s() noexcept { return *state_; }
  const State& s() const noexcept { return *state_; }
  int layers() const noexcept { return s().table.layers(); }

  static status bad_value(const char* what, std::int64_t value, const std::string& allowed) {
    return failure(error_code::invalid_argument, {what, " is ", value, "; ", allowed});
  }

  status check(sequence_id id) const {
    if (is_live(id)) return {};
    return failure(error_code::invalid_argument,
                   {"there is no sequence in slot ", id.slot, " of generation ", id.generation,
                    "; it was freed, or never created here"});
  }
  status check(sequence_id id, int layer) const {
    if (layer < 0 || layer >= layers())
      return bad_value("layer", layer, message_of({"allowed are 0 to ", layers() - 1}));
    return check(id);
  }
  status check_position(sequence_id id, std::int64_t position) const {
    const std::int64_t most = s().table.appended(id);
    if (position >= 0 && position <= most) return {};
    return bad_value("position", position, message_of({"allowed are 0 to ", most}));
  }

 private:
  std::unique_ptr<State> state_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
