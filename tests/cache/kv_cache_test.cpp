// The cache at its edges: lengths, chunks, neighbours, recycled pages, refused calls.
#include "kvarn/cache/kv_cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support.hpp"

namespace {

using kvarn::error_code;
using kvarn_test::seeds;
using kvarn_test::small_config;
using kvarn_test::test_cache;

// Appends in chunks and seals after each.
void feed(test_cache<>& c, kvarn::sequence_id id, int tokens, int chunk) {
  for (int at = 0; at < tokens; at += chunk) {
    c.append(id, seeds(static_cast<std::uint64_t>(at), (std::min)(chunk, tokens - at)));
    c.seal(id);
  }
}

TEST(KvCache, BytesDoNotDependOnChunks) {
  for (const int sink : {0, 5, 128})
    for (const int tail : {0, 70})
      for (const int tokens : {0, 1, 4, 5, 6, 127, 128, 129, 255, 256, 257}) {
        auto config = small_config();
        config.sink = sink;
        config.tail = tail;
        test_cache<> c(config);
        const auto whole = c.create();
        c.append(whole, seeds(0, tokens));
        c.seal(whole);
        const int sealed = (std::max)(tokens - sink - tail, 0) / 64;
        EXPECT_EQ(c.cache.table().pages(whole).size(), static_cast<std::size_t>(sealed));
        const auto extent = c.cache.table().extent(whole, 1);
        EXPECT_EQ(extent.sink_count, (std::min)(tokens, sink));
        EXPECT_EQ(extent.tail_count, (std::max)(tokens - sink, 0) - 64 * sealed);
        for (const int chunk : {1, 63, 64, 65, 127, 128, 129}) {
          const auto other = c.create();
          feed(c, other, tokens, chunk);
          EXPECT_EQ(c.bytes(whole), c.bytes(other))
              << sink << " " << tail << " " << tokens << " " << chunk;
          if (tokens > 0) {
            EXPECT_EQ(c.attend(whole, 1), c.attend(other, 1));
          }
          ASSERT_TRUE(c.cache.free(other).ok());
        }
      }
}

TEST(KvCache, GroupsOf128AndOtherHeadDims) {
  for (const int head_dim : {80, 128}) {
    auto config = small_config();
    config.format = {.key_head_dim = head_dim, .value_head_dim = 96, .group = 128};
    config.page_count = 4;
    test_cache<> c(config);
    const auto whole = c.create();
    const auto single = c.create();
    c.append(whole, seeds(0, 270));
    EXPECT_EQ(c.seal(whole), 2);
    feed(c, single, 270, 1);
    EXPECT_EQ(c.bytes(whole), c.bytes(single));
    EXPECT_EQ(c.attend(whole), c.attend(single));
  }
}

TEST(KvCache, InterleavedSequencesEqualSeparateOnes) {
  test_cache<> together(small_config());
  std::vector<kvarn::sequence_id> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(together.create());
  for (int step = 0; step < 20; ++step)
    for (int i = 0; i < 4; ++i) {
      const auto id = ids[static_cast<std::size_t>(i)];
      together.append(id, seeds(static_cast<std::uint64_t>(10000 * i + 9 * step), 9));
      together.seal(id, 1);
    }
  for (int i = 0; i < 4; ++i) {
    test_cache<> alone(small_config());
    const auto id = alone.create();
    alone.append(id, seeds(static_cast<std::uint64_t>(10000 * i), 180));
    alone.seal(id);
    EXPECT_EQ(alone.bytes(id), together.bytes(ids[static_cast<std::size_t>(i)]));
    EXPECT_EQ(alone.attend(id, 1), together.attend(ids[static_cast<std::size_t>(i)], 1));
  }
}

TEST(KvCache, ABatchEqualsItsSequences) {
  test_cache<> c(small_config());
  std::vector<kvarn::sequence_id> ids;
  std::vector<std::vector<float>> queries, outs, lses;
  std::vector<kvarn::cache_queries<float, float>> calls;
  const int lengths[] = {1, 4, 200, 700};
  for (int i = 0; i < 4; ++i) {
    ids.push_back(c.create());
    c.append(ids.back(), seeds(static_cast<std::uint64_t>(1000 * i), lengths[i]));
    c.seal(ids.back());
    const int tokens = i == 3 ? 20 : 1;  // more rows than go through the memory together
    queries.push_back(kvarn_test::token_tensor(seeds(900, tokens), 1, 4, 3, 64));
    outs.emplace_back(static_cast<std::size_t>(tokens) * 4 * 64);
    lses.emplace_back(static_cast<std::size_t>(tokens) * 4);
    calls.push_back({kvarn::token_major<const float>(queries.back().data(), 4, 64),
                     kvarn::token_major(outs.back().data(), 4, 64), tokens, lses.back().data()});
  }
  const auto backwards = [](std::size_t count, const auto& f) {
    for (std::size_t i = count; i-- > 0;) f(i);
  };
  ASSERT_TRUE(c.cache
                  .attend(ids, 1, std::span<const kvarn::cache_queries<float, float>>(calls),
                          {.softmax_scale = 0.125f}, c.workspace, backwards)
                  .ok());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    auto expected = c.attend(ids[i], 1, calls[i].tokens);
    outs[i].insert(outs[i].end(), lses[i].begin(), lses[i].end());
    EXPECT_EQ(outs[i], expected) << i;
  }
}

TEST(KvCache, HeadMajorAndReversedTensors) {
  test_cache<> c(small_config());
  const auto plain = c.create();
  const auto strided = c.create();
  c.append(plain, seeds(0, 100));
  for (int layer = 0; layer < 2; ++layer) {
    const auto keys = kvarn_test::token_tensor(seeds(0, 100), layer, 2, 0, 64);
    std::vector<float> by_head(keys.size());
    for (int t = 0; t < 100; ++t)
      for (int h = 0; h < 2; ++h)
        std::copy_n(keys.begin() + (t * 2 + h) * 64, 64, by_head.begin() + (h * 100 + t) * 64);
    auto values = kvarn_test::token_tensor(seeds(0, 100), layer, 2, 1, 64);
    std::reverse(values.begin(), values.end());
    ASSERT_TRUE(
        c.cache
            .append(strided, layer, kvarn::head_major(by_head.data(), 100, 64),
                    kvarn::heads_view<float>{values.data() + values.size() - 1, -128, -64, -1}, 100)
            .ok());
  }
  ASSERT_TRUE(c.cache.commit(strided).ok());
  EXPECT_EQ(c.bytes(plain), c.bytes(strided));
}

TEST(KvCache, PoisonedPagesAreNeverRead) {
  auto config = small_config();
  std::vector<std::byte> pages(
      static_cast<std::size_t>(config.page_count) * kvarn::page_bytes(config) + 1);
  config.pages = std::span(pages).subspan(1);  // any alignment will do
  test_cache<> c(config);
  std::vector<float> first;
  for (const auto poison : {std::byte{0}, std::byte{0xff}, std::byte{0x7e}}) {
    std::fill(pages.begin(), pages.end(), poison);  // all pages are free: NaN zeros, steps, scales
    const auto id = c.create();
    c.append(id, seeds(0, 300));
    c.seal(id);
    const auto out = c.attend(id, 1);
    if (first.empty()) first = out;
    EXPECT_EQ(out, first);
    ASSERT_TRUE(c.cache.truncate(id, 100).ok());
    c.append(id, seeds(5000, 100));
    c.seal(id);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
    ASSERT_TRUE(c.cache.free(id).ok());
  }
}

TEST(KvCache, DraftsAreAttendedToAndNeverSealed) {
  test_cache<> c(small_config());
  const auto id = c.create();
  c.append(id, seeds(0, 5 + 60));
  const auto before = c.attend(id);
  c.draft(id, seeds(100, 80));
  EXPECT_NE(c.attend(id), before);
  EXPECT_EQ(c.seal(id), 0);
  ASSERT_TRUE(c.cache.commit(id, 3).ok());
  EXPECT_EQ(c.seal(id), 0);  // 63 committed tokens behind the sink
  ASSERT_TRUE(c.cache.commit(id, 1).ok());
  EXPECT_EQ(c.seal(id), 1);
  ASSERT_TRUE(c.cache.truncate(id, c.cache.length(id)).ok());
  EXPECT_EQ(c.cache.length(id, 1), 69);
}

TEST(KvCache, OutOfPagesLeavesTheSequenceAsItWas) {
  auto config = small_config();
  config.page_count = 2;
  test_cache<> c(config);
  const auto id = c.create();
  c.append(id, seeds(0, 5 + 3 * 64));
  const auto before = c.bytes(id);
  EXPECT_EQ(c.cache.sealable(id), 3);
  EXPECT_EQ(c.cache.sealable(id, 64), 4);
  EXPECT_EQ(c.cache.free_pages(), 2);
  const auto failed = c.cache.seal(id, 3, c.workspace);
  EXPECT_EQ(failed.why().code(), error_code::short_buffer);
  EXPECT_EQ(failed.why().message(), "3 pages are needed; 2 of 2 are free");
  EXPECT_EQ(c.bytes(id), before);
  EXPECT_EQ(c.cache.free_pages(), 2);
  EXPECT_EQ(c.seal(id, 2), 2);
}

TEST(KvCache, AContextShiftKeepsPositionsAndBytes) {
  auto config = small_config();
  const kvarn::layer_bits bits[] = {{2, 2}, kvarn::exact_layer};
  config.bits = bits;
  test_cache<> c(config);
  const auto id = c.create();
  c.append(id, seeds(0, 5 + 64 * 3 + 10));
  c.seal(id);
  ASSERT_TRUE(c.cache.drop_oldest(id, 2).ok());
  for (int layer = 0; layer < 2; ++layer) {
    // What is left: the sink and the tokens from position 133 on.
    test_cache<> all(config);
    const auto other = all.create();
    all.append(other, seeds(0, 5 + 64 * 3 + 10));
    all.seal(other);
    const auto expected =
        all.attend(other, layer, 1, {.softmax_scale = 0.125f, .window = 5 + 64 * 3 + 10 - 133});
    // The window hides the sink too.
    const auto shifted =
        c.attend(id, layer, 1, {.softmax_scale = 0.125f, .window = 5 + 64 * 3 + 10 - 133});
    if (layer == 1) {
      // The exact rows now stand in other blocks, so that sums differ in rounding.
      for (std::size_t i = 0; i < shifted.size(); ++i) EXPECT_NEAR(shifted[i], expected[i], 1e-5);
    } else {
      EXPECT_EQ(shifted, expected);
    }
    EXPECT_NE(c.attend(id, layer), all.attend(other, layer));
  }
  EXPECT_EQ(c.cache.length(id), 5 + 64 * 3 + 10);
  EXPECT_EQ(c.cache.free_pages(), config.page_count - 1);
}

TEST(KvCache, ForksShareUntilTheyWrite) {
  test_cache<> c(small_config());
  const auto parent = c.create();
  c.append(parent, seeds(0, 5 + 64 * 2 + 30));
  c.seal(parent);
  const auto before = c.bytes(parent);
  const auto exact = c.cache.memory().exact;
  const auto child = c.cache.fork(parent).value();
  const auto cut = c.cache.fork(parent, 100).value();
  EXPECT_EQ(c.cache.memory().exact, exact) << "a fork takes no memory for tokens";
  EXPECT_EQ(c.cache.free_pages(), 14);
  c.append(child, seeds(700, 100));
  c.append(cut, seeds(800, 100));
  EXPECT_EQ(c.seal(child), 2);
  EXPECT_EQ(c.bytes(parent), before);
  c.append(parent, seeds(5 + 64 * 2 + 30, 100));
  ASSERT_TRUE(c.cache.truncate(parent, 5 + 64 * 2 + 30).ok());
  ASSERT_TRUE(c.cache.free(child).ok());
  EXPECT_EQ(c.bytes(parent), before);
}

TEST(KvCache, RotatedInputGivesTheSameBytes) {
  auto config = small_config();
  test_cache<float> plain(config);
  config.keys_rotated = config.values_rotated = true;
  test_cache<float> rotated(config);
  const auto a = plain.create();
  const auto b = rotated.create();
  plain.append(a, seeds(0, 80));
  for (int layer = 0; layer < 2; ++layer) {
    auto keys = kvarn_test::token_tensor(seeds(0, 80), layer, 2, 0, 64);
    auto values = kvarn_test::token_tensor(seeds(0, 80), layer, 2, 1, 64);
    kvarn::hadamard(keys.data(), 64, 160, 64);
    kvarn::hadamard(values.data(), 64, 160, 64);
    ASSERT_TRUE(rotated.cache
                    .append(b, layer, kvarn::token_major(keys.data(), 2, 64),
                            kvarn::token_major(values.data(), 2, 64), 80)
                    .ok());
  }
  ASSERT_TRUE(rotated.cache.commit(b).ok());
  plain.seal(a);
  rotated.seal(b);
  EXPECT_EQ(plain.bytes(a), rotated.bytes(b));
}

TEST(KvCache, RefusedCallsSayWhy) {
  test_cache<> c(small_config());
  const auto id = c.create();
  c.append(id, seeds(0, 10));
  const auto freed = c.create();
  ASSERT_TRUE(c.cache.free(freed).ok());
  const auto expect = [](const kvarn::status& s, const std::string& message) {
    EXPECT_EQ(s.code(), error_code::invalid_argument);
    EXPECT_EQ(s.message(), message);
  };
  const std::string no_sequence =
      "there is no sequence in slot 1 of generation 0; it was freed, or never created here";
  expect(c.cache.free(freed), no_sequence);
  expect(c.cache.fork(freed).why(), no_sequence);
  expect(c.cache.truncate(freed, 0), no_sequence);
  expect(c.cache.free(kvarn::sequence_id{}),
         "there is no sequence in slot 4294967295 of generation 0; it was freed, or never created "
         "here");
  expect(c.cache.truncate(id, 11), "position is 11; allowed are 0 to 10");
  expect(c.cache.fork(id, 11).why(), "position is 11; allowed are 0 to 10");
  expect(c.cache.fork(id, -2).why(), "position is -2; allowed are 0 to 10");
  expect(c.cache.commit(id, 1), "tokens to commit is 1; every layer has 0 that are not committed");
  expect(c.cache.drop_oldest(id, 1), "pages to drop is 1; the sequence has 0 sealed pages");
  expect(c.cache.seal(id, -1, c.workspace).why(), "tiles to seal is -1; it must not be negative");
  const std::vector<float> x(64 * 4 * 4);
  std::vector<float> out(x.size());
  const auto view = kvarn::token_major(x.data(), 2, 64);
  expect(c.cache.append(id, 2, view, view, 1), "layer is 2; allowed are 0 to 1");
  expect(c.cache.append(id, 0, view, view, -1), "tokens is -1; it must not be negative");
  expect(c.cache.append(id, 0, view, view, kvarn::max_exact_rows),
         "tokens is 1073741823; allowed are 0 to 1073741818: a tail has at most 1073741823, a "
         "sequence 4611686018427387904");
  const kvarn::heads_view<const float> none;
  expect(c.cache.append(id, 0, none, view, 1), "the data of keys is null");
  expect(c.cache.append(id, 0, view, none, 1), "the data of values is null");
  EXPECT_TRUE(c.cache.append(id, 0, none, none, 0).ok());
  kvarn::cache_queries<float, float> q{none, kvarn::token_major(out.data(), 4, 64), 1};
  expect(c.cache.attend(id, 0, q, {.softmax_scale = 1.0f}, c.workspace),
         "the data of queries is null");
  q = {kvarn::token_major(x.data(), 4, 64), {}, 1};
  expect(c.cache.attend(id, 0, q, {.softmax_scale = 1.0f}, c.workspace), "the data of out is null");
  q = {kvarn::token_major(x.data(), 4, 64), kvarn::token_major(out.data(), 4, 64), 11};
  expect(c.cache.attend(id, 0, q, {.softmax_scale = 1.0f}, c.workspace),
         "query tokens is 11; layer 0 has 10 tokens; append to this layer first, or give a "
         "position");
  q.tokens = 1;
  for (const float scale : {0.0f, -1.0f, 2e6f, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()})
    expect(c.cache.attend(id, 0, q, {.softmax_scale = scale}, c.workspace),
           "softmax_scale must be given: a positive number up to 1e6");
  q.tokens = 1 << 30;  // times 4 query heads: more rows than an int counts
  expect(c.cache.attend(id, 0, q, {.softmax_scale = 1.0f}, c.workspace),
         "query tokens is 1073741824; allowed are 0 to 536870911");
  q.tokens = 1;
  const std::string positions = "; allowed are 0 to 4611686018427387904";
  for (const std::int64_t window : {std::int64_t{-1}, kvarn::max_position + 1})
    expect(c.cache.attend(id, 0, q, {.softmax_scale = 1.0f, .window = window}, c.workspace),
           "window is " + std::to_string(window) + positions);
  for (const std::int64_t position :
       {std::int64_t{-2}, kvarn::max_position + 1, std::numeric_limits<std::int64_t>::max()}) {
    q.position = position;
    expect(c.cache.attend(id, 0, q, {.softmax_scale = 1.0f}, c.workspace),
           "query position is " + std::to_string(position) + positions);
  }
  // The last that are allowed: far behind every token, and a window that reaches beyond the first.
  for (const std::int64_t position : {std::int64_t{0}, kvarn::max_position}) {
    q.position = position;
    EXPECT_TRUE(
        c.cache
            .attend(id, 0, q, {.softmax_scale = 1.0f, .window = kvarn::max_position}, c.workspace)
            .ok());
  }
  EXPECT_EQ(c.cache.length(id), 10);
}

// No page has bytes, so there is no memory to point into.
TEST(KvCache, EveryLayerExact) {
  const kvarn::layer_bits exact[] = {kvarn::exact_layer, kvarn::exact_layer};
  auto config = small_config();
  config.bits = exact;
  test_cache<> c(config);
  const auto id = c.create();
  c.append(id, seeds(0, 150));
  EXPECT_EQ(c.seal(id), 2);
  EXPECT_EQ(c.cache.memory().pages, 0u);
  for (int layer = 0; layer < 2; ++layer) EXPECT_LT(c.error(id, layer), 1e-3);
  ASSERT_TRUE(c.cache.drop_oldest(id, 1).ok());
  EXPECT_LT(c.error(id, 1), 1e-3);
}

TEST(KvCache, ConfigurationsAreChecked) {
  struct refusal {
    std::function<void(kvarn::cache_config&)> change;
    std::string message;
  };
  static const kvarn::layer_bits two[] = {{2, 2}, {5, 2}};
  static const kvarn::layer_bits exact[] = {kvarn::exact_layer, kvarn::exact_layer};
  static std::byte buffer[16];
  const refusal refusals[] = {
      {[](auto& c) { c.layers = 0; }, "layers is 0; allowed are 1 to 4096"},
      {[](auto& c) { c.kv_heads = -1; }, "kv_heads is -1; allowed are 1 to 4096"},
      {[](auto& c) { c.query_heads = 3; },
       "query_heads is 3; it must be a multiple of kv_heads, which is 2"},
      {[](auto& c) { c.sink = -1; }, "sink is -1; allowed are 0 to 16777216"},
      {[](auto& c) { c.tail = -1; }, "tail is -1; allowed are 0 to 16777216"},
      {[](auto& c) { c.max_sequences = 0; }, "max_sequences is 0; allowed are 1 to 1048576"},
      {[](auto& c) { c.format.key_head_dim = 100; },
       "key head_dim is 100; allowed are 64 80 96 112 128 160 192 256 512"},
      {[](auto& c) { c.bits = std::span(two).first(1); },
       "bits has 1 entries; it must have none or 2, one per layer"},
      {[](auto& c) { c.bits = two; },
       "layer 1: key bits is 5; allowed are 2 3 4; or 0 for both: an exact layer"},
      {[](auto& c) { c.page_count = 0; },
       "page_count is 0 and page_memory is 0; exactly one of them must be given"},
      {[](auto& c) { c.page_memory = 1 << 20; },
       "page_count is 16 and page_memory is 1048576; exactly one of them must be given"},
      {[](auto& c) { c.page_count = -5; }, "page_count is -5; allowed are 1 to 2147483647"},
      {[](auto& c) {
         c.page_count = 0;
         c.page_memory = 100;
       },
       "page_memory is 100 bytes; one page takes 10240"},
      {[](auto& c) {
         c.page_count = 0;
         c.page_memory = 100;
         c.bits = exact;
       },
       "page_memory is given, but every layer is exact; give page_count"},
      {[](auto& c) { c.pages = buffer; }, "pages has 16 bytes; 16 pages need 163840"},
      {[](auto& c) { c.method = static_cast<kvarn::encoder>(9); },
       "encoder is 9; allowed are 0 (paper) 1 (tuned) 2 (query_aware)"},
  };
  for (const auto& r : refusals) {
    auto config = small_config();
    r.change(config);
    const auto made = kvarn::kv_cache<>::make(config);
    EXPECT_FALSE(made.ok());
    EXPECT_EQ(made.why().message(), r.message);
  }
  EXPECT_TRUE(kvarn::kv_cache<>::make(small_config()).ok());
}

}  // namespace
