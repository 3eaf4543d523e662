#include "retrieval.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>

#include "../../examples/engine/dense.hpp"
#include "json_number.hpp"

namespace kvarn_eval {

namespace {

constexpr int most_questions = 20;
constexpr int fewest_lines = 20;

// Lines have names of two words: models that find a word again may still not find a number.
constexpr std::array adjectives{"amber", "brave", "calm",  "dusty", "eager",  "fancy",  "gentle",
                                "happy", "icy",   "jolly", "kind",  "lucky",  "mighty", "noble",
                                "odd",   "proud", "quiet", "rapid", "silver", "tidy",   "upper",
                                "vivid", "wild",  "young", "zesty", "blue"};
constexpr std::array nouns{"apple",  "bridge", "castle", "dragon", "engine",  "forest", "garden",
                           "hammer", "island", "jacket", "kettle", "lantern", "mirror", "needle",
                           "orchid", "pencil", "queen",  "river",  "shadow",  "table",  "uncle",
                           "valley", "window", "yard",   "zebra",  "cloud"};
constexpr int most_lines = static_cast<int>(adjectives.size() * nouns.size());

struct line_text {
  std::string context;
  std::vector<std::string> names;
  std::vector<std::string> codes;

  std::string question(int line) const {
    return "\nOne of the lines again:\n" + names[static_cast<std::size_t>(line)] + ":";
  }
};

line_text make_lines(int lines) {
  std::mt19937 random(static_cast<unsigned>(lines));
  line_text text;
  text.context = "Here is a list of names. Behind each name stands its number of five digits.\n\n";
  std::vector<std::size_t> order(static_cast<std::size_t>(most_lines));
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
  for (int i = 0; i < lines; ++i) {
    text.codes.push_back(std::to_string(10000 + random() % 90000));
    const std::size_t name = order[static_cast<std::size_t>(i)];
    text.names.push_back(std::string("The ") + adjectives[name / nouns.size()] + " " +
                         nouns[name % nouns.size()]);
    text.context += text.names.back() + ": " + text.codes.back() + "\n";
  }
  return text;
}

std::vector<int> encode(const kvarn_engine::tokenizer& vocabulary, const std::string& text) {
  return vocabulary.encode(text, false).value();
}

// Tokens of a context, the last of its questions and the answer.
int tokens_of(const kvarn_engine::tokenizer& vocabulary, int lines) {
  const line_text text = make_lines(lines);
  const auto asked = text.question(lines - 1) + " " + text.codes.back();
  return static_cast<int>(encode(vocabulary, text.context + asked).size());
}

}  // namespace

int most_retrieval_lines() { return most_lines; }

std::vector<int> retrieval_sizes(const kvarn_engine::tokenizer& vocabulary, int context) {
  if (tokens_of(vocabulary, fewest_lines) > context)
    throw std::runtime_error("line retrieval: " + std::to_string(fewest_lines) +
                             " lines do not fit a context of " + std::to_string(context) +
                             " tokens");
  std::vector<int> sizes{fewest_lines};
  const auto fits = [&](int lines) {
    return lines <= most_lines && tokens_of(vocabulary, lines) <= context;
  };
  while (fits(2 * sizes.back())) sizes.push_back(2 * sizes.back());
  // The longest that fits, to 10 lines.
  int most = sizes.back();
  for (int step = most / 20 * 10; step >= 10; step = step / 20 * 10)
    while (fits(most + step)) most += step;
  if (most > sizes.back()) sizes.push_back(most);
  return sizes;
}

retrieval_result run_retrieval(kvarn_engine::transformer& model,
                               const kvarn_engine::tokenizer& vocabulary, const layout& l,
                               const method* m, int lines, const kvarn_examples::thread_pool& pool,
                               const progress& report) {
  if (lines < 1 || lines > most_lines)
    throw std::runtime_error("line retrieval: " + std::to_string(lines) +
                             " lines; allowed are 1 to " + std::to_string(most_lines));
  const line_text text = make_lines(lines);
  const std::vector<int> context = encode(vocabulary, text.context);
  retrieval_result result{.lines = lines,
                          .tokens = static_cast<int>(context.size()),
                          .questions = (std::min)(lines, most_questions)};
  const auto memory =
      make_memory(model.config(), l, m, tokens_of(vocabulary, lines) + l.group, nullptr, pool);
  model.prefill(context, l.group, *memory, [&](std::size_t first, std::span<const float>) {
    report(static_cast<double>(first) / static_cast<double>(context.size()));
  });

  const int size = model.config().vocabulary;
  const auto width = static_cast<std::size_t>(model.config().hidden);
  for (int i = 0; i < result.questions; ++i) {
    const int line = (2 * i + 1) * lines / (2 * result.questions);
    const std::string question = text.question(line);
    const std::size_t asked = encode(vocabulary, question).size();
    const std::vector<int> tokens =
        encode(vocabulary, question + " " + text.codes[static_cast<std::size_t>(line)]);
    std::vector<float> hidden(tokens.size() * width);
    model.forward(tokens, *memory, hidden.data());
    memory->discard();
    // Decoding greedily gives the answer if each of its tokens is the most likely one behind those
    // before it.
    const std::size_t answer = tokens.size() - asked;
    std::vector<float> logits(answer * static_cast<std::size_t>(size));
    model.logits(hidden.data() + (asked - 1) * width, static_cast<int>(answer), logits.data());
    bool right = true;
    for (std::size_t t = 0; t < answer; ++t) {
      const float* const row = logits.data() + t * static_cast<std::size_t>(size);
      const int wanted = tokens[asked + t];
      const auto sum = kvarn_engine::log_softmax(row, size);
      right = right && sum.best == wanted;
      result.nll += (sum.log_sum - static_cast<double>(row[wanted])) / result.questions;
    }
    result.right += right ? 1 : 0;
  }
  return result;
}

nlohmann::ordered_json to_json(const retrieval_result& r) {
  return {{"lines", r.lines},
          {"tokens", r.tokens},
          {"questions", r.questions},
          {"right", r.right},
          {"nll", r.nll}};
}

retrieval_result retrieval_of(const nlohmann::ordered_json& j) {
  return {j.at("lines"), j.at("tokens"), j.at("questions"), j.at("right"), number_of(j.at("nll"))};
}

}  // namespace kvarn_eval
