// The forward pass against double precision: both architectures, any chunks, any memory.
#include "../../examples/engine/transformer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../examples/engine/cache_memory.hpp"
#include "tiny_model.hpp"

namespace {

using namespace kvarn_engine;
using kvarn_test::matrix_d;

const kvarn_examples::thread_pool pool(2);

// Logits [vocabulary] per column, from chunks of `chunk` tokens.
matrix_d logits_of(const model_weights& weights, const std::vector<int>& tokens, int chunk,
                   kv_memory& memory) {
  transformer model(weights, pool);
  const model_config& c = weights.config;
  matrix_d all(c.vocabulary, static_cast<int>(tokens.size()));
  model.prefill(tokens, chunk, memory, [&](std::size_t first, std::span<const float> hidden) {
    const int count = static_cast<int>(hidden.size()) / c.hidden;
    std::vector<float> logits(static_cast<std::size_t>(count * c.vocabulary));
    model.logits(hidden.data(), count, logits.data());
    for (int t = 0; t < count; ++t)
      for (int v = 0; v < c.vocabulary; ++v)
        all(v, static_cast<int>(first) + t) =
            static_cast<double>(logits[static_cast<std::size_t>(t * c.vocabulary + v)]);
  });
  return all;
}

matrix_d exact_logits(const model_weights& weights, const std::vector<int>& tokens, int chunk) {
  cache_memory<float> memory(weights.config, {.bits = kvarn::exact_layer},
                             static_cast<std::int64_t>(tokens.size()), pool);
  return logits_of(weights, tokens, chunk, memory);
}

double relative_error(const matrix_d& a, const matrix_d& b) { return (a - b).norm() / b.norm(); }

class Transformer : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Architectures, Transformer, testing::Values("llama", "qwen2"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(Transformer, LogitsAreThoseOfDoublePrecision) {
  const auto weights = kvarn_test::tiny_model(GetParam());
  const auto tokens = kvarn_test::random_tokens(150, weights.config.vocabulary);
  const double error = relative_error(exact_logits(weights, tokens, 128),
                                      kvarn_test::oracle_logits(weights, tokens));
  EXPECT_LT(error, 2e-5);
  EXPECT_GT(error, 1e-9);  // FP32 was compared with something
}

TEST_P(Transformer, AnyChunksGiveTheSame) {
  const auto weights = kvarn_test::tiny_model(GetParam());
  const auto tokens = kvarn_test::random_tokens(150, weights.config.vocabulary);
  const matrix_d one_by_one = exact_logits(weights, tokens, 1);
  for (const int chunk : {2, 7, 64, 128, 150, 1000})
    EXPECT_LT(relative_error(exact_logits(weights, tokens, chunk), one_by_one), 1e-5) << chunk;
}

TEST_P(Transformer, OutputMatrixIsUsedWhereThereIsOne) {
  auto weights = kvarn_test::tiny_model(GetParam());
  weights.output = kvarn_test::tiny_model(GetParam(), 7).embedding;
  const auto tokens = kvarn_test::random_tokens(9, weights.config.vocabulary);
  EXPECT_LT(
      relative_error(exact_logits(weights, tokens, 4), kvarn_test::oracle_logits(weights, tokens)),
      2e-5);
}

// What is packed changes the result by an amount that falls with the bits; what is exact does not.
TEST_P(Transformer, PackedTokensAreSeenByLaterOnes) {
  const auto weights = kvarn_test::tiny_model(GetParam());
  const auto tokens = kvarn_test::random_tokens(330, weights.config.vocabulary);
  const matrix_d exact = exact_logits(weights, tokens, 64);
  double before = 2;
  for (const int bits : {2, 4}) {
    cache_memory<float> memory(weights.config, {.bits = {bits, bits}, .sink = 64, .group = 64}, 330,
                               pool);
    const matrix_d packed = logits_of(weights, tokens, 64, memory);
    EXPECT_LT(relative_error(packed.leftCols(128), exact.leftCols(128)), 1e-5);
    const double error = relative_error(packed.rightCols(202), exact.rightCols(202));
    EXPECT_LT(error, before / 2);
    EXPECT_GT(error, 1e-3);
    before = error;
  }
}

TEST(Qwen2, EveryBiasCounts) {
  const auto weights = kvarn_test::tiny_model("qwen2");
  const auto tokens = kvarn_test::random_tokens(20, weights.config.vocabulary);
  const matrix_d with_all = exact_logits(weights, tokens, 20);
  for (const auto bias :
       {&layer_weights::query_bias, &layer_weights::key_bias, &layer_weights::value_bias}) {
    auto without = weights;
    for (layer_weights& l : without.layers) (l.*bias).clear();
    EXPECT_GT(relative_error(exact_logits(without, tokens, 20), with_all), 1e-2);
  }
}

TEST(Rope, TurnsPairsByThePosition) {
  for (const auto pairing : {rope_pairing::neighbours, rope_pairing::halves})
    for (const int head_dim : {2, 64, 80}) {
      const int tokens = 3;
      const int heads = 2;
      std::vector<float> x;
      for (int i = 0; i < tokens * heads * head_dim; ++i)
        x.push_back(std::sin(static_cast<float>(i)));
      const std::vector<float> before = x;
      rotate_pairs(x.data(), tokens, heads, head_dim, pairing,
                   rope_angles(100, tokens, head_dim, 5000.0f));
      for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) {
          const int at = (t * heads + h) * head_dim;
          const auto wanted = kvarn_test::oracle_rope(
              Eigen::Map<const Eigen::VectorXf>(before.data() + at, head_dim).cast<double>(),
              100 + t, 5000.0, pairing);
          for (int d = 0; d < head_dim; ++d)
            EXPECT_NEAR(static_cast<double>(x[static_cast<std::size_t>(at + d)]), wanted[d], 1e-6);
        }
    }
}

TEST(Rope, ScoresDependOnDistanceOnly) {
  std::vector<float> q(64), k(64);
  for (std::size_t i = 0; i < 64; ++i) {
    q[i] = std::sin(static_cast<float>(3 * i));
    k[i] = std::cos(static_cast<float>(7 * i));
  }
  const auto score = [&](int query_position, int key_position) {
    auto a = q;
    auto b = k;
    rotate_pairs(a.data(), 1, 1, 64, rope_pairing::halves,
                 rope_angles(query_position, 1, 64, 1e5f));
    rotate_pairs(b.data(), 1, 1, 64, rope_pairing::halves, rope_angles(key_position, 1, 64, 1e5f));
    double sum = 0;
    for (std::size_t i = 0; i < 64; ++i)
      sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
  };
  EXPECT_NEAR(score(20, 5), score(1020, 1005), 1e-4);
  EXPECT_GT(std::abs(score(20, 5) - score(20, 6)), 1e-2);
}

// The message of what f throws.
template <class F>
std::string message_of(const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(TransformerErrors, NameTheValue) {
  const auto weights = kvarn_test::tiny_model("llama");
  const auto message = [&](const auto& change) {
    auto changed = weights;
    change(changed);
    return message_of([&] { transformer(changed, pool); });
  };
  EXPECT_EQ(message([](model_weights&) {}), "");
  EXPECT_EQ(message([](model_weights& w) { w.config.architecture = "gpt2"; }),
            "model: architecture is gpt2; it must be llama or qwen2");
  EXPECT_EQ(message([](model_weights& w) { w.config.kv_heads = 4; }),
            "model: number of query heads is 6; it must be a multiple of the 4 KV heads");
  EXPECT_EQ(message([](model_weights& w) { w.config.layers = 0; }),
            "model: number of layers is 0; it must be 1 to 1024");
  EXPECT_EQ(message([](model_weights& w) { w.layers.pop_back(); }),
            "model: weights of 1 layers; it must be 2");
  EXPECT_EQ(message([](model_weights& w) { w.layers[1].down.cols = 7; }),
            "model: layer 1: down is 80 x 7; it must be 80 x 144");
  EXPECT_EQ(message([](model_weights& w) { w.layers[0].key_bias = {1.0f}; }),
            "model: layer 0: key bias has 1 numbers; it must have 128");

  for (const int group : {0, -64, 96})
    EXPECT_EQ(message_of([&] { cache_memory<float>(weights.config, {.group = group}, 10, pool); }),
              "group is " + std::to_string(group) + "; allowed are 64 128");

  transformer model(weights, pool);
  cache_memory<float> memory(weights.config, {}, 10, pool);
  std::vector<float> hidden(80);
  for (const int token : {-1, 50})
    EXPECT_EQ(message_of([&] { model.forward(std::span(&token, 1), memory, hidden.data()); }),
              "token is " + std::to_string(token) + "; allowed are 0 to 49");
}

}  // namespace
