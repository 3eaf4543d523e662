#include "dense.hpp"

#include <algorithm>

// This file is built for another instruction set than the rest of a program, which may use Eigen
// too: under a name of its own the linker cannot merge the two.
#define Eigen kvarn_engine_eigen
#include <Eigen/Core>

namespace kvarn_engine {

namespace {

using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using row = Eigen::Matrix<float, 1, Eigen::Dynamic>;
using column = Eigen::Matrix<float, Eigen::Dynamic, 1>;
using array_map = Eigen::Map<Eigen::ArrayXf>;
using const_array_map = Eigen::Map<const Eigen::ArrayXf>;

const_array_map array_of(const float* x, int count) { return {x, count}; }

// Rows first .. first + count - 1 of one part.
void product(const float* x, int tokens, const linear_part& part, int first, int count) {
  const int cols = part.weights->cols;
  const Eigen::Map<const row_major> w(part.weights->row(first), count, cols);
  if (tokens == 1) {
    Eigen::Map<column> y(part.out + first, count);
    y.noalias() = w * Eigen::Map<const column>(x, cols);
    if (part.bias != nullptr) y += Eigen::Map<const column>(part.bias + first, count);
    return;
  }
  Eigen::Map<row_major, 0, Eigen::OuterStride<>> y(part.out + first, tokens, count,
                                                   Eigen::OuterStride<>(part.weights->rows));
  y.noalias() = Eigen::Map<const row_major>(x, tokens, cols) * w.transpose();
  if (part.bias != nullptr) y.rowwise() += Eigen::Map<const row>(part.bias + first, count);
}

}  // namespace

void linear(const kvarn_examples::thread_pool& pool, const float* x, int tokens,
            std::span<const linear_part> parts) {
  int rows = 0;
  for (const linear_part& part : parts) rows += part.weights->rows;
  // Twice as many items as threads even out what else runs on the machine; in multiples of 16 rows,
  // so that Eigen's kernels are full.
  const int wanted = 2 * pool.threads();
  const int step = (std::max)(16, (rows + wanted - 1) / wanted / 16 * 16 + 16);
  pool(static_cast<std::size_t>((rows + step - 1) / step), [&](std::size_t i) {
    int first = static_cast<int>(i) * step;
    int end = (std::min)(rows, first + step);
    for (const linear_part& part : parts) {
      const int here = part.weights->rows;
      const int last = (std::min)(end, here);
      if (first < last) product(x, tokens, part, first, last - first);
      first = (std::max)(0, first - here);
      end -= here;
      if (end <= 0) break;
    }
  });
}

void rms_norm(const float* x, int tokens, const std::vector<float>& weight, float epsilon,
              float* out) {
  const auto count = static_cast<int>(weight.size());
  const auto w = array_of(weight.data(), count);
  for (int t = 0; t < tokens; ++t) {
    const auto in = array_of(x + std::ptrdiff_t{t} * count, count);
    const float scale = 1.0f / std::sqrt(in.square().mean() + epsilon);
    array_map(out + std::ptrdiff_t{t} * count, count) = in * scale * w;
  }
}

void silu_product(float* gate, const float* up, std::size_t count) {
  array_map g(gate, static_cast<std::ptrdiff_t>(count));
  g = g / (1.0f + (-g).exp()) * const_array_map(up, static_cast<std::ptrdiff_t>(count));
}

void add(float* x, const float* y, std::size_t count) {
  array_map(x, static_cast<std::ptrdiff_t>(count)) +=
      const_array_map(y, static_cast<std::ptrdiff_t>(count));
}

log_softmax_of log_softmax(const float* logits, int count) {
  log_softmax_of result;
  const auto x = array_of(logits, count);
  Eigen::Index best = 0;
  const float largest = x.maxCoeff(&best);
  result.best = static_cast<int>(best);
  result.log_sum =
      static_cast<double>(largest) + std::log(static_cast<double>((x - largest).exp().sum()));
  return result;
}

double kl_divergence(const float* exact, const log_softmax_of& exact_sum, const float* other,
                     const log_softmax_of& other_sum, int count) {
  const auto shift = static_cast<float>(exact_sum.log_sum - other_sum.log_sum);
  const auto p = array_of(exact, count);
  const auto q = array_of(other, count);
  const auto log_sum = static_cast<float>(exact_sum.log_sum);
  return static_cast<double>(((p - log_sum).exp() * (p - q - shift)).sum());
}

}  // namespace kvarn_engine
