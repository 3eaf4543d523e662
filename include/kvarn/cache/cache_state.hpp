// The parts of a cache and what keeps them in step: bookkeeping, bytes, query statistics. Checks
// nothing; kv_cache.hpp does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include "../attention/attend.hpp"
#include "../codec/query_moment.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "../simd/target.hpp"
#include "cache_config.hpp"
#include "fixed_array.hpp"
#include "heads_view.hpp"
#include "host_storage.hpp"
#include "memory_account.hpp"
#include "page_table.hpp"
#include "query_moments.hpp"

namespace kvarn {

// Queries of one sequence in one layer, and where their results go. Query heads that share a KV
// head are next to one another.
template <class Q, class O>
struct cache_queries {
  heads_view<const Q> queries;  // [tokens][query_heads][key head_dim]
  heads_view<O> out;            // [tokens][query_heads][value head_dim]
  int tokens = 1;
  float* lse = nullptr;        // [tokens][query_heads]: log of the sum of exponentials; or null
  std::int64_t position = -1;  // of the first query token, 0 to max_position; -1: they are the
                               // tokens appended last
};

inline namespace KVARN_ISA_NAMESPACE {

// Memory that calls work in; grows to what they need and stays. One per thread.
class cache_workspace {
 public:
  float* floats(std::size_t count) { return grown(floats_, count); }
  sealed_group* groups(std::size_t count) { return grown(groups_, count); }

 private:
  // Not of std::vector: its functions are shared with files for other instruction sets.
  template <class V>
  using array = std::optional<fixed_array<V>>;

  template <class V>
  static V* grown(array<V>& memory, std::size_t count) {
    if (!memory || memory->size() < count) memory.emplace(count, std::pmr::new_delete_resource());
    return memory->begin();
  }

  array<float> floats_;
  array<sealed_group> groups_;
};

// `Storage`: host_storage, or another with its memory_type and the functions that files and the
// bookkeeping call.
template <class T, class Storage = host_storage<T>>
struct cache_state {
  using element = T;
  using storage_type = Storage;

  typename Storage::memory_type memory;
  page_table table;
  Storage storage;
  fixed_array<sequence_moments> moments;  // by slot
  const query_factors* factors;
  encoder method;
  int query_heads;
  bool rotate_queries;

  // Precondition: validate(config) is ok.
  cache_state(const cache_config& config, const query_factors* frozen)
      : memory(config.memory != nullptr ? config.memory : std::pmr::get_default_resource(),
               config.exact_memory),
        table(config, &memory.tables),
        storage(config, memory),
        moments(static_cast<std::size_t>(config.max_sequences), &memory.tables),
        factors(frozen),
        method(config.method),
        query_heads(config.query_heads),
        rotate_queries(!config.keys_rotated) {}

  bool gathers() const { return method == encoder::query_aware && factors == nullptr; }

  result<sequence_id> fork(sequence_id id, std::int64_t position) {
    auto made = table.fork(id, position);
    if (!made.ok()) return made;
    for (int layer = 0; layer < table.layers(); ++layer)
      storage.rows(made.value(), layer) = storage.rows(id, layer);
    cut_rows(made.value());
    moments[made.value().slot] = moments[id.slot];
    return made;
  }

  void truncate(sequence_id id, std::int64_t position) {
    table.truncate(id, position);
    cut_rows(id);
  }

  void drop_oldest(sequence_id id, std::size_t pages) {
    const auto tokens = static_cast<int>(table.drop_oldest(id, pages));
    for (int layer = 0; layer < table.layers(); ++layer)
      if (table.is_exact_layer(layer)) storage.rows(id, layer).tail.drop_front(tokens);
  }

  // The next groups of the tail now stand in claimed pages. Precondition: table.reserve.
  void publish(sequence_id id, std::span<const std::int32_t> pages) {
    for (const std::int32_t page : pages) table.publish(id, page);
    const int group = table.group();
    for (int layer = 0; layer < table.layers(); ++layer) {
      if (table.is_exact_layer(layer)) continue;
      auto& tail = storage.rows(id, layer).tail;
      tail.drop_front(static_cast<int>(pages.size()) * group);
      storage.shrink(tail, 2 * group);
    }
  }

  // Seals the next `tiles` tiles, at most sealable(id); false, with nothing changed, without
  // enough free pages. std::bad_alloc changes nothing either.
  template <class Executor>
  bool seal(sequence_id id, int tiles, cache_workspace& workspace, const Executor& executor,
            int parts, target on) {
    table.reserve(id, static_cast<std::size_t>(tiles));
    const std::size_t floats = storage.encode_workspace();
    float* const floats_of_all = workspace.floats(floats * static_cast<std::size_t>(parts));
    claimed_pages pages(table, static_cast<std::size_t>(tiles));
    if (!pages.claim()) return false;
    std::atomic<bool> failed{false};  // executors need not carry exceptions
    const int heads = storage.shape().kv_heads;
    executor(static_cast<std::size_t>(parts), [&](std::size_t part) {
      float* const own = floats_of_all + part * floats;
      const status done = or_out_of_memory([&]() -> status {
        for (int item = static_cast<int>(part); item < table.layers() * heads; item += parts)
          encode_tiles(id, item / heads, item % heads, pages.numbers(), own, on);
        return {};
      });
      if (!done.ok()) failed = true;
    });
#if KVARN_EXCEPTIONS
    if (failed) throw std::bad_alloc();
#endif
    publish(id, pages.hand_over());
    return true;
  }

  template <class Q, class O>
  void attend(sequence_id id, int layer, const cache_queries<Q, O>& q,
              const attention_options& options, cache_workspace& workspace, target on) const {
    float* const floats = workspace.floats(attention_workspace(storage.format(layer)));
    sealed_group* const groups = workspace.groups(table.pages(id).size());
    for_each_task(
        id, layer, q, options, [&](int) { return groups; },
        [&](const auto& task) { kvarn::attend(task, floats, on); });
  }

  template <class Q, class O, class Executor>
  void attend(std::span<const sequence_id> ids, int layer,
              std::span<const cache_queries<Q, O>> queries, const attention_options& options,
              cache_workspace& workspace, const Executor& executor, target on) const {
    const auto kv_heads = static_cast<std::size_t>(storage.shape().kv_heads);
    std::size_t group_count = 0;
    for (const sequence_id id : ids) group_count += table.pages(id).size() * kv_heads;
    std::vector<attention_task<Q, T, O>> tasks;
    tasks.reserve(ids.size() * kv_heads);
    sealed_group* groups = workspace.groups(group_count);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::size_t pages = table.pages(ids[i]).size();
      for_each_task(
          ids[i], layer, queries[i], options,
          [&](int head) { return groups + static_cast<std::size_t>(head) * pages; },
          [&](const auto& task) { tasks.push_back(task); });
      groups += pages * kv_heads;
    }
    const attention_batch<attention_task<Q, T, O>> batch(tasks);
    batch.run(workspace.floats(batch.workspace()), executor, on);
  }

 private:
  // Makes the rows as long as the table says.
  void cut_rows(sequence_id id) {
    for (int layer = 0; layer < table.layers(); ++layer) {
      const sequence_extent extent = table.extent(id, layer);
      auto& rows = storage.rows(id, layer);
      rows.sink.keep(extent.sink_count);
      rows.tail.keep(extent.tail_count);
    }
  }

  void encode_tiles(sequence_id id, int layer, int head, std::span<const std::int32_t> pages,
                    float* workspace, target on) const {
    if (table.is_exact_layer(layer)) return;
    const auto encode = [&](const query_factor* factor) {
      for (std::size_t i = 0; i < pages.size(); ++i)
        storage.encode(id, layer, head, static_cast<int>(i) * table.group(), pages[i], method,
                       factor, workspace, on);
    };
    if (method != encoder::query_aware) return encode(nullptr);
    if (factors != nullptr) return encode(&factors->at(layer, head));
    const query_moments* const gathered = moments[id.slot].get();
    const query_factor factor(gathered != nullptr ? gathered->at(layer, head)
                                                  : query_moment(storage.shape().key_head_dim),
                              query_factor::default_damping, on);
    encode(&factor);
  }

  // Calls visit(task) for every KV head of one sequence. `groups(kv_head)`: where the list of its
  // sealed groups goes.
  template <class Q, class O, class Groups, class Visit>
  void for_each_task(sequence_id id, int layer, const cache_queries<Q, O>& q,
                     const attention_options& options, const Groups& groups,
                     const Visit& visit) const {
    const sequence_extent extent = table.extent(id, layer);
    if (q.tokens == 0) return;
    const auto pages = table.pages(id).first(static_cast<std::size_t>(extent.page_count));
    const int kv_heads = storage.shape().kv_heads;
    const int shared = query_heads / kv_heads;
    const std::int64_t position = q.position >= 0 ? q.position : extent.length - q.tokens;
    for (int head = 0; head < kv_heads; ++head) {
      const int first = head * shared;
      attention_task<Q, T, O> task;
      task.queries = {q.queries.token(0, first), q.tokens, shared, position,
                      q.queries.token_stride - shared * q.queries.head_stride};
      task.memory = storage.memory(id, layer, head, extent, pages, groups(head));
      task.options = options;
      if (options.sink_logits != nullptr) task.options.sink_logits = options.sink_logits + first;
      task.out = q.out.token(0, first);
      task.out_token_gap = q.out.token_stride - shared * q.out.head_stride;
      if (q.lse != nullptr) task.lse = q.lse + first;
      task.lse_token_gap = query_heads - shared;
      visit(task);
    }
  }
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
