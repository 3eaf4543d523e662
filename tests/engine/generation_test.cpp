// Generation with a tiny random model, and the names of caches.
#include "../../examples/engine/generation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tiny_model.hpp"

namespace {

using namespace kvarn_engine;

const kvarn_examples::thread_pool pool(2);

cache_memory<float> exact_memory(const model_config& model) {
  return {model, parse_cache("exact", ""), 100, pool};
}

// Every token is the most likely one behind all before it, in double precision.
TEST(Generate, GreedyTokensAreTheMostLikely) {
  const auto weights = kvarn_test::tiny_model("llama");
  transformer model(weights, pool);
  std::vector<int> tokens = kvarn_test::random_tokens(13, weights.config.vocabulary);
  const std::vector<int> prompt = tokens;
  auto memory = exact_memory(weights.config);
  sampler draw({});
  const auto times = generate(model, prompt, 5, 8, draw, memory, [&](int token) {
    Eigen::Index best = 0;
    const auto logits = kvarn_test::oracle_logits(weights, tokens);
    logits.col(logits.cols() - 1).maxCoeff(&best);
    EXPECT_EQ(token, static_cast<int>(best)) << tokens.size();
    tokens.push_back(token);
    return true;
  });
  EXPECT_EQ(tokens.size(), 21u);
  EXPECT_EQ(times.prefill.tokens, 13u);
  EXPECT_EQ(times.decode.tokens, 8u);
  EXPECT_GT(times.decode.seconds, times.decode.attention);
  EXPECT_EQ(memory.length(), 20);  // nobody needs what the last one would add
}

TEST(Generate, StopsWhereItIsTold) {
  const auto weights = kvarn_test::tiny_model("qwen2");
  transformer model(weights, pool);
  auto memory = exact_memory(weights.config);
  sampler draw({});
  int taken = 0;
  const auto times = generate(model, std::vector{1, 2, 3}, 128, 50, draw, memory,
                              [&](int) { return ++taken < 4; });
  EXPECT_EQ(taken, 4);
  EXPECT_EQ(times.decode.tokens, 3u);  // the one that ended it is not one of the text
}

TEST(ParseCache, NamesAndBits) {
  EXPECT_TRUE(parse_cache("exact", "nonsense").is_exact());
  for (const kvarn::encoder_info& info : kvarn::encoder_infos) {
    const cache_choice choice = parse_cache(info.name, "k4v3");
    EXPECT_EQ(choice.method, info.id);
    EXPECT_EQ(choice.bits, (kvarn::layer_bits{4, 3}));
    EXPECT_NE(cache_names().find(info.name), std::string::npos);
  }
  const auto message = [](const std::string& name, const std::string& bits) -> std::string {
    try {
      parse_cache(name, bits);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message("tuned", "k2v2"), "");
  EXPECT_EQ(message("Tuned", "k2v2"), "cache is 'Tuned'; allowed are " + cache_names());
  for (const char* bits : {"", "k2", "k2v5", "k1v2", "k2v2 ", "v2k2"})
    EXPECT_EQ(message("tuned", bits), "bits are '" + std::string(bits) +
                                          "'; allowed is kXvY with X and Y 2, 3 or 4, for example "
                                          "k2v2");
}

}  // namespace
