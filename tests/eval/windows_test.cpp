// Where windows of a text start, what they are called, and what is refused.
#include "../../tools/eval/windows.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../engine/tokenizer_files.hpp"

namespace {

using namespace kvarn_eval;

// Every byte is a token.
class Windows : public testing::Test {
 protected:
  // What a call throws.
  template <class F>
  static std::string refusal(const F& call) {
    try {
      call();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  }
  const kvarn_engine::tokenizer vocabulary =
      kvarn_test::tokenizer_of(kvarn_test::byte_vocabulary({}).writer("gpt-2"));
  const std::string text = "\xc3\xa9tude no 5";  // 10 characters, 11 bytes
};

TEST_F(Windows, StartAtCharacters) {
  const auto windows = windows_at(vocabulary, text, {0, 1, 8}, 2);
  ASSERT_EQ(windows.size(), 3u);
  EXPECT_EQ(windows[0].name, "c0");
  EXPECT_EQ(windows[0].tokens, (std::vector<int>{0xc3, 0xa9}));
  EXPECT_EQ(windows[1].tokens, (std::vector<int>{'t', 'u'}));
  EXPECT_EQ(windows[2].name, "c8");
  EXPECT_EQ(windows[2].tokens, (std::vector<int>{' ', '5'}));
  EXPECT_EQ(refusal([&] { windows_at(vocabulary, text, {9}, 2); }),
            "the text from character 9 on has 1 tokens; needed are 1 x 2");
  EXPECT_EQ(refusal([&] { windows_at(vocabulary, text, {1000}, 2); }),
            "the text from character 1000 on has 0 tokens; needed are 1 x 2");
}

// Their scores would count twice.
TEST_F(Windows, StartAtDifferentCharacters) {
  EXPECT_EQ(refusal([&] {
              windows_at(vocabulary, text, {5, 0, 5}, 2);
            }),
            "two windows start at character 5; each may be given once");
}

TEST_F(Windows, SpreadWithoutOverlap) {
  const auto windows = spread_windows(vocabulary, text, 3, 3);
  ASSERT_EQ(windows.size(), 3u);
  EXPECT_EQ(windows[1].name, "t3");
  EXPECT_EQ(windows[2].name, "t7");
  EXPECT_EQ(windows[2].tokens, (std::vector<int>{'n', 'o', ' '}));
  EXPECT_EQ(refusal([&] { spread_windows(vocabulary, text, 4, 3); }),
            "the text has 11 tokens; needed are 4 x 3");
}

}  // namespace
