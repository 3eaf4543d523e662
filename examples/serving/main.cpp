// kvarn-serving: a toy serving loop. Requests arrive at random; prompts are prefilled in chunks
// beside sequences that decode, with speculative drafts of which some tokens are rejected; some
// requests ask for two answers and fork. Prints the memory of the cache beside that of FP16, and
// tokens in flight.
//
// Shows how an engine uses the cache: when to append, attend, commit, seal, truncate, fork and
// free, and what to do when pages run out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvarn/cache/kv_cache.hpp"
#include "recorded_model.hpp"

namespace {

using kvarn_serving::recorded_model;

constexpr int prefill_chunk = 96;
constexpr int drafted = 3;  // tokens behind the certain one
constexpr int longest_prompt = 500;
constexpr int longest_answer = 240;
constexpr int steps = 400;

struct request {
  int prompt;
  int answer;
  bool two_answers;
};

struct running {
  request wanted;
  kvarn::sequence_id id;
};

class server {
 public:
  explicit server(const recorded_model& model)
      : model_(model), cache_(kvarn::kv_cache<>::make(configuration(model)).value()) {}

  void run() {
    std::printf("%5s %8s %8s %8s %12s %12s %7s\n", "step", "waiting", "running", "tokens",
                "cache bytes", "FP16 bytes", "ratio");
    for (int step = 1; step <= steps || !running_.empty() || !waiting_.empty(); ++step) {
      if (step <= steps && random_() % 8 == 0) arrive();
      admit();
      advance_all();
      if (step % 50 == 0) report(step);
    }
    std::printf("\n%d requests, %d answers, %d forks, %d preempted\n", arrived_, answers_, forks_,
                preempted_);
    std::printf("%lld tokens committed, %lld drafted tokens rejected, %lld tiles sealed\n",
                static_cast<long long>(committed_), static_cast<long long>(rejected_),
                static_cast<long long>(sealed_));
  }

 private:
  static kvarn::cache_config configuration(const recorded_model& model) {
    kvarn::cache_config config;
    config.layers = model.layers();
    config.kv_heads = 1;
    config.query_heads = model.query_heads();
    config.format.key_head_dim = config.format.value_head_dim = model.head_dim();
    config.format.group = 64;
    config.sink = 32;
    config.tail = drafted;  // rejected drafts never reach a sealed page
    config.page_count = 48;
    config.max_sequences = 24;
    return config;
  }

  void arrive() {
    const auto between = [this](int low, int high) {
      return std::uniform_int_distribution(low, high)(random_);
    };
    waiting_.push_back(
        {between(100, longest_prompt), between(40, longest_answer), random_() % 4 == 0});
    ++arrived_;
  }

  // Starts requests while their prompts fit into the pages that are free.
  void admit() {
    while (!waiting_.empty()) {
      std::int64_t pages = cache_.free_pages();
      for (const running& r : running_)
        pages -= cache_.sealable(
            r.id, (std::max)(std::int64_t{0}, r.wanted.prompt - cache_.length(r.id)));
      if (waiting_.front().prompt / cache_.table().group() + 1 > pages) return;
      const auto id = cache_.create();
      if (!id.ok()) return;  // max_sequences
      running_.push_back({waiting_.front(), id.value()});
      waiting_.pop_front();
    }
  }

  void advance_all() {
    for (std::size_t i = 0; i < running_.size();) {
      if (!advance(i)) continue;  // it is gone
      ++i;
    }
  }

  // One step of one sequence. False if it has left the list.
  bool advance(std::size_t i) {
    const kvarn::sequence_id id = running_[i].id;
    const int prompt = running_[i].wanted.prompt;
    const int end = prompt + running_[i].wanted.answer;
    const auto length = static_cast<int>(cache_.length(id));
    const bool prefill = length < prompt;
    const int tokens = prefill ? (std::min)(prefill_chunk, prompt - length)
                               : (std::min)(1 + drafted, end - length);
    forward(id, length, tokens);

    // A prompt is certain. Of a draft the first token is, each other with 70 percent.
    int accepted = prefill ? tokens : 1;
    while (!prefill && accepted < tokens && random_() % 10 < 7) ++accepted;
    cache_.commit(id, accepted).or_throw();
    cache_.truncate(id, length + accepted).or_throw();
    committed_ += accepted;
    rejected_ += tokens - accepted;

    if (length + accepted == end) {
      cache_.free(id).or_throw();
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      ++answers_;
      return false;
    }
    if (prefill && length + accepted == prompt && running_[i].wanted.two_answers) {
      const auto second = cache_.fork(id);
      if (second.ok()) {
        running_.push_back({running_[i].wanted, second.value()});
        ++forks_;
      }
    }
    return seal(i);
  }

  // What a model does with some tokens: each layer stores them and attends.
  void forward(kvarn::sequence_id id, int position, int tokens) {
    const int heads = model_.query_heads();
    out_.resize(static_cast<std::size_t>(tokens) *
                static_cast<std::size_t>(heads * model_.head_dim()));
    const kvarn::attention_options options{
        .softmax_scale = 1.0f / std::sqrt(static_cast<float>(model_.head_dim()))};
    for (int layer = 0; layer < model_.layers(); ++layer) {
      cache_.append(id, layer, model_.keys(layer, position), model_.values(layer, position), tokens)
          .or_throw();
      const kvarn::cache_queries<float, float> queries{
          model_.queries(layer, position),
          kvarn::token_major(out_.data(), heads, model_.head_dim()), tokens};
      cache_.attend(id, layer, queries, options, workspace_).or_throw();
    }
  }

  // At most two groups a step, so that no step is long. Out of pages, the youngest sequence starts
  // again later. False if that is the sequence itself.
  bool seal(std::size_t i) {
    const kvarn::sequence_id id = running_[i].id;
    for (;;) {
      const auto sealed = cache_.seal(id, 2, workspace_);
      if (sealed.ok()) {
        sealed_ += sealed.value();
        return true;
      }
      if (sealed.why().code() != kvarn::error_code::short_buffer) sealed.why().or_throw();
      const running youngest = running_.back();
      running_.pop_back();
      cache_.free(youngest.id).or_throw();
      waiting_.push_front({youngest.wanted.prompt, youngest.wanted.answer, false});
      ++preempted_;
      if (youngest.id == id) return false;
    }
  }

  void report(int step) const {
    std::int64_t tokens = 0;
    for (const running& r : running_) tokens += cache_.length(r.id);
    // What is in use: exact rows and the pages that are taken; free pages wait for others.
    const auto taken = static_cast<std::size_t>(cache_.table().page_count() - cache_.free_pages());
    std::size_t page = 0;
    for (int layer = 0; layer < model_.layers(); ++layer)
      page += cache_.storage().page_bytes(layer);
    const std::size_t bytes = cache_.memory().exact + taken * page;
    const std::size_t fp16 = static_cast<std::size_t>(tokens) * cache_.exact_token_bytes();
    std::printf("%5d %8zu %8zu %8lld %12zu %12zu %7.2f\n", step, waiting_.size(), running_.size(),
                static_cast<long long>(tokens), bytes, fp16,
                static_cast<double>(fp16) / static_cast<double>((std::max)(bytes, std::size_t{1})));
  }

  const recorded_model& model_;
  kvarn::kv_cache<> cache_;
  kvarn::cache_workspace workspace_;
  std::vector<float> out_;
  std::deque<request> waiting_;
  std::vector<running> running_;
  std::mt19937 random_{7};
  int arrived_ = 0, answers_ = 0, forks_ = 0, preempted_ = 0;
  std::int64_t committed_ = 0, rejected_ = 0, sealed_ = 0;
};

}  // namespace

int main() try {
  const recorded_model model(KVARN_SERVING_DATA_DIR,
                             {"smollm2-135m.layer3.head1", "smollm2-135m.layer20.head1"});
  if (model.tokens() < longest_prompt + longest_answer)
    throw std::runtime_error("the recordings have " + std::to_string(model.tokens()) +
                             " tokens; requests need " +
                             std::to_string(longest_prompt + longest_answer));
  server(model).run();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "kvarn-serving: %s\n", error.what());
  return 1;
}
