// A short form of what kvarn-eval measures: a real model on 512 tokens of English prose. Bounds
// hold from both sides. They are wide: the last bit of a product (other compilers, other
// instruction sets) changes some codes. Between -O1 and -O3 the agreement of `paper` moved from
// 0.820 to 0.862.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "../../examples/engine/gguf.hpp"
#include "../../examples/engine/model_file.hpp"
#include "../../examples/engine/tokenizer.hpp"
#include "../../tools/eval/evaluate.hpp"
#include "../../tools/eval/statistics.hpp"
#include "../../tools/eval/windows.hpp"

namespace {

using namespace kvarn_eval;

TEST(Quality, OfMethodsOnARealModel) {
  const auto path = std::filesystem::path(KVARN_MODEL_DIR) / "SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "no model: run tools/fetch-model.sh";
  const auto file = kvarn_engine::gguf_file::open(path.string()).value();
  const auto vocabulary = kvarn_engine::tokenizer::from_gguf(file).value();
  const auto text = kvarn_engine::read_text(KVARN_TEST_DATA_DIR "/opticks.txt").value();
  const auto windows = windows_at(vocabulary, text, {0}, 512);
  const auto weights = kvarn_engine::load_model(file);
  const kvarn_examples::thread_pool pool(2);
  kvarn_engine::transformer model(weights, pool);
  const progress quiet = [](double) {};
  const layout stored{.sink = 64, .group = 64};
  exact_run exact(model, stored, windows[0].tokens, 128, pool, quiet);
  EXPECT_NEAR(std::exp(mean(exact.nll())), 20.350, 0.02);

  struct expected {
    const char* name;
    double kl;
    double top1;
  };
  for (const expected& e :
       {expected{"kivi", 0.160, 0.812}, expected{"paper_k2v2", 0.110, 0.862},
        expected{"tuned_k2v2", 0.056, 0.880}, expected{"query_aware_k2v2", 0.033, 0.901}}) {
    const summary s = summarize(exact.pseudo_decode(find_method(e.name), quiet), exact.nll());
    EXPECT_EQ(s.positions, 383u);
    EXPECT_GT(s.kl_mean, 0.7 * e.kl) << e.name;
    EXPECT_LT(s.kl_mean, 1.35 * e.kl) << e.name;
    EXPECT_NEAR(s.top1, e.top1, 0.06) << e.name;
  }
}

}  // namespace
