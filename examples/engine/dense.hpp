// The dense arithmetic of the engine, over Eigen: products with weights and the functions of single
// tokens. Row-major, FP32.
//
// Eigen chooses its instruction set when it is compiled, so dense.cpp is the one file that is built
// with -march, and this header shows nothing of Eigen.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../executors/thread_pool.hpp"
#include "weights.hpp"

namespace kvarn_engine {

// out[t][r] = sum_c x[t][c] weights[r][c] + bias[r].
struct linear_part {
  const matrix* weights = nullptr;
  const float* bias = nullptr;  // null: none
  float* out = nullptr;         // [tokens][rows]
};

// Products of the same `tokens` vectors with several matrices of equally many columns, whose rows
// the threads of the pool share. One token is a matrix-vector product.
void linear(const kvarn_examples::thread_pool& pool, const float* x, int tokens,
            std::span<const linear_part> parts);

// out[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight. `out` may be `x`.
void rms_norm(const float* x, int tokens, const std::vector<float>& weight, float epsilon,
              float* out);

// gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i].
void silu_product(float* gate, const float* up, std::size_t count);

// x[i] += y[i].
void add(float* x, const float* y, std::size_t count);

// The distribution of a next token: softmax of `count` logits.
struct log_softmax_of {
  int best = 0;        // index of the largest logit, the first of equals
  double log_sum = 0;  // log of the sum of exponentiated logits
};
log_softmax_of log_softmax(const float* logits, int count);

// KL(softmax(exact) || softmax(other)) in nats, given log_softmax of both.
double kl_divergence(const float* exact, const log_softmax_of& exact_sum, const float* other,
                     const log_softmax_of& other_sum, int count);

}  // namespace kvarn_engine
