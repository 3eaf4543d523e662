// Attention over encoded tiles of real models against the softmax over the decoded tiles.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "attention/scene.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::operand_precision;
using kvarn::tile_kind;
using namespace kvarn_test;

struct error_of_head {
  double output;  // root of the summed squared errors over that of the outputs
  double lse;     // largest, nats
};

// The last 32 tokens' queries over sink, four tiles and tail, as reference.json has them.
error_of_head measure(const real_head& head, kvarn::encoder method, operand_precision precision) {
  const int dim = head.head_dim;
  const int tokens = static_cast<int>(head.keys.shape[0]);
  const int tail = real_sink + real_tiles * 128;
  const kvarn::cache_format format{.key_head_dim = dim, .value_head_dim = dim};

  // Everything rotated in double; sink and tail stored as floats.
  const auto rotated = [&](const std::vector<float>& numbers) -> oracle::matrix {
    using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const auto rows = static_cast<Eigen::Index>(numbers.size()) / dim;
    return Eigen::Map<const float_matrix>(numbers.data(), rows, dim).cast<double>() *
           oracle::hadamard(dim);
  };
  oracle::matrix keys = rotated(head.keys.values).cast<float>().cast<double>();
  oracle::matrix values = rotated(head.values.values).cast<float>().cast<double>();
  const auto floats = [](const oracle::matrix& m) {
    return std::vector<float>(m.data(), m.data() + m.size());
  };
  const auto exact_keys = floats(keys), exact_values = floats(values);

  std::vector<encoded_tile> records;
  std::vector<kvarn::sealed_group> groups;
  for (int i = 0; i < real_tiles; ++i) {
    const kvarn::query_factor factor(head.moment(i));
    for (const auto& layout : {format.key_layout(), format.value_layout()}) {
      records.push_back(
          encode(layout, head.tile(layout.kind, i), {.method = method, .factor = &factor}));
      const auto* const record = records.back().record.data();
      auto& numbers = layout.kind == tile_kind::key ? keys : values;
      numbers.middleRows(real_sink + 128 * i, 128) = oracle::tokens_of(
          oracle::decode(oracle::read_record(record, layout), layout), layout, false);
    }
    const auto n = records.size();
    groups.push_back(
        {records[n - 2].record.data(), records[n - 1].record.data(), real_sink + 128 * i, 128});
  }
  const auto exact = [&](int first, int count) {
    return kvarn::exact_tokens<float>{view(exact_keys, dim).from(first),
                                      view(exact_values, dim).from(first), first, count};
  };
  const kvarn::attention_memory<float> memory{format, exact(0, real_sink), groups,
                                              exact(tail, tokens - tail)};

  constexpr int last = 32;
  const query_shape shape{last, head.query_heads, tokens - last};
  const auto q = oracle::matrix(rotated(head.queries.values) * oracle::hadamard(dim))
                     .bottomRows(last * head.query_heads)
                     .eval();
  auto options = options_for(format);
  options.precision = precision;
  const auto got = run_attention(memory, q, shape, options);
  const auto want = expected_attention(keys, values, q, shape, options);
  const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>> out(
      got.out.data(), want.out.rows(), dim);
  return {(out.cast<double>() - want.out).norm() / want.out.norm(), deviation(got, want).lse};
}

class RealData : public testing::TestWithParam<const char*> {};

TEST_P(RealData, CloseToTheDecodedTiles) {
  const real_head head(GetParam());
  for (const auto method : encoders) {
    SCOPED_TRACE(name_of(method));
    const auto int16 = measure(head, method, operand_precision::int16);
    const auto int8 = measure(head, method, operand_precision::int8);
    EXPECT_GT(int16.output, 1e-6);
    EXPECT_LT(int16.output, 2e-4);
    EXPECT_LT(int16.lse, 4e-3);
    EXPECT_GT(int8.output, 1e-3);
    EXPECT_LT(int8.output, 4e-2);
    EXPECT_GT(int8.output, 30 * int16.output);
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, RealData, testing::ValuesIn(real_heads),
                         [](const auto& head) { return test_name(head.param); });

}  // namespace
