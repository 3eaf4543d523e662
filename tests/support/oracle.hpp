// The method in double precision, straight from its formulas. For tests; it takes the library's
// descriptions (layouts, recipes) and shares no code with it.
//
// A tile here is a matrix y of rows x cols: the rotated tokens of keys, their transpose for values.
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <span>
#include <vector>

#include "kvarn/codec/encoder.hpp"
#include "kvarn/format/tile_layout.hpp"
#include "support/oracle_record.hpp"

namespace kvarn_test::oracle {

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using vector = Eigen::VectorXd;

// ---- Rotation ----

// H of order n without its factor: Sylvester's matrix, or its Kronecker product with a core.
matrix hadamard_signs(int n);

matrix hadamard(int n);

// ---- Dual-axis variance normalisation ----

struct normalized {
  vector row_scale;
  vector col_scale;
  double imbalance;  // max std / min std of the rows plus that of the columns
};

// Every iterate, the start first; scales are in the units of y.
std::vector<normalized> normalize(const matrix& y, int iterations, bool equivariant);

// The best iterate; of equal ones the newest.
std::size_t best_iterate(const std::vector<normalized>& iterates);

// ---- The whole tile ----

// Of one column: code c stands for zero + step * c.
struct grid {
  double zero;
  double step;
};

struct encoded {
  record_fields fields;
  std::vector<int> fit_scales;   // row scales by which steps and zeros were found
  std::vector<grid> code_grids;  // by which codes were made; the stored ones unless unbiased
  matrix targets;                // in steps, before rounding and clamping
};

// What to take instead of the oracle's own, so that later stages can be compared on equal terms.
struct known_stages {
  int iterate = -1;  // of the normalisation; -1: the best
  // As stored; steps and zeros are found by them too unless the recipe chooses them afterwards.
  const std::vector<int>* row_scales = nullptr;
  const std::vector<grid>* grids = nullptr;
};

// `tokens`: [group][head_dim].
matrix tile_of(std::span<const float> tokens, const kvarn::tile_layout& layout, bool rotate);

// `y`: rotated by tile_of.
encoded encode(const matrix& y, const kvarn::tile_layout& layout,
               const kvarn::encoder_recipe& recipe, const matrix* second_moment, double damping,
               const known_stages& known = {});

// What row r of the tile costs under an FP8 scale: the squared error of its codes after decoding,
// and `along` times the square of the error's part along the row.
double row_cost(const matrix& y, Eigen::Index r, int scale_code, const std::vector<grid>& grids,
                const kvarn::tile_layout& layout, double along);

// The tile that a record's fields stand for, rows x cols, still rotated.
matrix decode(const record_fields& fields, const kvarn::tile_layout& layout);

// The tokens of a decoded tile, [group][head_dim].
matrix tokens_of(const matrix& y, const kvarn::tile_layout& layout, bool rotate_back);

}  // namespace kvarn_test::oracle
