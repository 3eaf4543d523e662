// Means, percentiles and what else is said of the scores of many positions.
#pragma once

#include <span>
#include <vector>

#include "evaluate.hpp"

namespace kvarn_eval {

struct summary {
  std::size_t positions = 0;
  double kl_mean = 0;
  double kl_median = 0;
  double kl_p99 = 0;
  double kl_max = 0;
  double top1 = 0;              // share of positions where the most likely token is the same
  double perplexity = 0;        // exp of the mean of nll
  double exact_perplexity = 0;  // the same of the exact run
};

// Of `scores` and the -log probabilities of the exact run at the same positions.
// Precondition: not empty.
summary summarize(const token_scores& scores, std::span<const float> exact_nll);

// The positions first .. first + count - 1.
token_scores part_of(const token_scores& scores, std::size_t first, std::size_t count);

// Appends the positions of another window.
void append(token_scores& scores, const token_scores& more);

// The value below which `percent` of the values lie, by linear interpolation between neighbours;
// NaN where one of them is not finite. Precondition: not empty.
double percentile(std::vector<float> values, double percent);

double mean(std::span<const float> values);

}  // namespace kvarn_eval
