// A run of exact rows without memory behind it: how many rows it has room for, and what it asks
// for.
#include "kvarn/cache/exact_run.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace {

// Rows that nobody reads: what is asked for is noted.
struct noted_space {
  using account = std::vector<int>;  // the capacities
  static constexpr bool token_major = false;
  static constexpr bool moves_down = true;

  template <class Header>
  static Header* make(account& asked, int capacity, std::size_t bytes) {
    asked.push_back(capacity);
    return new Header(capacity, &asked, bytes);
  }
  template <class Header>
  static void destroy(Header* header) {
    delete header;
  }
  static void copy(account&, void*, const void*, std::size_t) {}
};

using noted_run = kvarn::exact_run<float, noted_space>;
constexpr kvarn::row_shape shape{1, 64, 64};
constexpr int most = kvarn::max_exact_rows;

TEST(ExactRun, GrowsByHalf) {
  std::vector<int> asked;
  noted_run run;
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(run.reserve(shape, asked, 1));
    run.extend(1);
  }
  EXPECT_EQ(asked, (std::vector<int>{16, 32, 48, 80, 128, 192, 288}));
  run.drop_front(190);
  ASSERT_TRUE(run.reserve(shape, asked, 250));  // moved down
  EXPECT_EQ(asked.size(), 7u);
  run.shrink(shape, asked, 8);
  EXPECT_EQ(asked.back(), 16);
}

// Where sums of counts come near the last of an int.
TEST(ExactRun, HoldsTheMostRowsThereMayBe) {
  std::vector<int> asked;
  noted_run run;
  const auto add = [&](int more, bool tight = false) {
    ASSERT_TRUE(run.reserve(shape, asked, more, tight));
    run.extend(more);
  };
  add(most - 1, true);
  add(1);
  EXPECT_EQ(run.count(), most);
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked[0], most - 1);
  EXPECT_GE(asked[1], most - 1 + (most - 1) / 2);
  run.shrink(shape, asked, 256);
  EXPECT_EQ(asked.size(), 2u) << "less than half is unused";

  const int room = asked[1] - most;
  run.drop_front(most - 1);
  add(room);
  run.drop_front(room);
  EXPECT_EQ(asked.size(), 2u);
  add(most - 1);  // moved down: nearly all in front of it is free
  EXPECT_EQ(asked.size(), 2u);
  EXPECT_EQ(run.count(), most);
}

}  // namespace
