// An evaluation of a tiny random model that is stopped and goes on: what is there is not computed
// again, what is missing is, and the report is that of one that was never stopped.
#include "../../tools/eval/resume.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../engine/tiny_model.hpp"

namespace {

using namespace kvarn_eval;

class Resumed : public testing::Test {
 protected:
  static constexpr int tokens = 200;  // sink of 64, two groups of 64, 8 in the tail
  void SetUp() override { std::filesystem::remove_all(folder); }
  void TearDown() override { std::filesystem::remove_all(folder); }

  // What is missing before, and all after.
  evaluation evaluate(const request& wanted, int missing) {
    const result_folder files(folder);
    window_runs runs(wanted, windows, files);
    EXPECT_EQ(runs.total(), 8);
    EXPECT_EQ(runs.missing(), missing);
    evaluation all = runs.finish(model, pool);
    EXPECT_EQ(runs.missing(), 0);
    return all;
  }
  std::filesystem::path file_of(const std::string& name) const {
    return folder / "windows" / (name + ".json");
  }
  // A result with another KL at its first position, as no run gives it.
  void mark(const std::string& name) {
    auto j = nlohmann::ordered_json::parse(std::ifstream(file_of(name)));
    j["kl"][0] = 1000;
    std::ofstream(file_of(name)) << j.dump();
  }
  static bool is_marked(const method_result& r) { return r.pseudo_decode.kl[0] == 1000.0f; }
  // Without the times.
  static std::string report_of(evaluation all) {
    for (auto& results : all.results)
      for (method_result& r : results) r.seconds = 0;
    return to_json(all).dump(1);
  }

  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() /
      ("kvarn_resumed_" +
       std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
  const kvarn_examples::thread_pool pool{2};
  const kvarn_engine::model_weights weights = kvarn_test::tiny_model("llama");
  kvarn_engine::transformer model{weights, pool};
  const std::vector<window> windows{
      {"t0", kvarn_test::random_tokens(tokens, weights.config.vocabulary, 1)},
      {"t200", kvarn_test::random_tokens(tokens, weights.config.vocabulary, 2)}};
  // Runs: per window one exact, two of methods, one static.
  const request wanted{.model = {{"model", "tiny"}, {"model_hash", "1"}},
                       .text = "random",
                       .window = tokens,
                       .stored = {.sink = 64, .group = 64},
                       .first_scored = 128,
                       .methods = {find_method("kivi"), find_method("tuned_k2v2")},
                       .static_methods = {"kivi"}};
};

TEST_F(Resumed, RunsWhatIsMissingOnly) {
  const std::string report = report_of(evaluate(wanted, 8));
  EXPECT_EQ(report_of(evaluate(wanted, 0)), report);

  std::filesystem::remove(file_of("t200.tuned_k2v2"));
  EXPECT_EQ(report_of(evaluate(wanted, 2)), report);  // with the exact run to compare with

  mark("t0.kivi");
  mark("t200.kivi");
  std::filesystem::remove(file_of("t0.exact"));
  std::filesystem::resize_file(file_of("t200.kivi"), 100);
  const evaluation all = evaluate(wanted, 1 + 3);
  EXPECT_TRUE(is_marked(all.results[0][0]));
  EXPECT_FALSE(is_marked(all.results[0][1]));
}

TEST_F(Resumed, AStaticRunIsAddedToWhatIsThere) {
  request plain = wanted;
  plain.static_methods = {};
  {
    const result_folder files(folder);
    const evaluation all = window_runs(plain, windows, files).finish(model, pool);
    EXPECT_TRUE(all.results[0][0].static_kl.empty());
  }
  mark("t0.kivi");
  const evaluation all = evaluate(wanted, 4);
  EXPECT_TRUE(is_marked(all.results[0][0]));
  for (const method_result& r : all.results[0]) {
    EXPECT_EQ(r.static_kl.size(), 71u);
    EXPECT_EQ(r.heads.size(), 4u);
  }
  EXPECT_TRUE(all.results[1][0].static_kl.empty());
}

TEST_F(Resumed, NotWithAnotherModelOfThatName) {
  evaluate(wanted, 8);
  request other = wanted;
  other.model["model_hash"] = "2";
  const result_folder files(folder);
  files.save_retrieval("lines20.kivi", {{"model", "tiny"}, {"sink", 64}, {"group", 64}}, {});
  const auto refusal = [&](const auto& open) -> std::string {
    try {
      open();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(refusal([&] {
              window_runs(other, windows, files);
            }).find("model_hash is \"1\" there, \"2\" here"),
            std::string::npos);
  // As an older version stored it.
  EXPECT_NE(refusal([&] {
              retrieval_runs(wanted, {20}, files);
            }).find("model_hash is missing there, \"1\" here"),
            std::string::npos);
}

TEST_F(Resumed, NoNumberOfLinesCountsTwice) {
  const result_folder files(folder);
  EXPECT_NO_THROW(retrieval_runs(wanted, {20, 40}, files));
  try {
    retrieval_runs(wanted, {20, 40, 20}, files);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(),
                 "line retrieval: 20 lines are given twice; each number may be given once");
  }
}

TEST_F(Resumed, FreshForgetsAndComputesAgain) {
  const std::string report = report_of(evaluate(wanted, 8));
  mark("t0.kivi");
  mark("t200.tuned_k2v2");
  request fresh = wanted;
  fresh.fresh = true;
  EXPECT_EQ(report_of(evaluate(fresh, 8)), report);
  fresh.methods = {find_method("tuned_k2v2")};
  fresh.static_methods = {};
  mark("t0.kivi");
  {
    const result_folder files(folder);
    EXPECT_EQ(window_runs(fresh, windows, files).missing(), 4);
  }
  evaluate(wanted, 4);  // of kivi all was left
}

}  // namespace
