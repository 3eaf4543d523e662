// The rotation: its matrix is that of the definition, and exactly orthogonal, for every size.
#include "kvarn/codec/hadamard.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "kvarn/format/tile_layout.hpp"
#include "support/oracle.hpp"
#include "support/tiles.hpp"

namespace {

namespace oracle = kvarn_test::oracle;

static_assert(kvarn::hadamard_core(1) == 1 && kvarn::hadamard_core(128) == 1);
static_assert(kvarn::hadamard_core(80) == 20 && kvarn::hadamard_core(96) == 12);
static_assert(kvarn::hadamard_core(112) == 28 && kvarn::hadamard_core(0) == 0);

// H column by column, as the library multiplies by it. The entries are exact.
oracle::matrix matrix_of(int n) {
  oracle::matrix h(n, n);
  for (int j = 0; j < n; ++j) {
    std::vector<float> x(static_cast<std::size_t>(n), 0.0f);
    x[static_cast<std::size_t>(j)] = 1.0f;
    kvarn::hadamard_unnormalized(x.data(), n);
    for (int i = 0; i < n; ++i) h(i, j) = static_cast<double>(x[static_cast<std::size_t>(i)]);
  }
  return h;
}

std::vector<int> sizes() {
  std::vector<int> result{1, 2, 4, 8, 16, 32, 12, 20, 28, 24, 40, 56, 48};
  result.insert(result.end(), std::begin(kvarn::supported_head_dims),
                std::end(kvarn::supported_head_dims));
  return result;
}

class Hadamard : public testing::TestWithParam<int> {};

TEST_P(Hadamard, MatrixIsSymmetricOrthogonalAndThatOfTheDefinition) {
  const int n = GetParam();
  const oracle::matrix h = matrix_of(n);
  EXPECT_EQ(h.cwiseAbs(), oracle::matrix(oracle::matrix::Ones(n, n)));
  EXPECT_EQ(h, oracle::matrix(h.transpose()));
  EXPECT_EQ(oracle::matrix(h * h), oracle::matrix(n * oracle::matrix::Identity(n, n)));
  EXPECT_EQ(h, oracle::hadamard_signs(n));
}

TEST_P(Hadamard, RotatesAsTheOracle) {
  const int n = GetParam();
  const std::vector<float> x = kvarn_test::normal_tokens(1, n, 21);
  std::vector<float> y = x;
  kvarn::hadamard(y.data(), n);
  Eigen::VectorXd exact = Eigen::Map<const Eigen::VectorXf>(x.data(), n).cast<double>();
  exact = oracle::hadamard(n) * exact;
  const Eigen::VectorXd error =
      Eigen::Map<const Eigen::VectorXf>(y.data(), n).cast<double>() - exact;
  EXPECT_LE(error.norm(), 3e-7 * exact.norm());
  EXPECT_DOUBLE_EQ(static_cast<double>(kvarn::hadamard_norm(n)),
                   static_cast<double>(static_cast<float>(1.0 / std::sqrt(n))));
}

TEST_P(Hadamard, TwiceIsTheIdentity) {
  const int n = GetParam();
  // Small integers: sums and differences are exact, so H H = n I holds to the bit.
  std::vector<float> x;
  for (int i = 0; i < n; ++i) x.push_back(static_cast<float>((i * 37 + 11) % 101 - 50));
  std::vector<float> y = x;
  kvarn::hadamard_unnormalized(y.data(), n);
  EXPECT_EQ(y == x, n == 1);
  kvarn::hadamard_unnormalized(y.data(), n);
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(y[i], static_cast<float>(n) * x[i]);

  std::vector<float> z = x;
  kvarn::hadamard(z.data(), n);
  kvarn::hadamard(z.data(), n);
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(z[i], x[i], 1e-4f);
}

TEST_P(Hadamard, BatchesRotateEachVectorAndNothingElse) {
  const int n = GetParam();
  constexpr int count = 3;
  for (const int gap : {0, 1, 5}) {
    const std::ptrdiff_t stride = n + gap;
    std::vector<float> batch = kvarn_test::normal_tokens(count, static_cast<int>(stride), 22);
    std::vector<float> expected = batch;
    for (int i = 0; i < count; ++i) kvarn::hadamard(expected.data() + i * stride, n);
    kvarn::hadamard(batch.data(), n, count, stride);
    EXPECT_EQ(batch, expected) << gap;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Hadamard, testing::ValuesIn(sizes()),
                         [](const auto& instance) { return std::to_string(instance.param); });

TEST(HadamardCore, KnowsWhichSizesHaveAMatrix) {
  for (int n = -4; n <= 1024; ++n) {
    int expected = 0;
    for (const int core : {1, 12, 20, 28})
      for (int size = core; size <= n; size *= 2)
        if (size == n) expected = core;
    ASSERT_EQ(kvarn::hadamard_core(n), expected) << n;
  }
  for (const int head_dim : kvarn::supported_head_dims)
    EXPECT_NE(kvarn::hadamard_core(head_dim), 0);
}

}  // namespace
