// Eigen's part of the comparison, in a file of its own because of its compiler flags.
#include "eigen.hpp"

#include <Eigen/Dense>
#include <algorithm>

namespace kvarn_bench {

namespace {

using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using const_map = Eigen::Map<const row_major>;

}  // namespace

bool eigen_is_available() {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

void eigen_attend(const float* keys, const float* values, int tokens, int head_dim,
                  const float* queries, int rows, float softmax_scale, float* out) {
  constexpr int block = 256;
  const row_major q = const_map(queries, rows, head_dim) * softmax_scale;
  Eigen::ArrayXf maximum = Eigen::ArrayXf::Constant(rows, -1e30f);
  Eigen::ArrayXf sum = Eigen::ArrayXf::Zero(rows);
  row_major total = row_major::Zero(rows, head_dim);
  for (int t = 0; t < tokens; t += block) {
    const int count = std::min(block, tokens - t);
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(t) * head_dim;
    row_major weights = q * const_map(keys + at, count, head_dim).transpose();
    const Eigen::ArrayXf joined = maximum.max(weights.rowwise().maxCoeff().array());
    const Eigen::ArrayXf rescale = (maximum - joined).exp();
    weights = (weights.array().colwise() - joined).exp();
    sum = sum * rescale + weights.rowwise().sum().array();
    total = (total.array().colwise() * rescale).matrix();
    total.noalias() += weights * const_map(values + at, count, head_dim);
    maximum = joined;
  }
  Eigen::Map<row_major>(out, rows, head_dim) = (total.array().colwise() / sum).matrix();
}

void eigen_rotate(const float* matrix, const float* vectors, int n, int count, float* out) {
  const Eigen::Map<const Eigen::MatrixXf> h(matrix, n, n);
  if (count == 1)
    Eigen::Map<Eigen::VectorXf>(out, n).noalias() =
        h * Eigen::Map<const Eigen::VectorXf>(vectors, n);
  else
    Eigen::Map<Eigen::MatrixXf>(out, n, count).noalias() =
        h * Eigen::Map<const Eigen::MatrixXf>(vectors, n, count);
}

void eigen_factorize(float* matrix, int n) {
  Eigen::Map<Eigen::MatrixXf> c(matrix, n, n);
  const Eigen::LLT<Eigen::Ref<Eigen::MatrixXf>> factor(c);
}

}  // namespace kvarn_bench
