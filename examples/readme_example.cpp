// The example of README.md, and a main that feeds it random numbers and compares its output with
// attention on the numbers themselves.
#include <kvarn/kvarn.hpp>

#include <cmath>
#include <cstddef>
#include <vector>

// Packs 128 keys and values of one KV head, then attends to them from 4 query heads.
void attend_packed(const float* keys, const float* values, const float* queries, float* out) {
  const kvarn::cache_format format{.key_bits = 2, .value_bits = 2};  // head_dim 128, groups of 128
  std::vector<std::byte> page(format.page_bytes(1));
  std::byte* const key_record = page.data() + format.key_offset(0);
  std::byte* const value_record = page.data() + format.value_offset(0);

  auto key_encoder = kvarn::tile_encoder::make(format.key_layout()).value();  // throws if invalid
  auto value_encoder = kvarn::tile_encoder::make(format.value_layout()).value();
  key_encoder(kvarn::tokens_view<const float>{keys, 128}, key_record);
  value_encoder(kvarn::tokens_view<const float>{values, 128}, value_record);

  const kvarn::sealed_group group{key_record, value_record, 0, 128};  // tokens 0 to 127
  kvarn::attention_memory<float> memory;
  memory.format = format;
  memory.sealed = {&group, 1};
  const kvarn::attention_queries<float> query{{queries, 128}, 1, 4, 127};  // at position 127
  std::vector<float> workspace(kvarn::attention_workspace(format));
  kvarn::attend(query, memory, {.softmax_scale = 1.0f / std::sqrt(128.0f)},
                kvarn::tokens_view<float>{out, 128}, nullptr, workspace.data());
}
// End of the example of README.md.

#include <cstdio>
#include <kvarn/metrics.hpp>
#include <random>

// The same attention with keys and values kept exact; rotates both in place.
void attend_exact(float* keys, float* values, const float* queries, float* out) {
  kvarn::hadamard(keys, 128, 128, 128);
  kvarn::hadamard(values, 128, 128, 128);
  kvarn::attention_memory<float> memory;
  memory.tail = {{keys, 128}, {values, 128}, 0, 128};
  const kvarn::attention_queries<float> query{{queries, 128}, 1, 4, 127};
  std::vector<float> workspace(kvarn::attention_workspace(memory.format));
  kvarn::attend(query, memory, {.softmax_scale = 1.0f / std::sqrt(128.0f)},
                kvarn::tokens_view<float>{out, 128}, nullptr, workspace.data());
}

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> keys(128 * 128), values(128 * 128), queries(4 * 128);
  for (auto* numbers : {&keys, &values, &queries})
    for (float& x : *numbers) x = normal(random);

  std::vector<float> packed(4 * 128), exact(4 * 128);
  attend_packed(keys.data(), values.data(), queries.data(), packed.data());
  attend_exact(keys.data(), values.data(), queries.data(), exact.data());
  const double error = kvarn::relative_squared_error(exact, packed);
  std::printf("relative squared error of the attention output: %.3f\n", error);
  return error > 0.2 && error < 0.4 ? 0 : 1;  // random numbers without structure: the worst case
}
