// Which tokens and layers stay exact, against the published rules followed token by token.
#include "kvarn/baselines/exact_rule.hpp"

#include <gtest/gtest.h>

#include <cstddef>

#include "kvarn/baselines/baselines.hpp"

namespace {

using kvarn::exact_rule;
using kvarn::quantised_tokens;

// KIVI: a tail of keys that is quantised when it has 128, a window of the newest 128 values.
TEST(ExactRule, KiviAsPublished) {
  std::size_t quantised_keys = 0, tail = 0;
  for (std::size_t tokens = 1; tokens <= 700; ++tokens) {
    if (++tail == 128) {
      quantised_keys += tail;
      tail = 0;
    }
    const std::size_t quantised_values = tokens > 128 ? tokens - 128 : 0;
    const auto keys = quantised_tokens(kvarn::kivi.native.keys, 32, tokens);
    const auto values = quantised_tokens(kvarn::kivi.native.values, 1, tokens);
    EXPECT_EQ(keys.first, 0u);
    EXPECT_EQ(keys.end, quantised_keys) << tokens;
    EXPECT_EQ(values.first, 0u);
    EXPECT_EQ(values.end, quantised_values) << tokens;
  }
}

TEST(ExactRule, SinkGroupsAndTail) {
  const auto equal = kvarn::equal_for_all(128, 128, 128);
  for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value})
    for (std::size_t tokens = 0; tokens <= 800; ++tokens) {
      const auto range = quantised_tokens(equal.of(kind), 1, tokens);
      EXPECT_EQ(range.first, tokens < 128 ? tokens : 128) << tokens;
      EXPECT_EQ(range.count() % 128, 0u);
      const std::size_t tail = tokens - range.end;
      if (range.count() > 0) {
        EXPECT_GE(tail, 128u) << tokens;
      }
      EXPECT_LT(tail, 256u) << tokens;
    }
}

// What a method quantises at once is not cut, whatever the policy's step.
TEST(ExactRule, StepsAreWholeGroups) {
  EXPECT_EQ(quantised_tokens({0, 0, 1}, 64, 200).end, 192u);
  EXPECT_EQ(quantised_tokens({0, 0, 96}, 64, 200).end, 192u);
  EXPECT_EQ(quantised_tokens({0, 0, 96}, 64, 191).end, 0u);
  EXPECT_EQ(quantised_tokens({10, 5, 32}, 32, 200).first, 10u);
  EXPECT_EQ(quantised_tokens({10, 5, 32}, 32, 200).end, 170u);
  EXPECT_EQ(quantised_tokens({10, 5, 32}, 32, 3).count(), 0u);
}

TEST(ExactRule, EdgeLayers) {
  const auto& policy = kvarn::turbo_vllm.native;
  for (int layer = 0; layer < 30; ++layer)
    EXPECT_EQ(kvarn::is_exact_layer(policy, layer, 30),
              layer == 0 || layer == 1 || layer == 28 || layer == 29);
  for (int layer = 0; layer < 3; ++layer) EXPECT_TRUE(kvarn::is_exact_layer(policy, layer, 3));
  for (int layer = 0; layer < 3; ++layer)
    EXPECT_FALSE(kvarn::is_exact_layer(kvarn::kivi.native, layer, 3));
}

}  // namespace
