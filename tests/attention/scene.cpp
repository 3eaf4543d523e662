// Random records and queries, and attention in double precision.
#include "attention/scene.hpp"

namespace kvarn_test {

std::vector<std::byte> random_record(const kvarn::tile_layout& layout, int count,
                                     gaussian_source& random) {
  const bool e4m3 = layout.scale == kvarn::scale_type::e4m3;
  const bool is_key = layout.kind == kvarn::tile_kind::key;
  const auto [rows, cols] = oracle::extent_of(layout);
  const int codes = 1 << layout.bits;
  const double step = std::sqrt(12.0 / (codes * codes - 1.0));
  const auto is_garbage = [count](int token) { return token >= count; };

  oracle::record_fields fields;
  for (int i = 0; i < rows * cols; ++i) fields.codes.push_back(random.index(codes));
  for (int c = 0; c < cols; ++c) {
    const double s = step * std::exp(0.2 * random.normal());
    const double zero = -0.5 * (codes - 1) * s + 0.2 * random.normal();
    const bool garbage = !is_key && is_garbage(c);
    const int bits = oracle::round_binary16()(zero) | (zero < 0 ? 0x8000 : 0);
    fields.zero_bits.push_back(garbage ? oracle::binary16.max_code : bits);
    fields.step_code.push_back(oracle::fp8_code(garbage ? 1e9 : s, e4m3));
  }
  for (int r = 0; r < rows; ++r)
    fields.scale_code.push_back(
        oracle::fp8_code(is_key && is_garbage(r) ? 1e9 : std::exp(0.2 * random.normal()), e4m3));
  return oracle::write_record(fields, layout);
}

oracle::matrix random_queries(int count, int head_dim, std::uint64_t seed) {
  gaussian_source random(seed);
  return oracle::matrix::NullaryExpr(count, head_dim, [&](auto, auto) {
    return static_cast<double>(static_cast<float>(1.4 * random.normal()));
  });
}

attended expected_attention(const oracle::matrix& keys, const oracle::matrix& values,
                            const oracle::matrix& queries, const query_shape& shape,
                            const kvarn::attention_options& options) {
  const oracle::matrix rotated =
      options.queries_rotated
          ? queries
          : oracle::matrix(queries * oracle::hadamard(static_cast<int>(queries.cols())));
  attended result{
      oracle::matrix::Zero(queries.rows(), values.cols()),
      oracle::vector::Constant(queries.rows(), -std::numeric_limits<double>::infinity())};
  for (Eigen::Index i = 0; i < queries.rows(); ++i) {
    const std::int64_t end = shape.position + i / shape.heads + 1;
    const std::int64_t begin = options.window > 0 ? end - options.window : 0;
    const Eigen::Index first = std::clamp<std::int64_t>(begin, 0, keys.rows());
    const Eigen::Index count = std::clamp<std::int64_t>(end, first, keys.rows()) - first;
    oracle::vector logits = static_cast<double>(options.softmax_scale) *
                            (keys.middleRows(first, count) * rotated.row(i).transpose());
    if (options.logit_soft_cap != 0) {
      const auto cap = static_cast<double>(options.logit_soft_cap);
      logits = cap * (logits / cap).array().tanh();
    }
    if (options.sink_logits != nullptr) {
      logits.conservativeResize(count + 1);
      logits[count] = static_cast<double>(options.sink_logits[i % shape.heads]);
    }
    if (logits.size() == 0) continue;
    const double maximum = logits.maxCoeff();
    const oracle::vector weights = (logits.array() - maximum).exp();
    result.lse[i] = maximum + std::log(weights.sum());
    result.out.row(i) =
        (weights.head(count).transpose() * values.middleRows(first, count)) / weights.sum();
  }
  if (options.rotate_output)
    result.out = result.out * oracle::hadamard(static_cast<int>(values.cols()));
  return result;
}

}  // namespace kvarn_test
