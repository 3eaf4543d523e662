// One window of text through a model, with an exact memory and with each method; what changes.
//
// Pseudo-decode: the tokens are fed a group at a time. Attention sees the sink and the current
// group exactly, earlier groups as the method stores them; a group is quantised once, from keys and
// values that were computed with the quantised past, so that errors accumulate as in generation.
// Static: the same, but the keys and values that are stored are those of the exact run.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "../../examples/engine/transformer.hpp"
#include "method.hpp"
#include "row_store.hpp"

namespace kvarn_eval {

// Of the next-token distribution at each scored position of a window.
struct token_scores {
  std::vector<float> kl;     // KL(exact || method), nats
  std::vector<float> nll;    // -log probability of the token that follows, nats
  std::vector<char> agrees;  // whether the most likely token is that of the exact run
};

// One KV head in the static run, over its quantised tokens. Definitions: kvarn/metrics.hpp.
struct head_errors {
  int layer = 0;
  int head = 0;
  double key = 0;  // relative squared errors
  double value = 0;
  double magnitude_share = 0;  // sum E_M / sum E_T of keys
  double token_scale = 0;      // mean of | |k^| / |k| - 1 | over tokens
  double attention_kl = 0;     // nats, of the last queries
  double output = 0;           // relative squared error of their attention output
};

using progress = std::function<void(double done)>;  // 0 to 1

// The exact run of one window.
class exact_run {
 public:
  // Positions from `first_scored` on are scored. The model and the pool must outlive it.
  exact_run(kvarn_engine::transformer& model, const layout& l, std::vector<int> tokens,
            int first_scored, const kvarn_examples::thread_pool& pool, const progress& report);

  int scored() const { return static_cast<int>(tokens_.size()) - 1 - first_scored_; }
  int first_scored() const { return first_scored_; }
  // -log probability of the token behind each scored position.
  const std::vector<float>& nll() const { return nll_; }
  // The same of the positions before them.
  const std::vector<float>& skipped_nll() const { return skipped_nll_; }
  const recording& rows() const { return store_->rows(); }

  token_scores pseudo_decode(const method& m, const progress& report);
  // Errors of heads too unless `heads` is null.
  token_scores static_run(const method& m, std::vector<head_errors>* heads, const progress& report);

 private:
  token_scores score(measured_memory& memory, const progress& report);
  std::vector<head_errors> errors_of_heads(const measured_memory& memory) const;

  kvarn_engine::transformer* model_;
  layout layout_;
  std::vector<int> tokens_;
  int first_scored_;
  const kvarn_examples::thread_pool* pool_;
  std::unique_ptr<row_store> store_;
  std::vector<float> hidden_;  // [tokens][hidden]
  std::vector<float> nll_, skipped_nll_;
};

// The memory that a method stores a window in, null: exact rows; `stored` as in row_store.
std::unique_ptr<measured_memory> make_memory(const kvarn_engine::model_config& model,
                                             const layout& l, const method* m, int most_tokens,
                                             const recording* stored,
                                             const kvarn_examples::thread_pool& pool);

}  // namespace kvarn_eval
