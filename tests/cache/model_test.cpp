// The cache against its model, over thousands of random strings of operations.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "model_driver.hpp"

namespace {

using kvarn_test::driver_counts;

template <class T>
void drive(int first_seed, int seeds, driver_counts& counts) {
  for (int seed = first_seed; seed < first_seed + seeds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    std::vector<std::uint8_t> bytes(50 + random() % 200);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    SCOPED_TRACE("seed " + std::to_string(seed));
    kvarn_test::model_driver<T>(bytes, counts).run();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(CacheModel, RandomOperations) {
  driver_counts counts;
  drive<kvarn::float16>(0, 2000, counts);
  drive<kvarn::bfloat16>(10000, 100, counts);
  drive<float>(20000, 100, counts);
  EXPECT_GT(counts.sealed, 1000);
  EXPECT_GT(counts.out_of_pages, 50);
  EXPECT_GT(counts.cut_tiles, 100);
  EXPECT_GT(counts.cut_sinks, 100);
  EXPECT_GT(counts.forks, 1000);
  EXPECT_GT(counts.restored, 1000);
  EXPECT_GT(counts.refused_restores, 100);
  EXPECT_GT(counts.shifts, 100);
  EXPECT_GT(counts.interrupted, 1000);
  EXPECT_GT(counts.rejected, 100);
  EXPECT_GT(counts.recycled_slots, 100);
}

}  // namespace
