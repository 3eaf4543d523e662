// Pseudo-decode and static runs of a tiny random model: what is quantised when, and what is
// measured of it.
#include "../../tools/eval/evaluate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "../../tools/eval/statistics.hpp"
#include "../engine/tiny_model.hpp"
#include "kvarn/baselines/baselines.hpp"
#include "kvarn/metrics.hpp"

namespace {

using namespace kvarn_eval;

const kvarn_examples::thread_pool pool(2);
const progress quiet = [](double) {};

class Evaluation : public testing::Test {
 protected:
  static constexpr int tokens = 330;  // sink of 64, four groups of 64, 10 in the tail
  const layout stored{.sink = 64, .group = 64};
  const kvarn_engine::model_weights weights = kvarn_test::tiny_model("llama");
  kvarn_engine::transformer model{weights, pool};

  exact_run run_exact() {
    return exact_run(model, stored, kvarn_test::random_tokens(tokens, weights.config.vocabulary),
                     stored.sink + stored.group, pool, quiet);
  }
};

TEST_F(Evaluation, ExactRunHasThePerplexityOfDoublePrecision) {
  const auto text = kvarn_test::random_tokens(tokens, weights.config.vocabulary);
  const exact_run exact = run_exact();
  const auto logits = kvarn_test::oracle_logits(weights, text);
  std::vector<float> nll = exact.skipped_nll();
  EXPECT_EQ(nll.size(), 128u);
  nll.insert(nll.end(), exact.nll().begin(), exact.nll().end());
  ASSERT_EQ(nll.size(), text.size() - 1);
  for (std::size_t t = 0; t + 1 < text.size(); ++t) {
    const auto column = logits.col(static_cast<int>(t));
    const double wanted = std::log(column.array().exp().sum()) - column[text[t + 1]];
    EXPECT_NEAR(static_cast<double>(nll[t]), wanted, 1e-3);
  }
}

TEST_F(Evaluation, MoreBitsAreBetterAndExactRowsAreNearlyPerfect) {
  exact_run exact = run_exact();
  double before = 1e9;
  for (const char* name : {"tuned_k2v2", "tuned_k3v3", "tuned_k4v4", "fp16"}) {
    const token_scores scores = exact.pseudo_decode(find_method(name), quiet);
    ASSERT_EQ(scores.kl.size(), static_cast<std::size_t>(exact.scored()));
    const double kl = mean(scores.kl);
    EXPECT_LT(kl, before / 2) << name;
    EXPECT_GT(kl, 0) << name;
    before = kl;
  }
  EXPECT_LT(before, 1e-5);
}

// The first group is quantised from exact keys and values in both runs; later ones are not.
TEST_F(Evaluation, ErrorsAccumulateFromTheSecondGroupOn) {
  exact_run exact = run_exact();
  for (const char* name : {"kivi", "tuned_k2v2", "query_aware_k2v2"}) {
    const method m = find_method(name);
    const auto live = exact.pseudo_decode(m, quiet).kl;
    const auto fixed = exact.static_run(m, nullptr, quiet).kl;
    double first = 0;
    double later = 0;
    for (std::size_t i = 0; i < live.size(); ++i) {
      const auto difference = static_cast<double>(std::abs(live[i] - fixed[i]));
      double& sum = i < static_cast<std::size_t>(stored.group) ? first : later;
      sum = (std::max)(sum, difference / (1e-3 + static_cast<double>(fixed[i])));
    }
    EXPECT_LT(first, 1e-2) << name;
    EXPECT_GT(later, 1e-1) << name;
  }
}

TEST_F(Evaluation, ABaselineReplacesWholeGroupsBehindTheSink) {
  exact_run exact = run_exact();
  const method m = find_method("kivi");
  row_store store(model.config(), stored, &m, tokens, &exact.rows(), pool);
  std::vector<float> hidden;
  model.prefill(kvarn_test::random_tokens(tokens, weights.config.vocabulary), 64, store,
                [](std::size_t, std::span<const float>) {});
  const int dim = weights.config.head_dim;
  for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value}) {
    const auto rows =
        kind == kvarn::tile_kind::key ? exact.rows().keys.at(1, 1) : exact.rows().values.at(1, 1);
    std::vector<float> wanted(rows.begin(), rows.end());
    const auto part = std::span(wanted).subspan(static_cast<std::size_t>(64 * dim),
                                                static_cast<std::size_t>(4 * 64 * dim));
    kvarn::quantize_dequantize(kvarn::kivi, settings_of(m, stored, dim, kind), part, part)
        .or_throw();
    std::vector<float> found(rows.begin(), rows.end());
    store.reconstruct(1, 1, kind, found);
    EXPECT_EQ(found, wanted);
    EXPECT_NE(found, std::vector<float>(rows.begin(), rows.end()));
  }
}

// KIVI as published: no sink, keys in groups, the newest 128 values exact.
TEST_F(Evaluation, ANativeRuleDecidesWhatStaysExact) {
  const method m = find_method("kivi_native");
  row_store store(model.config(), stored, &m, tokens, nullptr, pool);
  model.prefill(kvarn_test::random_tokens(tokens, weights.config.vocabulary), 50, store,
                [](std::size_t, std::span<const float>) {});
  EXPECT_EQ(store.quantised(0, kvarn::tile_kind::key).first, 0u);
  EXPECT_EQ(store.quantised(0, kvarn::tile_kind::key).end, 256u);
  EXPECT_EQ(store.quantised(0, kvarn::tile_kind::value).end, 202u);
}

TEST_F(Evaluation, ErrorsOfHeadsAreThoseOfTheirTiles) {
  exact_run exact = run_exact();
  for (const char* name : {"rotation_kivi", "paper_k2v2", "query_aware_k4v2"}) {
    std::vector<head_errors> heads;
    exact.static_run(find_method(name), &heads, quiet);
    ASSERT_EQ(heads.size(), 4u) << name;
    for (std::size_t i = 0; i < heads.size(); ++i) {
      const head_errors& e = heads[i];
      EXPECT_EQ(e.layer, static_cast<int>(i) / 2);
      EXPECT_EQ(e.head, static_cast<int>(i) % 2);
      const bool four = std::string(name) == "query_aware_k4v2";
      EXPECT_LT(e.key, four ? 0.03 : 0.35) << name;
      EXPECT_GT(e.key, four ? 0.002 : 0.05) << name;
      EXPECT_LT(e.value, 0.35) << name;
      EXPECT_GT(e.value, 0.05) << name;
      EXPECT_GT(e.magnitude_share, 0) << name;
      EXPECT_LT(e.magnitude_share, 0.5) << name;
      EXPECT_GT(e.token_scale, 1e-4) << name;
      EXPECT_LT(e.token_scale, 0.2) << name;
      EXPECT_GT(e.attention_kl, 0) << name;
      EXPECT_GT(e.output, 0) << name;
    }
  }
}

TEST(Methods, NamesAndTrueBits) {
  const auto bits = [](const char* name, int head_dim) {
    return bits_per_element(find_method(name), {}, 30, head_dim, 2048);
  };
  EXPECT_EQ(bits("paper_k2v2", 128), 2.25);
  EXPECT_EQ(bits("tuned_k4v2", 128), 3.25);
  EXPECT_EQ(bits("tuned_k2v2", 64), 2.375);
  EXPECT_EQ(bits("kivi", 128), 2.25);
  EXPECT_EQ(bits("kivi_k4v2", 128), 3.25);
  EXPECT_EQ(bits("q4_0", 128), 4.5);
  EXPECT_EQ(bits("fp16", 128), 16);
  // Of 2048 tokens all keys are quantised, of the values all but 128.
  EXPECT_NEAR(bits("kivi_native", 128), 2.25 + (16 - 2.25) / 16 / 2, 1e-12);
  // 26 of 30 layers are quantised.
  EXPECT_NEAR(bits("turbo_vllm_native", 128), (26 * bits("turbo_vllm", 128) + 4 * 16) / 30, 1e-12);
  for (const std::string& name : all_method_names()) EXPECT_EQ(find_method(name).name, name);
  try {
    find_method("kiwi");
    FAIL();
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'kiwi'"), std::string::npos);
    EXPECT_NE(message.find(" query_aware_k2v2 "), std::string::npos);
    EXPECT_NE(message.find(" rotation_kivi"), std::string::npos);
  }
}

}  // namespace
