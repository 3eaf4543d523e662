// The same work by Eigen's matrix products in FP32. This header does not include Eigen: eigen.cpp
// alone is compiled with the instruction sets that make Eigen fast, and no other file shares its
// inline functions.
#pragma once

namespace kvarn_bench {

// Whether this machine can run what eigen.cpp was compiled for.
bool eigen_is_available();

// Attention of `rows` query vectors over keys and values [tokens][head_dim]; all tokens are seen.
void eigen_attend(const float* keys, const float* values, int tokens, int head_dim,
                  const float* queries, int rows, float softmax_scale, float* out);

// out = matrix * vectors: [n][n] times n numbers of `count` vectors, one vector after another.
void eigen_rotate(const float* matrix, const float* vectors, int n, int count, float* out);

// The Cholesky factor of a symmetric [n][n] matrix, in place.
void eigen_factorize(float* matrix, int n);

}  // namespace kvarn_bench
