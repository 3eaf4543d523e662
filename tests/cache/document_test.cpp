// The examples of docs/cache.md compile and run: they are the texts of the .inc files beside this.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvarn/cache/cache_file.hpp"
#include "kvarn/cache/kv_cache.hpp"
#include "support.hpp"

namespace {

// The text of the page.
#include "cache_config_example.inc"
#include "cache_example.inc"
#include "cache_file_example.inc"

std::string read_file(const std::string& path) {
  std::ifstream file(std::string(KVARN_TEST_DATA_DIR) + "/../" + path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(CacheDocument, TheExamplesAreThoseThatAreCompiled) {
  const std::string page = read_file("../docs/cache.md");
  const std::string fence = "```cpp\n";
  std::size_t start = 0;
  for (const char* const file :
       {"cache_example.inc", "cache_config_example.inc", "cache_file_example.inc"}) {
    start = page.find(fence, start);
    ASSERT_NE(start, std::string::npos) << file;
    start += fence.size();
    EXPECT_EQ(page.substr(start, page.find("```", start) - start),
              read_file(std::string("cache/") + file));
  }
  EXPECT_EQ(page.find(fence, start), std::string::npos);
}

TEST(CacheDocument, TheExampleRuns) {
  const auto keys = kvarn_test::token_tensor(kvarn_test::seeds(0, 300), 0, 2, 0, 64);
  const auto queries = kvarn_test::token_tensor(kvarn_test::seeds(0, 1), 0, 4, 3, 64);
  std::vector<float> out(4 * 64);
  first_steps(keys.data(), keys.data(), queries.data(), out.data());
  EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return x != 0.0f; }));
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
}

TEST(CacheDocument, LayersHaveTheirBits) {
  auto config = kvarn_test::small_config();
  const auto cache = make_cache(config);
  ASSERT_TRUE(cache.has_value());
  EXPECT_EQ(cache->storage().format(0).key_bits, 4);
  EXPECT_EQ(cache->storage().format(1).value_bits, 2);
  EXPECT_TRUE(cache->table().is_exact_layer(2));
  config.kv_heads = 0;
  EXPECT_FALSE(make_cache(config).has_value());
}

TEST(CacheDocument, SequencesComeBack) {
  kvarn_test::test_cache<> from(kvarn_test::small_config());
  const auto id = from.create();
  from.append(id, kvarn_test::seeds(0, 200));
  from.seal(id);
  const std::string path = testing::TempDir() + "kvarn_cache_example";
  save(from.cache, std::span(&id, 1), path);
  kvarn_test::test_cache<> to(kvarn_test::small_config());
  const auto ids = restore(to.cache, path);
  ASSERT_EQ(ids.size(), 1u);
  EXPECT_EQ(from.bytes(id), to.bytes(ids[0]));
  EXPECT_TRUE(restore(to.cache, path + ".none").empty());
}

}  // namespace
