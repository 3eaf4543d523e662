// Drives a cache and its model by the same operations, which a string of bytes chooses, and
// compares them after each: bookkeeping, every stored byte, and attention outputs bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <sstream>
#include <utility>

#include "kvarn/cache/cache_file.hpp"
#include "model.hpp"
#include "support/choices.hpp"

namespace kvarn_test {

// What the operations did, so that a test can say that all of them happened.
struct driver_counts {
  int sealed = 0, out_of_pages = 0, cut_tiles = 0, cut_sinks = 0, forks = 0, restored = 0,
      refused_restores = 0, shifts = 0, interrupted = 0, rejected = 0, recycled_slots = 0;
};

inline model_config choose_config(choices& c) {
  model_config m;
  kvarn::cache_config& config = m.cache;
  config.layers = 1 + c.below(3);
  config.kv_heads = 1 + c.below(2);
  config.query_heads = config.kv_heads * (1 + c.below(2));
  config.format.key_head_dim = 64;
  config.format.value_head_dim = c.below(8) == 0 ? 80 : 64;
  config.format.group = 64;
  config.sink = c.of({5, 0, 64, 70});
  config.tail = c.of({0, 3, 64});
  config.keys_rotated = c.below(8) == 7;
  config.values_rotated = c.below(8) == 7;
  config.method = c.below(8) == 7 ? kvarn::encoder::query_aware : kvarn::encoder::tuned;
  config.max_sequences = 6;
  config.page_count = 2 + c.below(6);
  const kvarn::layer_bits kinds[] = {{2, 2}, {2, 2}, kvarn::exact_layer, {4, 2}, {3, 4}};
  for (int layer = 0; layer < config.layers; ++layer) m.bits.push_back(c.of(kinds));
  return m;
}

template <class T>
class model_driver {
 public:
  model_driver(std::span<const std::uint8_t> bytes, driver_counts& counts)
      : choose_(bytes), counts_(counts), config_(choose_config(choose_)), cache_(make()) {}

  void run() {
    while (!choose_.done() && !::testing::Test::HasFatalFailure()) {
      step();
      check_all();
      ++steps_;
    }
  }

 private:
  using model = model_sequence<T>;
  struct pair {
    kvarn::sequence_id id;
    model expected;
  };

  kvarn::kv_cache<T> make() {
    config_.cache.bits = config_.bits;
    return kvarn::kv_cache<T>::make(config_.cache).value();
  }
  const kvarn::cache_config& config() const { return config_.cache; }

  void step() {
    const int operation = choose_.below(16);
    if (live_.empty() || operation == 0) return create();
    pair& p = live_[static_cast<std::size_t>(choose_.below(static_cast<int>(live_.size())))];
    switch (operation) {
      case 1:
        return fork(p);
      case 2:
        return free(p);
      case 3:
        return clear(p);
      case 4:
      case 5:
        return seal(p, 1 + choose_.below(6));
      case 6:
        return truncate(p);
      case 7:
        return shift(p);
      case 8:
        return save_and_restore();
      case 9:
        return interrupt(p);
      case 10:
        return commit(
            p, choose_.below(static_cast<int>(p.expected.complete() - p.expected.committed) + 1));
      case 11:
        return reject(p);
      case 12:
        return observe(p);
      default:
        return append(p);
    }
  }

  void create() {
    const auto made = cache_.create();
    if (live_.size() == static_cast<std::size_t>(config().max_sequences)) {
      ASSERT_EQ(made.why().code(), kvarn::error_code::short_buffer);
      return;
    }
    ASSERT_TRUE(made.ok());
    if (made.value().generation > 0) ++counts_.recycled_slots;
    live_.push_back({made.value(), model(config())});
  }

  int chunk() {
    const int group = config().format.group;
    return choose_.below(2) == 0
               ? choose_.of({group - 1, group, group + 1, 2 * group, 3 * group + 2})
               : 1 + choose_.below(24);
  }

  void append_layers(pair& p, int first_layer, int end_layer, int count) {
    model& m = p.expected;
    for (int layer = first_layer; layer < end_layer; ++layer) {
      auto& length = m.appended[static_cast<std::size_t>(layer)];
      std::vector<std::uint64_t> tokens;
      for (std::int64_t at = length; at < length + count; ++at) {
        if (static_cast<std::size_t>(at) == m.tokens.size())
          m.tokens.push_back(std::make_shared<model_token<T>>(++last_token_, config()));
        tokens.push_back(m.tokens[static_cast<std::size_t>(at)]->seed);
      }
      const auto keys =
          token_tensor(tokens, layer, config().kv_heads, 0, config().format.key_head_dim);
      const auto values =
          token_tensor(tokens, layer, config().kv_heads, 1, config().format.value_head_dim);
      ASSERT_TRUE(cache_
                      .append(p.id, layer,
                              kvarn::token_major(keys.data(), config().kv_heads,
                                                 config().format.key_head_dim),
                              kvarn::token_major(values.data(), config().kv_heads,
                                                 config().format.value_head_dim),
                              count)
                      .ok());
      length += count;
    }
  }

  // A whole step: every layer, then commit all or some.
  void append(pair& p) {
    level(p);
    append_layers(p, 0, config().layers, chunk());
    const auto open = p.expected.complete() - p.expected.committed;
    if (choose_.below(4) != 0) {
      ASSERT_TRUE(cache_.commit(p.id).ok());
      p.expected.committed += open;
    } else {
      commit(p, choose_.below(static_cast<int>(open) + 1));
    }
  }

  // A step that stops between layers.
  void interrupt(pair& p) {
    if (config().layers == 1) return;
    level(p);
    append_layers(p, 0, 1 + choose_.below(config().layers - 1), 1 + choose_.below(70));
    ASSERT_EQ(cache_.commit(p.id).code(), kvarn::error_code::invalid_argument);
    ++counts_.interrupted;
  }

  // Takes back an unfinished step.
  void level(pair& p) {
    const auto& lengths = p.expected.appended;
    if (*std::max_element(lengths.begin(), lengths.end()) == p.expected.complete()) return;
    truncate_to(p, p.expected.complete());
  }

  void commit(pair& p, std::int64_t count) {
    ASSERT_TRUE(cache_.commit(p.id, count).ok());
    p.expected.committed += count;
    const auto most = p.expected.complete() - p.expected.committed;
    ASSERT_FALSE(cache_.commit(p.id, most + 1).ok());
  }

  void reject(pair& p) {
    if (p.expected.complete() > p.expected.committed) ++counts_.rejected;
    truncate_to(p, p.expected.committed);
  }

  std::int64_t position(const model& m) {
    const auto end = m.complete();
    std::int64_t at = choose_.below(static_cast<int>((std::min)(end, std::int64_t{30000})) + 1);
    const int how = choose_.below(4);
    if (how == 1 && m.sealed_end() > m.first)
      at = m.first + choose_.below(static_cast<int>(m.sealed_end() - m.first));
    if (how == 2)
      at = choose_.of({std::int64_t{0}, std::int64_t{config().sink}, m.first, m.first + 63,
                       m.first + 64, m.first + 65, m.sealed_end(), m.committed, end});
    return (std::min)(at, end);
  }

  void truncate(pair& p) {
    const auto at = position(p.expected);
    const auto& tiles = p.expected.tiles;
    for (const auto& tile : tiles)
      if (at > tile.start && at < tile.start + tile.count) ++counts_.cut_tiles;
    if (at < config().sink && p.expected.complete() > at) ++counts_.cut_sinks;
    truncate_to(p, at);
  }
  void truncate_to(pair& p, std::int64_t at) {
    ASSERT_TRUE(cache_.truncate(p.id, at).ok());
    p.expected.truncate(at);
  }

  void fork(pair& p) {
    const auto at = choose_.below(3) == 0 ? std::int64_t{-1} : position(p.expected);
    const auto made = cache_.fork(p.id, at);
    if (live_.size() == static_cast<std::size_t>(config().max_sequences)) {
      ASSERT_EQ(made.why().code(), kvarn::error_code::short_buffer);
      return;
    }
    ASSERT_TRUE(made.ok());
    model child = p.expected;
    child.truncate(at < 0 ? child.committed : at);
    if (child.moments) child.moments = std::make_shared<kvarn::query_moments>(*child.moments);
    live_.push_back({made.value(), std::move(child)});
    ++counts_.forks;
  }

  void free(pair& p) {
    ASSERT_TRUE(cache_.free(p.id).ok());
    ASSERT_FALSE(cache_.is_live(p.id));
    ASSERT_FALSE(cache_.free(p.id).ok());
    live_.erase(live_.begin() + (&p - live_.data()));
  }

  void clear(pair& p) {
    ASSERT_TRUE(cache_.clear(p.id).ok());
    p.expected = model(config());
  }

  std::int64_t free_pages() const {
    std::set<const void*> pages;
    for (const pair& p : live_)
      for (const auto& tile : p.expected.tiles) pages.insert(tile.records.get());
    return config().page_count - static_cast<std::int64_t>(pages.size());
  }

  void seal(pair& p, int most) {
    const int tiles = (std::min)(most, p.expected.sealable());
    ASSERT_EQ(cache_.sealable(p.id), p.expected.sealable());
    const bool enough = tiles <= free_pages();
    const int parts = 1 + choose_.below(3);
    const auto sealed = cache_.seal(p.id, most, workspace_, kvarn::serial_executor{}, parts);
    ASSERT_EQ(sealed.ok(), enough);
    if (!enough) {
      ASSERT_EQ(sealed.why().code(), kvarn::error_code::short_buffer);
      ++counts_.out_of_pages;
      return;
    }
    ASSERT_EQ(sealed.value(), tiles);
    for (int i = 0; i < tiles; ++i) p.expected.seal_one(nullptr);
    counts_.sealed += tiles;
  }

  void shift(pair& p) {
    const int count = choose_.below(static_cast<int>(p.expected.tiles.size()) + 1);
    ASSERT_FALSE(
        cache_.drop_oldest(p.id, static_cast<std::int64_t>(p.expected.tiles.size()) + 1).ok());
    ASSERT_TRUE(cache_.drop_oldest(p.id, count).ok());
    p.expected.drop_oldest(count);
    counts_.shifts += count > 0;
  }

  void observe(pair& p) {
    if (config().method != kvarn::encoder::query_aware) return;
    const int layer = choose_.below(config().layers);
    const auto queries = token_tensor({++last_token_, ++last_token_}, layer, config().query_heads,
                                      2, config().format.key_head_dim);
    const auto view =
        kvarn::token_major(queries.data(), config().query_heads, config().format.key_head_dim);
    ASSERT_TRUE(cache_.observe(p.id, layer, view, 2).ok());
    if (kvarn::is_exact(config(), layer)) return;
    model& m = p.expected;
    if (!m.moments)
      m.moments = std::make_shared<kvarn::query_moments>(config().layers, config().kv_heads,
                                                         config().format.key_head_dim);
    m.moments->add(layer, view, 2, config().query_heads, !config().keys_rotated);
  }

  // One sequence, or all.
  void save_and_restore() {
    std::vector<std::size_t> chosen;
    const int one = choose_.below(static_cast<int>(live_.size()) + 1);
    for (std::size_t i = 0; i < live_.size(); ++i)
      if (one == static_cast<int>(live_.size()) || one == static_cast<int>(i)) chosen.push_back(i);
    std::vector<kvarn::sequence_id> ids;
    std::vector<model> saved;
    std::set<const void*> pages;
    for (const std::size_t i : chosen) {
      ids.push_back(live_[i].id);
      saved.push_back(live_[i].expected);
      for (const auto& tile : saved.back().tiles) pages.insert(tile.records.get());
    }
    std::stringstream file;
    ASSERT_TRUE(kvarn::save_sequences(cache_, ids, file).ok());
    const bool replace = choose_.below(2) == 0;
    if (replace)
      for (auto i = chosen.rbegin(); i != chosen.rend(); ++i) free(live_[*i]);

    const bool fits = static_cast<std::int64_t>(pages.size()) <= free_pages() &&
                      live_.size() + ids.size() <= static_cast<std::size_t>(config().max_sequences);
    const auto restored = kvarn::restore_sequences(cache_, file);
    ASSERT_EQ(restored.ok(), fits) << restored.why().message();
    if (!fits) {
      ASSERT_EQ(restored.why().code(), kvarn::error_code::short_buffer);
      ++counts_.refused_restores;
      return;
    }
    std::map<const void*, std::shared_ptr<const typename model::sealed_records>> copies;
    for (std::size_t i = 0; i < saved.size(); ++i) {
      model& m = saved[i];
      m.truncate(m.committed);
      if (m.moments) m.moments = std::make_shared<kvarn::query_moments>(*m.moments);
      for (auto& tile : m.tiles) {
        auto& copy = copies[tile.records.get()];
        if (!copy) copy = std::make_shared<typename model::sealed_records>(*tile.records);
        tile.records = copy;
      }
      live_.push_back({restored.value()[i], std::move(m)});
      ++counts_.restored;
    }
  }

  // ---- Comparison

  void check_all() {
    if (::testing::Test::HasFatalFailure()) return;
    ASSERT_EQ(cache_.free_pages(), free_pages());
    for (pair& p : live_) {
      check_table(p);
      check_bytes(p);
      if (::testing::Test::HasFatalFailure()) return;
    }
    if (!live_.empty() && steps_ % 2 == 0)
      check_attention(live_[static_cast<std::size_t>(steps_ / 2) % live_.size()]);
  }

  void check_table(const pair& p) {
    const model& m = p.expected;
    ASSERT_EQ(cache_.length(p.id), m.committed);
    for (int layer = 0; layer < config().layers; ++layer)
      ASSERT_EQ(cache_.length(p.id, layer), m.appended[static_cast<std::size_t>(layer)]);
    const auto pages = cache_.table().pages(p.id);
    ASSERT_EQ(pages.size(), m.tiles.size());
    for (std::size_t i = 0; i < pages.size(); ++i) {
      ASSERT_EQ(pages[i].position, m.tiles[i].start);
      ASSERT_EQ(pages[i].count, m.tiles[i].count);
      int references = 0;
      for (const pair& other : live_)
        for (const auto& tile : other.expected.tiles)
          references += tile.records == m.tiles[i].records;
      ASSERT_EQ(cache_.table().references(pages[i].page), references);
    }
  }

  // That `rows` holds the tokens from `begin` on.
  void expect_rows(const pair& p, const kvarn::tokens_view<T>& rows, std::int64_t begin, int count,
                   int layer, int head, int kind) {
    for (int i = 0; i < count; ++i) {
      const auto expected = p.expected.row(begin + i, layer, head, kind);
      ASSERT_EQ(
          std::memcmp(rows.data + i * rows.token_stride, expected.data(), expected.size_bytes()),
          0);
    }
  }

  void check_bytes(const pair& p) {
    const model& m = p.expected;
    const auto pages = cache_.table().pages(p.id);
    const auto& shape = cache_.storage().shape();
    for (int layer = 0; layer < config().layers; ++layer) {
      const auto& rows = cache_.storage().rows(p.id, layer);
      const auto length = m.appended[static_cast<std::size_t>(layer)];
      const auto sink = static_cast<int>(m.sink_count(layer));
      const auto tail = static_cast<int>((std::max)(length - m.tail_begin(layer), std::int64_t{0}));
      ASSERT_EQ(rows.sink.count(), sink);
      ASSERT_EQ(rows.tail.count(), tail);
      const auto& format = cache_.storage().format(layer);
      for (int head = 0; head < config().kv_heads; ++head) {
        expect_rows(p, rows.sink.keys(shape, head, 0), 0, sink, layer, head, 0);
        expect_rows(p, rows.sink.values(shape, head, 0), 0, sink, layer, head, 1);
        expect_rows(p, rows.tail.keys(shape, head, 0), m.tail_begin(layer), tail, layer, head, 0);
        expect_rows(p, rows.tail.values(shape, head, 0), m.tail_begin(layer), tail, layer, head, 1);
        if (kvarn::is_exact(config(), layer)) continue;
        const auto index = static_cast<std::size_t>(layer * config().kv_heads + head);
        for (std::size_t i = 0; i < m.tiles.size(); ++i) {
          const std::byte* const page = cache_.storage().page(layer, pages[i].page);
          const auto& key = m.tiles[i].records->keys[index];
          const auto& value = m.tiles[i].records->values[index];
          ASSERT_EQ(std::memcmp(page + format.key_offset(head), key.data(), key.size()), 0);
          ASSERT_EQ(std::memcmp(page + format.value_offset(head), value.data(), value.size()), 0);
        }
      }
    }
  }

  void check_attention(const pair& p) {
    const int layer = steps_ / 2 % config().layers;
    const auto length = p.expected.appended[static_cast<std::size_t>(layer)];
    const int tokens = static_cast<int>((std::min)(length, std::int64_t{1 + steps_ % 6 / 4}));
    if (tokens == 0) return;
    const int heads = config().query_heads;
    const int key_dim = config().format.key_head_dim;
    const int value_dim = config().format.value_head_dim;
    const std::vector<std::uint64_t> seeds(static_cast<std::size_t>(tokens),
                                           static_cast<std::uint64_t>(steps_));
    const auto queries = token_tensor(seeds, layer, heads, 3, key_dim);
    const std::vector<float> sink_logits{0.25f, -1.0f, 0.5f, 2.0f};
    kvarn::attention_options options{.softmax_scale = 0.125f};
    if (steps_ % 5 == 1) options.window = 40;
    if (steps_ % 7 == 2) options.sink_logits = sink_logits.data();
    if (steps_ % 11 == 3) options.logit_soft_cap = 3.0f;

    const auto size = static_cast<std::size_t>(tokens * heads * value_dim);
    std::vector<float> out(size), expected(size), lse(static_cast<std::size_t>(tokens * heads)),
        expected_lse(lse);
    const kvarn::cache_queries<float, float> call{
        kvarn::token_major(queries.data(), heads, key_dim),
        kvarn::token_major(out.data(), heads, value_dim), tokens, lse.data()};
    ASSERT_TRUE(cache_.attend(p.id, layer, call, options, workspace_).ok());

    typename model::head_memory memory;
    const int shared = heads / config().kv_heads;
    for (int head = 0; head < heads; ++head) {
      if (head % shared == 0) p.expected.fill(layer, head / shared, memory);
      auto own = options;
      if (own.sink_logits != nullptr) own.sink_logits += head;
      for (int t = 0; t < tokens; ++t) {
        const auto at = static_cast<std::ptrdiff_t>(t * heads + head);
        kvarn::attend(
            kvarn::attention_queries<float>{
                {queries.data() + at * key_dim, key_dim}, 1, 1, length - tokens + t},
            memory.memory, own,
            kvarn::tokens_view<float>{expected.data() + at * value_dim, value_dim},
            expected_lse.data() + at,
            workspace_.floats(kvarn::attention_workspace(memory.memory.format)));
      }
    }
    ASSERT_EQ(std::memcmp(out.data(), expected.data(), size * sizeof(float)), 0);
    ASSERT_EQ(std::memcmp(lse.data(), expected_lse.data(), lse.size() * sizeof(float)), 0);
    ASSERT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
  }

  choices choose_;
  driver_counts& counts_;
  model_config config_;
  kvarn::kv_cache<T> cache_;
  kvarn::cache_workspace workspace_;
  std::vector<pair> live_;
  std::uint64_t last_token_ = 0;
  int steps_ = 0;
};

}  // namespace kvarn_test
