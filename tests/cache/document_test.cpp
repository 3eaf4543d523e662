// The example of docs/cache.md compiles and runs: it is the text of cache_example.inc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "kvarn/cache/kv_cache.hpp"
#include "support.hpp"

namespace {

// The function below is the text of the page.
#include "cache_example.inc"

std::string read_file(const std::string& path) {
  std::ifstream file(std::string(KVARN_TEST_DATA_DIR) + "/../" + path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(CacheDocument, TheExampleIsTheOneThatIsCompiled) {
  const std::string page = read_file("../docs/cache.md");
  const std::string fence = "```cpp\n";
  const auto start = page.find(fence) + fence.size();
  EXPECT_EQ(page.substr(start, page.find("```", start) - start),
            read_file("cache/cache_example.inc"));
}

TEST(CacheDocument, TheExampleRuns) {
  const auto keys = kvarn_test::token_tensor(kvarn_test::seeds(0, 300), 0, 2, 0, 64);
  const auto queries = kvarn_test::token_tensor(kvarn_test::seeds(0, 1), 0, 4, 3, 64);
  std::vector<float> out(4 * 64);
  first_steps(keys.data(), keys.data(), queries.data(), out.data());
  EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return x != 0.0f; }));
  EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
}

}  // namespace
