#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace kvarn_engine {

sampler::sampler(const sampler_settings& settings) : settings_(settings), random_(settings.seed) {
  const auto refuse = [](const char* what, double value, const char* allowed) {
    throw std::runtime_error(std::string("sampling: ") + what + " is " + std::to_string(value) +
                             "; it must be " + allowed);
  };
  if (!(settings.temperature >= 0) || !std::isfinite(settings.temperature))
    refuse("temperature", static_cast<double>(settings.temperature), "0 or positive");
  if (settings.top_k < 0) refuse("top-k", settings.top_k, "0 or positive");
  if (!(settings.top_p > 0) || !(settings.top_p <= 1))
    refuse("top-p", static_cast<double>(settings.top_p), "above 0, at most 1");
}

int sampler::operator()(std::span<const float> logits) {
  if (std::ranges::any_of(logits, [](float x) { return std::isnan(x); }))
    throw std::runtime_error("sampling: the model's logits are not numbers (NaN)");
  const auto best = std::max_element(logits.begin(), logits.end());
  if (settings_.temperature == 0) return static_cast<int>(best - logits.begin());

  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i)
    candidates_.emplace_back(logits[i], static_cast<int>(i));
  const auto likelier = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  if (settings_.top_k > 0 && static_cast<std::size_t>(settings_.top_k) < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + settings_.top_k, candidates_.end(),
                     likelier);
    candidates_.resize(static_cast<std::size_t>(settings_.top_k));
  }
  std::sort(candidates_.begin(), candidates_.end(), likelier);

  std::vector<double> weights;
  double sum = 0;
  for (const auto& candidate : candidates_) {
    weights.push_back(std::exp(static_cast<double>(candidate.first - *best) /
                               static_cast<double>(settings_.temperature)));
    sum += weights.back();
  }
  double kept = 0;
  std::size_t count = 0;
  while (count < weights.size() &&
         (count == 0 || kept < static_cast<double>(settings_.top_p) * sum))
    kept += weights[count++];

  // Not std::discrete_distribution, whose results differ between standard libraries.
  const double uniform = static_cast<double>(random_() >> 11) * 0x1p-53;
  double left = uniform * kept;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (left < weights[i]) return candidates_[i].second;
    left -= weights[i];
  }
  return candidates_[count - 1].second;
}

}  // namespace kvarn_engine
