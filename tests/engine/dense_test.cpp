// Products with weights and functions of single tokens against double precision.
#include "../../examples/engine/dense.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "tiny_model.hpp"

namespace {

using namespace kvarn_engine;

std::vector<float> waves(std::size_t count, double speed) {
  std::vector<float> x;
  for (std::size_t i = 0; i < count; ++i)
    x.push_back(static_cast<float>(std::sin(speed * static_cast<double>(i) + 1)));
  return x;
}

TEST(Dense, ProductsOfSeveralMatricesWithAnyTokensAndThreads) {
  const int cols = 37;
  const matrix a{5, cols, waves(5 * 37, 0.7)};
  const matrix b{130, cols, waves(130 * 37, 1.3)};
  const std::vector<float> bias = waves(130, 2.1);
  for (const int threads : {1, 2, 3})
    for (const int tokens : {1, 2, 19}) {
      const kvarn_examples::thread_pool pool(threads);
      const auto x = waves(static_cast<std::size_t>(tokens * cols), 0.31);
      std::vector<float> of_a(static_cast<std::size_t>(tokens) * 5, -9);
      std::vector<float> of_b(static_cast<std::size_t>(tokens) * 130, -9);
      linear(pool, x.data(), tokens,
             std::array{linear_part{&a, nullptr, of_a.data()},
                        linear_part{&b, bias.data(), of_b.data()}});
      const auto check = [&](const matrix& w, const float* added, const std::vector<float>& out) {
        for (int t = 0; t < tokens; ++t)
          for (int r = 0; r < w.rows; ++r) {
            double sum = added != nullptr ? static_cast<double>(added[r]) : 0.0;
            for (int c = 0; c < cols; ++c)
              sum += static_cast<double>(x[static_cast<std::size_t>(t * cols + c)]) *
                     static_cast<double>(w.row(r)[c]);
            EXPECT_NEAR(static_cast<double>(out[static_cast<std::size_t>(t * w.rows + r)]), sum,
                        1e-5);
          }
      };
      check(a, nullptr, of_a);
      check(b, bias.data(), of_b);
    }
}

TEST(Dense, RmsNorm) {
  const auto x = waves(3 * 50, 0.9);
  const auto weight = waves(50, 0.2);
  std::vector<float> out(x.size());
  rms_norm(x.data(), 3, weight, 0.5f, out.data());
  for (int t = 0; t < 3; ++t) {
    const auto wanted = kvarn_test::oracle_norm(
        Eigen::Map<const Eigen::VectorXf>(x.data() + t * 50, 50).cast<double>(), weight, 0.5);
    for (int i = 0; i < 50; ++i)
      EXPECT_NEAR(static_cast<double>(out[static_cast<std::size_t>(t * 50 + i)]), wanted[i], 1e-6);
  }
  const std::vector<float> zero(50);
  rms_norm(zero.data(), 1, weight, 1e-5f, out.data());
  for (std::size_t i = 0; i < 50; ++i) EXPECT_EQ(out[i], 0.0f);
}

TEST(Dense, SiluProduct) {
  std::vector<float> gate{-80, -3, -0.5f, 0, 0.5f, 3, 80};
  const std::vector<float> before = gate;
  const std::vector<float> up{1, 2, 3, 4, -5, 6, 7};
  silu_product(gate.data(), up.data(), gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const auto x = static_cast<double>(before[i]);
    const double wanted = x / (1 + std::exp(-x)) * static_cast<double>(up[i]);
    EXPECT_NEAR(static_cast<double>(gate[i]), wanted, 1e-6 * (1 + std::abs(wanted)));
  }
}

TEST(Dense, LogSoftmaxAndDivergence) {
  const auto a = waves(100, 1.7);
  auto b = waves(100, 2.9);
  for (float& x : b) x = 3 * x + 1000;  // an offset changes nothing
  const auto a_sum = log_softmax(a.data(), 100);
  const auto b_sum = log_softmax(b.data(), 100);
  double z_a = 0, z_b = 0;
  for (int i = 0; i < 100; ++i) {
    z_a += std::exp(static_cast<double>(a[static_cast<std::size_t>(i)]));
    z_b += std::exp(static_cast<double>(b[static_cast<std::size_t>(i)]) - 1000);
  }
  EXPECT_NEAR(a_sum.log_sum, std::log(z_a), 1e-5);
  EXPECT_NEAR(b_sum.log_sum, std::log(z_b) + 1000, 1e-3);
  EXPECT_EQ(a_sum.best, static_cast<int>(std::max_element(a.begin(), a.end()) - a.begin()));
  double kl = 0;
  for (std::size_t i = 0; i < 100; ++i) {
    const double log_p = static_cast<double>(a[i]) - std::log(z_a);
    const double log_q = static_cast<double>(b[i]) - 1000 - std::log(z_b);
    kl += std::exp(log_p) * (log_p - log_q);
  }
  EXPECT_GT(kl, 1);
  EXPECT_NEAR(kl_divergence(a.data(), a_sum, b.data(), b_sum, 100), kl, 1e-3);
  EXPECT_NEAR(kl_divergence(a.data(), a_sum, a.data(), a_sum, 100), 0, 1e-9);
}

}  // namespace
