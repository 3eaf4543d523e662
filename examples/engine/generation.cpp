#include "generation.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <stdexcept>
#include <string>

#include "kvarn/codec/encoder.hpp"

namespace kvarn_engine {

namespace {

// Adds what passes between its construction and stop() to a timing.
class stopwatch {
 public:
  explicit stopwatch(const transformer& model)
      : model_(model),
        start_(std::chrono::steady_clock::now()),
        attention_(model.attention_seconds()),
        commit_(model.commit_seconds()) {}

  void stop(timing& t, std::size_t tokens) const {
    t.tokens += tokens;
    t.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    t.attention += model_.attention_seconds() - attention_;
    t.commit += model_.commit_seconds() - commit_;
  }

 private:
  const transformer& model_;
  std::chrono::steady_clock::time_point start_;
  double attention_;
  double commit_;
};

comparison::times times_of(std::vector<double> seconds) {
  std::ranges::sort(seconds);
  return {seconds[seconds.size() / 2], seconds.front()};
}

}  // namespace

generation_times generate(transformer& model, std::span<const int> prompt, int chunk, int most,
                          sampler& draw, kv_memory& memory, const std::function<bool(int)>& take) {
  const auto width = static_cast<std::size_t>(model.config().hidden);
  std::vector<float> hidden(width);
  std::vector<float> logits(static_cast<std::size_t>(model.config().vocabulary));
  generation_times times;

  const stopwatch prefill(model);
  model.prefill(prompt, chunk, memory, [&](std::size_t, std::span<const float> states) {
    std::ranges::copy(states.last(width), hidden.begin());
  });
  prefill.stop(times.prefill, prompt.size());

  for (int i = 0; i < most; ++i) {
    const stopwatch decode(model);
    model.logits(hidden.data(), 1, logits.data());
    const int token = draw(logits);
    if (!take(token)) break;
    if (i + 1 < most) model.advance(std::span(&token, 1), memory, hidden.data());
    decode.stop(times.decode, 1);
  }
  return times;
}

std::string cache_names() {
  std::string names = "exact";
  for (const kvarn::encoder_info& known : kvarn::encoder_infos)
    names.append(&known + 1 == std::end(kvarn::encoder_infos) ? " and " : ", ").append(known.name);
  return names;
}

cache_choice parse_cache(const std::string& name, const std::string& bits) {
  cache_choice choice;
  if (name == "exact") {
    choice.bits = kvarn::exact_layer;
    return choice;
  }
  const auto* const info =
      std::ranges::find(kvarn::encoder_infos, name, &kvarn::encoder_info::name);
  if (info == std::end(kvarn::encoder_infos))
    throw std::runtime_error("cache is '" + name + "'; allowed are " + cache_names());
  choice.method = info->id;
  const auto is_width = [](char c) { return c >= '2' && c <= '4'; };
  if (bits.size() != 4 || bits[0] != 'k' || bits[2] != 'v' || !is_width(bits[1]) ||
      !is_width(bits[3]))
    throw std::runtime_error("bits are '" + bits +
                             "'; allowed is kXvY with X and Y 2, 3 or 4, for example k2v2");
  choice.bits = {bits[1] - '0', bits[3] - '0'};
  return choice;
}

std::string chat_prompt(const std::string& system, const std::string& question) {
  std::string prompt;
  if (!system.empty()) prompt += "<|im_start|>system\n" + system + "<|im_end|>\n";
  return prompt + "<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n";
}

comparison compare_decoding(transformer& model, std::span<const int> tokens, kv_memory& first,
                            kv_memory& second) {
  std::vector<float> hidden(static_cast<std::size_t>(model.config().hidden));
  std::vector<float> logits(static_cast<std::size_t>(model.config().vocabulary));
  std::vector<double> seconds[2], attention[2];
  for (const int token : tokens)
    for (int i = 0; i < 2; ++i) {
      const stopwatch watch(model);
      model.advance(std::span(&token, 1), i == 0 ? first : second, hidden.data());
      model.logits(hidden.data(), 1, logits.data());
      timing t;
      watch.stop(t, 1);
      seconds[i].push_back(t.seconds);
      attention[i].push_back(t.attention);
    }
  comparison result;
  for (int i = 0; i < 2; ++i) {
    result.token[i] = times_of(seconds[i]);
    result.attention[i] = times_of(attention[i]);
  }
  return result;
}

}  // namespace kvarn_engine
