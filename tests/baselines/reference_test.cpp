// Baselines and metrics on keys, values and queries of real models, against the errors that an
// independent implementation measured (tests/data/README.md).
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "../examples/common/npy.hpp"
#include "kvarn/baselines/baselines.hpp"
#include "kvarn/metrics.hpp"

namespace {

constexpr std::size_t sink = 128;  // exact tokens before the tiles
constexpr std::size_t tail = 128;  // exact tokens behind them, whose queries are measured

const std::string data_dir = std::string(KVARN_TEST_DATA_DIR) + "/";

class Reference : public testing::TestWithParam<std::string> {};

TEST_P(Reference, BaselinesAreAsMeasuredElsewhere) {
  const std::string& head = GetParam();
  const auto keys = kvarn_examples::read_npy(data_dir + head + ".k.npy");
  const auto values = kvarn_examples::read_npy(data_dir + head + ".v.npy");
  const auto queries = kvarn_examples::read_npy(data_dir + head + ".q.npy");
  ASSERT_EQ(keys.shape.size(), 2u);
  ASSERT_EQ(values.shape, keys.shape);
  ASSERT_EQ(queries.shape.size(), 3u);
  const std::size_t tokens = keys.shape[0];
  const std::size_t head_dim = keys.shape[1];
  const std::size_t query_heads = queries.shape[1];
  ASSERT_EQ(queries.shape, (std::vector<std::size_t>{tokens, query_heads, head_dim}));

  const std::size_t body_start = sink * head_dim;
  const std::size_t body_size = (tokens - sink - tail) * head_dim;
  std::ifstream file(data_dir + "reference.json");
  const auto reference = nlohmann::json::parse(file).at(head);

  for (const std::string name : {"kivi", "rotation_kivi"}) {
    const kvarn::baseline* method = kvarn::find_baseline(name);
    ASSERT_NE(method, nullptr);
    const auto quantised = [&](kvarn::tile_kind kind, const std::vector<float>& exact) {
      auto result = exact;
      const auto body = std::span(result).subspan(body_start, body_size);
      const kvarn::baseline_settings settings{kind, 2, static_cast<int>(head_dim), 128};
      kvarn::quantize_dequantize(*method, settings, body, body).or_throw();
      return result;
    };
    const auto body_error = [&](const std::vector<float>& exact, const std::vector<float>& approx) {
      return kvarn::relative_squared_error(std::span(exact).subspan(body_start, body_size),
                                           std::span(approx).subspan(body_start, body_size));
    };
    const auto approx_keys = quantised(kvarn::tile_kind::key, keys.values);
    const auto approx_values = quantised(kvarn::tile_kind::value, values.values);
    const auto attention = kvarn::compare_attention(
        {.tokens = tokens,
         .query_heads = query_heads,
         .key_dim = head_dim,
         .value_dim = head_dim,
         .queries = std::span(queries.values).last(tail * query_heads * head_dim),
         .keys = keys.values,
         .values = values.values,
         .approx_keys = approx_keys,
         .approx_values = approx_values});

    const auto expect = [&](const char* what, double measured, double tolerance) {
      const double expected = reference.at(name).at(what).get<double>();
      const double deviation = measured / expected - 1;
      EXPECT_LE(std::abs(deviation), tolerance)
          << head << " " << name << " " << what << ": " << measured << " instead of " << expected;
      RecordProperty(name + "_" + what, std::to_string(100 * deviation) + " %");
    };
    // Codes at a tie may differ by one rounding of the rotation, hence no equality.
    expect("k_rel_sq_error", body_error(keys.values, approx_keys), 0.001);
    expect("v_rel_sq_error", body_error(values.values, approx_values), 0.001);
    expect("attention_kl", attention.kl, 0.01);
    expect("output_rel_sq_error", attention.output, 0.01);
    expect("output_rel_sq_error_v_only", attention.output_exact_keys, 0.01);
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, Reference,
                         testing::Values("smollm2-135m.layer3.head1", "smollm2-135m.layer20.head1",
                                         "qwen2.5-coder-1.5b.layer0.head0",
                                         "qwen2.5-coder-1.5b.layer14.head0"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           for (char& c : name)
                             if (c == '.' || c == '-') c = '_';
                           return name;
                         });

}  // namespace
