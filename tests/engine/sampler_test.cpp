// What the sampler may draw, and how often.
#include "../../examples/engine/sampler.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using kvarn_engine::sampler;
using kvarn_engine::sampler_settings;

const std::vector<float> logits{1, 3, 2, 3, -5};

std::vector<int> counts_of(const sampler_settings& settings, int draws) {
  sampler draw(settings);
  std::vector<int> counts(logits.size());
  for (int i = 0; i < draws; ++i) ++counts[static_cast<std::size_t>(draw(logits))];
  return counts;
}

TEST(Sampler, GreedyTakesTheFirstOfTheLargest) {
  EXPECT_EQ(counts_of({}, 10), (std::vector<int>{0, 10, 0, 0, 0}));
  EXPECT_EQ(counts_of({.temperature = 0, .top_k = 3, .top_p = 0.5f}, 10),
            (std::vector<int>{0, 10, 0, 0, 0}));
}

// Frequencies within 5 standard deviations of the softmax.
TEST(Sampler, DrawsFromTheSoftmax) {
  for (const float temperature : {0.7f, 1.0f, 2.5f}) {
    const int draws = 20000;
    const auto counts = counts_of({.temperature = temperature, .seed = 5}, draws);
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x / temperature));
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double p = std::exp(static_cast<double>(logits[i] / temperature)) / sum;
      EXPECT_NEAR(counts[i], draws * p, 5 * std::sqrt(draws * p * (1 - p)) + 1) << i;
    }
  }
}

TEST(Sampler, TopKKeepsTheLikeliest) {
  const auto two = counts_of({.temperature = 1, .top_k = 2}, 2000);
  EXPECT_GT(two[1], 850);
  EXPECT_GT(two[3], 850);
  EXPECT_EQ(two[1] + two[3], 2000);
  EXPECT_EQ(counts_of({.temperature = 1, .top_k = 1}, 50)[1], 50);
  EXPECT_GT(counts_of({.temperature = 9, .top_k = 99}, 2000)[4], 0);
}

// Probabilities 0.400, 0.400, 0.147, 0.054, 0.0001 in the order 1, 3, 2, 0, 4.
TEST(Sampler, TopPKeepsTheFewestThatReachIt) {
  const auto kept = [](float p) {
    int tokens = 0;
    for (const int count : counts_of({.temperature = 1, .top_p = p}, 3000)) tokens += count > 0;
    return tokens;
  };
  EXPECT_EQ(kept(0.1f), 1);
  EXPECT_EQ(kept(0.5f), 2);
  EXPECT_EQ(kept(0.85f), 3);
  EXPECT_EQ(kept(0.95f), 4);
}

TEST(Sampler, SeedsDecide) {
  const auto draw = [](std::uint64_t seed) {
    sampler s({.temperature = 1, .seed = seed});
    std::vector<int> tokens;
    for (int i = 0; i < 40; ++i) tokens.push_back(s(logits));
    return tokens;
  };
  EXPECT_EQ(draw(3), draw(3));
  EXPECT_NE(draw(3), draw(4));
}

// Of which the order would be undefined.
TEST(Sampler, RefusesNaN) {
  for (const float temperature : {0.0f, 1.0f}) {
    sampler s({.temperature = temperature});
    std::vector<float> with_nan(logits.begin(), logits.end());
    s(with_nan);
    with_nan.back() = std::numeric_limits<float>::quiet_NaN();
    EXPECT_THROW(s(with_nan), std::runtime_error);
  }
}

TEST(Sampler, RefusesSettings) {
  const auto message = [](const sampler_settings& settings) -> std::string {
    try {
      sampler s(settings);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({.temperature = -1}),
            "sampling: temperature is -1.000000; it must be 0 or positive");
  EXPECT_NE(message({.temperature = std::numeric_limits<float>::quiet_NaN()}), "");
  EXPECT_NE(message({.temperature = std::numeric_limits<float>::infinity()}), "");
  EXPECT_EQ(message({.top_k = -2}), "sampling: top-k is -2.000000; it must be 0 or positive");
  EXPECT_EQ(message({.top_p = 0}), "sampling: top-p is 0.000000; it must be above 0, at most 1");
  EXPECT_NE(message({.top_p = 1.5f}), "");
}

}  // namespace
