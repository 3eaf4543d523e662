// Tensors of GGUF files as floats.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <span>

#include "gguf.hpp"
#include "kvarn/error.hpp"

namespace kvarn_engine {

// Row-major, [rows][cols].
using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The whole tensor, rows() x cols(); a tensor of one dimension is one row. Types: F32, F16, BF16,
// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K. Errors: invalid_format for another type (names it and
// the tensor), out_of_memory.
kvarn::result<float_matrix> dequantize(const gguf_tensor& tensor);

// One row into `out`. Errors: as above; invalid_argument unless row < rows() and out.size() is
// cols().
kvarn::status dequantize_row(const gguf_tensor& tensor, std::uint64_t row, std::span<float> out);

}  // namespace kvarn_engine
