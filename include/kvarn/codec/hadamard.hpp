// The Hadamard rotation of head vectors: H x / sqrt(n) for n = m * 2^k, m in {1, 12, 20, 28}.
//
// H = H_m (x) H_(2^k): Sylvester's matrix in natural order within blocks of 2^k, and Paley's second
// construction (R. Paley, J. Math. Phys. 12, 1933) of order m = 2(q + 1), q in {5, 9, 13}, across
// them:
//
//   H_m = C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]]
//
// with the symmetric conference matrix C of the quadratic residues of GF(q). All of these are
// symmetric, so the rotation is its own inverse and nothing in the library needs a transpose.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../config.hpp"

namespace kvarn {

// The m of n = m * 2^k, or 0 where there is none.
KVARN_INLINE constexpr int hadamard_core(int n) {
  if (n < 1) return 0;
  const int odd = n / (n & -n);
  if (odd == 1) return 1;
  const bool has_core = (odd == 3 || odd == 5 || odd == 7) && n % 4 == 0;
  return has_core ? 4 * odd : 0;
}

inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

template <int N>
struct sign_matrix {
  std::int8_t sign[N][N];
};

// C[i][j] in {-1, 0, 1}: zero diagonal, first row and column 1, else the quadratic character of the
// difference of two elements of GF(Q).
template <int Q>
KVARN_HOST_DEVICE constexpr sign_matrix<Q + 1> conference_matrix() {
  static_assert(Q == 5 || Q == 9 || Q == 13);
  // An element of GF(9) = GF(3)[i] with i^2 = -1 is a + 3 b for a + b i.
  constexpr int p = Q == 9 ? 3 : Q;
  const auto subtract = [](int x, int y) {
    return (x % p - y % p + p) % p + p * ((x / p - y / p + p) % p);
  };
  const auto square = [](int x) {
    const int a = x % p;
    const int b = x / p;
    return (a * a - b * b + p * p) % p + p * ((2 * a * b) % p);
  };
  bool is_square[Q] = {};
  for (int x = 1; x < Q; ++x) is_square[square(x)] = true;

  sign_matrix<Q + 1> c{};
  for (int i = 0; i < Q; ++i) {
    c.sign[0][i + 1] = c.sign[i + 1][0] = 1;
    for (int j = 0; j < Q; ++j)
      if (i != j) c.sign[i + 1][j + 1] = is_square[subtract(i, j)] ? 1 : -1;
  }
  return c;
}

template <int Q>
inline constexpr auto conference = conference_matrix<Q>();

// The same as floats, for vector code.
template <int N>
struct float_signs {
  float sign[N][N];
};
template <int Q>
constexpr float_signs<Q + 1> conference_as_floats() {
  float_signs<Q + 1> signs{};
  for (int i = 0; i <= Q; ++i)
    for (int j = 0; j <= Q; ++j) signs.sign[i][j] = static_cast<float>(conference<Q>.sign[i][j]);
  return signs;
}
template <int Q>
inline constexpr auto conference_signs = conference_as_floats<Q>();

// H_m over the elements x[0], x[stride], ..., m = 2(Q + 1).
template <int Q>
void paley_transform(float* x, std::ptrdiff_t stride) {
  float sum[Q + 1];
  float difference[Q + 1];
  for (std::ptrdiff_t i = 0; i <= Q; ++i) {
    const float a = x[stride * (2 * i)];
    const float b = x[stride * (2 * i + 1)];
    sum[i] = a + b;
    difference[i] = a - b;
  }
  for (std::ptrdiff_t i = 0; i <= Q; ++i) {
    float even = difference[i];
    float odd = -sum[i];
    for (int j = 0; j <= Q; ++j) {
      const std::int8_t sign = conference<Q>.sign[i][j];
      if (sign > 0) {
        even = even + sum[j];
        odd = odd + difference[j];
      } else if (sign < 0) {
        even = even - sum[j];
        odd = odd - difference[j];
      }
    }
    x[stride * (2 * i)] = even;
    x[stride * (2 * i + 1)] = odd;
  }
}

}  // namespace detail

// x <- H x, without the factor 1/sqrt(n); additions and subtractions only.
// Precondition: hadamard_core(n) != 0.
KVARN_NOINLINE void hadamard_unnormalized(float* x, int n) {
  const int core = hadamard_core(n);
  KVARN_ASSERT(core != 0);
  const int block = n / core;
  for (int half = 1; half < block; half *= 2)
    for (int i = 0; i < n; ++i)
      if ((i & half) == 0) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  if (core == 1) return;
  for (int i = 0; i < block; ++i) {
    if (core == 12) detail::paley_transform<5>(x + i, block);
    if (core == 20) detail::paley_transform<9>(x + i, block);
    if (core == 28) detail::paley_transform<13>(x + i, block);
  }
}

// 1/sqrt(n).
inline float hadamard_norm(int n) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
}

// x <- H x / sqrt(n): orthonormal and its own inverse. Precondition: hadamard_core(n) != 0.
KVARN_NOINLINE void hadamard(float* x, int n) {
  hadamard_unnormalized(x, n);
  const float norm = hadamard_norm(n);
  for (int i = 0; i < n; ++i) x[i] = x[i] * norm;
}

// The same for `count` vectors of n floats, each `stride` floats after the one before.
inline void hadamard(float* x, int n, int count, std::ptrdiff_t stride) {
  for (int i = 0; i < count; ++i) hadamard(x + i * stride, n);
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
