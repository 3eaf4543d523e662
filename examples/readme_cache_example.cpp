// The second example of README.md, and a model that feeds it random numbers.
#include <kvarn/cache/kv_cache.hpp>

// A prompt of 300 tokens, then 4 drafts on a fork, of which 2 are accepted.
template <class Model>
void serve(Model& model) {
  kvarn::cache_config config{.layers = 2, .kv_heads = 2, .query_heads = 4};  // head_dim 128
  config.page_memory = 1 << 20;  // bytes for packed tokens
  auto cache = kvarn::kv_cache<>::make(config).value();
  kvarn::cache_workspace workspace;
  const auto forward = [&](kvarn::sequence_id id, int tokens) {
    for (int layer = 0; layer < 2; ++layer) {
      model.project(layer, tokens);  // writes [tokens][heads][128] floats
      cache
          .append(id, layer, kvarn::token_major(model.keys.data(), 2, 128),
                  kvarn::token_major(model.values.data(), 2, 128), tokens)
          .or_throw();
      const kvarn::cache_queries<float, float> queries{
          kvarn::token_major<const float>(model.queries.data(), 4, 128),
          kvarn::token_major(model.attended.data(), 4, 128), tokens};
      cache.attend(id, layer, queries, {.softmax_scale = 0.088f}, workspace).or_throw();
    }
  };
  const kvarn::sequence_id prompt = cache.create().value();
  forward(prompt, 300);
  cache.commit(prompt).or_throw();
  cache.seal(prompt, 1, workspace).value();  // packs at most one group of 128 tokens

  const kvarn::sequence_id answer = cache.fork(prompt).value();  // shares all that is stored
  forward(answer, 4);
  cache.commit(answer, 2).or_throw();
  cache.truncate(answer, cache.length(answer)).or_throw();  // forgets the other two
}
// End of the example of README.md.

#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

struct random_model {
  std::mt19937 random{1};
  std::vector<float> keys, values, queries, attended;
  bool sane = true;

  void project(int, int tokens) {
    for (const float x : attended) sane = sane && std::isfinite(x) && x != 0.0f;
    std::normal_distribution<float> normal;
    const auto count = static_cast<std::size_t>(tokens) * 128;
    keys.resize(2 * count);
    values.resize(2 * count);
    queries.resize(4 * count);
    for (auto* numbers : {&keys, &values, &queries})
      for (float& x : *numbers) x = normal(random);
    attended.assign(4 * count, 0.0f);
  }
};

int main() {
  random_model model;
  serve(model);
  model.project(0, 0);
  return model.sane ? 0 : 1;
}
