// Line retrieval: can a model still read one line of many out of its cache?
//
// The context is a sentence and lines of a name and a random number of five digits; each question
// repeats the name of one line, and the model has to go on with its digits (greedily,
// all five right). Written as plain text, so that a model needs no instructions for it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../../examples/engine/tokenizer.hpp"
#include "evaluate.hpp"

namespace kvarn_eval {

struct retrieval_result {
  int lines = 0;
  int tokens = 0;     // of the context
  int questions = 0;  // about lines at equal distances
  int right = 0;
  double nll = 0;  // mean -log probability of a right answer, nats
};

// There are names for so many lines.
int most_retrieval_lines();

// 20, 40, 80 ... and the most lines that a context of so many tokens holds, or that there are names
// for.
std::vector<int> retrieval_sizes(const kvarn_engine::tokenizer& vocabulary, int context);

// `m`: null for exact rows. The same text for every method. Throws std::runtime_error unless lines
// are 1 to most_retrieval_lines().
retrieval_result run_retrieval(kvarn_engine::transformer& model,
                               const kvarn_engine::tokenizer& vocabulary, const layout& l,
                               const method* m, int lines, const kvarn_examples::thread_pool& pool,
                               const progress& report);

nlohmann::ordered_json to_json(const retrieval_result& result);
retrieval_result retrieval_of(const nlohmann::ordered_json& json);

}  // namespace kvarn_eval
