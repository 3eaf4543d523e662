// The tables of docs/baselines.md: every method and width has its row, with the bits it states and
// the error that it has on independent normal numbers.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include "support.hpp"

namespace {

std::string page() {
  std::ifstream file(std::string(KVARN_TEST_DATA_DIR) + "/../../docs/baselines.md");
  EXPECT_TRUE(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

// | name | bits of keys | of values | error of keys | of values |, head_dim and groups of 128.
TEST(BaselinesPage, NumbersAreWhatTheMethodsHave) {
  const std::string text = page();
  int rows = 0;
  for (const kvarn::baseline& method : kvarn::baselines)
    for (const kvarn::kv_bits& width : method.widths) {
      const std::string name = kvarn::variant_name(method, width);
      const std::string start = "\n| `" + name + "` | ";
      const auto at = text.find(start);
      ASSERT_NE(at, std::string::npos) << name;
      ++rows;
      std::istringstream row(text.substr(at + start.size(), 100));
      double key_bits = 0, value_bits = 0, key_error = 0, value_error = 0;
      char bar = 0;
      ASSERT_TRUE(row >> key_bits >> bar >> value_bits >> bar >> key_error >> bar >> value_error)
          << name;
      const kvarn::baseline_settings keys{kvarn::tile_kind::key, width.key, 128, 128};
      const kvarn::baseline_settings values{kvarn::tile_kind::value, width.value, 128, 128};
      EXPECT_NEAR(key_bits, method.bits_per_element(keys), 6e-5) << name;
      EXPECT_NEAR(value_bits, method.bits_per_element(values), 6e-5) << name;
      EXPECT_NEAR(key_error / kvarn_test::normal_error(method, keys), 1, 0.025) << name;
      EXPECT_NEAR(value_error / kvarn_test::normal_error(method, values), 1, 0.025) << name;
    }
  std::istringstream lines(text);
  int written = 0;
  for (std::string line; std::getline(lines, line);) written += line.rfind("| `", 0) == 0;
  EXPECT_EQ(written, rows) << "a row for something that is not a method at one of its widths";
}

// | method | its source and rules |
TEST(BaselinesPage, EveryMethodIsDescribed) {
  const std::string text = page();
  for (const kvarn::baseline& method : kvarn::baselines) {
    std::string name(method.name);
    if (name.ends_with("_rot")) name.resize(name.size() - 4);
    EXPECT_NE(text.find("\n| **" + name + "**"), std::string::npos) << name;
  }
}

}  // namespace
