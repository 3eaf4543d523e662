#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace kvarn_eval {

double mean(std::span<const float> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double percentile(std::vector<float> values, double percent) {
  // NaN has no place in an order.
  if (!std::ranges::all_of(values, [](float x) { return std::isfinite(x); }))
    return std::numeric_limits<double>::quiet_NaN();
  std::ranges::sort(values);
  const double at = percent / 100 * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = (std::min)(below + 1, values.size() - 1);
  const double part = at - static_cast<double>(below);
  return (1 - part) * static_cast<double>(values[below]) +
         part * static_cast<double>(values[above]);
}

summary summarize(const token_scores& scores, std::span<const float> exact_nll) {
  const auto count = static_cast<double>(scores.kl.size());
  return {.positions = scores.kl.size(),
          .kl_mean = mean(scores.kl),
          .kl_median = percentile(scores.kl, 50),
          .kl_p99 = percentile(scores.kl, 99),
          .kl_max = percentile(scores.kl, 100),
          .top1 = static_cast<double>(std::ranges::count(scores.agrees, char{1})) / count,
          .perplexity = std::exp(mean(scores.nll)),
          .exact_perplexity = std::exp(mean(exact_nll))};
}

token_scores part_of(const token_scores& scores, std::size_t first, std::size_t count) {
  const auto cut = [&](const auto& all) {
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(first);
    return std::vector(from, from + static_cast<std::ptrdiff_t>(count));
  };
  return {cut(scores.kl), cut(scores.nll), cut(scores.agrees)};
}

void append(token_scores& scores, const token_scores& more) {
  const auto add = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  add(scores.kl, more.kl);
  add(scores.nll, more.nll);
  add(scores.agrees, more.agrees);
}

}  // namespace kvarn_eval
