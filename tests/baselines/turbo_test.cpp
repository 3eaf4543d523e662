// TurboQuant by hand; its levels against the conditions that define them, its errors against the
// density of a coordinate of a random direction.
#include "kvarn/baselines/turbo.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "kvarn/baselines/kivi.hpp"
#include "support.hpp"

namespace {

using kvarn::tile_kind;
using kvarn_test::run;

double normal_density(double x) { return std::exp(-x * x / 2); }

TEST(LloydMax, LevelsAreMeansOfTheirCells) {
  // Squared error of unit variance, as published (Max, 1960).
  const double published[] = {0.3634, 0.1175, 0.03454, 0.009497};
  for (int bits = 1; bits <= 4; ++bits) {
    const auto& book = kvarn::normal_codebook(bits);
    ASSERT_EQ(book.levels, 1 << bits);
    const auto count = static_cast<std::size_t>(book.levels);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_NEAR(book.level[i], -book.level[count - 1 - i], 1e-6);
      if (i + 1 == count) break;
      ASSERT_LT(book.level[i], book.level[i + 1]);
      EXPECT_NEAR(book.boundary[i], (book.level[i] + book.level[i + 1]) / 2, 1e-6);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const double low = i == 0 ? -10 : static_cast<double>(book.boundary[i - 1]);
      const double high = i + 1 == count ? 10 : static_cast<double>(book.boundary[i]);
      const double mean =
          kvarn_test::mean_over(low, high, normal_density, [](double x) { return x; });
      EXPECT_NEAR(book.level[i], mean, 2e-6) << bits << " bits, level " << i;
    }
    const double error = kvarn_test::mean_over(-10, 10, normal_density, [&](double x) {
      const double miss = x - static_cast<double>(book.nearest(static_cast<float>(x)));
      return miss * miss;
    });
    EXPECT_NEAR(error / published[bits - 1], 1, 1e-3) << bits;
  }
}

TEST(Turbo, ByHand) {
  // (1, 1), rotated, is sqrt(2) (1, 0): in units of the normal distribution (1.414, 0), whose
  // levels are 1.5104 and 0.4528.
  const double high = 1.5104176, low = 0.4527800, root = std::sqrt(2.0);
  const auto plain = run(kvarn::turbo, {tile_kind::key, 2, 2, 1}, {1, 1});
  EXPECT_NEAR(plain[0], (high + low) / root, 1e-3);  // |x| is FP16
  EXPECT_NEAR(plain[1], (high - low) / root, 1e-3);
  const auto corrected = run(kvarn::turbo_nc, {tile_kind::key, 2, 2, 1}, {1, 1});
  const double length = std::hypot(high, low);
  EXPECT_NEAR(corrected[0], (high + low) / length, 1e-3);
  EXPECT_NEAR(corrected[1], (high - low) / length, 1e-3);
}

// A coordinate of a random direction in D dimensions, times sqrt(D).
TEST(Turbo, ErrorIsThatOfTheLevels) {
  for (const int head_dim : {64, 128})
    for (const int bits : {2, 3, 4}) {
      const auto& book = kvarn::normal_codebook(bits);
      const double root = std::sqrt(head_dim);
      const auto density = [&](double x) {
        return std::pow(1 - x * x / head_dim, (head_dim - 3) / 2.0);
      };
      const auto level = [&](double x) {
        return static_cast<double>(book.nearest(static_cast<float>(x)));
      };
      const double error = kvarn_test::mean_over(
          -root, root, density, [&](double x) { return std::pow(x - level(x), 2); });
      const double product =
          kvarn_test::mean_over(-root, root, density, [&](double x) { return x * level(x); });
      const double square = kvarn_test::mean_over(-root, root, density,
                                                  [&](double x) { return level(x) * level(x); });
      for (const auto kind : {tile_kind::key, tile_kind::value}) {
        const kvarn::baseline_settings settings{kind, bits, head_dim, 128};
        EXPECT_NEAR(kvarn_test::normal_error(kvarn::turbo, settings) / error, 1, 0.01)
            << head_dim << " " << bits;
        // Of a direction that is stored with the right norm: 2 (1 - cos). The correction also takes
        // away what the error of a token has along it, about 2 of D parts.
        const double corrected = 2 * (1 - product / std::sqrt(square));
        const double ratio = kvarn_test::normal_error(kvarn::turbo_nc, settings) / corrected;
        EXPECT_GT(ratio, 1 - 2.5 / head_dim) << head_dim << " " << bits;
        EXPECT_LT(ratio, 1.01) << head_dim << " " << bits;
      }
    }
}

TEST(Turbo, NormCorrectionLeavesNoErrorOfMagnitude) {
  const auto in = kvarn_test::normal_values(256 * 128, 1);
  const kvarn::baseline_settings settings{tile_kind::key, 3, 128, 128};
  const auto share = [&](const kvarn::baseline& method) {
    return kvarn::split_error(in, run(method, settings, in), 128).magnitude_share();
  };
  EXPECT_LT(share(kvarn::turbo_nc), 1e-5);
  EXPECT_GT(share(kvarn::turbo), 1e-3);
}

TEST(TurboVllm, KeysAreTurboAndValuesAreKivi) {
  const auto in = kvarn_test::normal_values(64 * 128, 2);
  for (const int bits : {3, 4}) {
    const kvarn::baseline_settings keys{tile_kind::key, bits, 128, 64};
    EXPECT_EQ(run(kvarn::turbo_vllm, keys, in), run(kvarn::turbo_nc, keys, in));
    const kvarn::baseline_settings values{tile_kind::value, bits, 128, 64};
    EXPECT_EQ(run(kvarn::turbo_vllm, values, in), run(kvarn::kivi, values, in));
  }
}

}  // namespace
