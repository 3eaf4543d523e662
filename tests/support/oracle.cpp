// The formulas of the method in double precision, in the order of its stages.
#include "support/oracle.hpp"

#include <Eigen/Dense>
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "support/oracle_numbers.hpp"

namespace kvarn_test::oracle {

// ---- Rotation ----

namespace {

// a as a square in GF(q): the Legendre symbol of a for a prime q; for GF(9) that of the norm a a' =
// u^2 + v^2 of a = u + v i, because the squares are the elements whose norm is 1.
int quadratic_character(int q, int u, int v) {
  const int p = q == 9 ? 3 : q;
  const int argument = q == 9 ? u * u + v * v : u;
  int power = 1;  // Euler: argument^((p - 1) / 2)
  for (int i = 0; i < (p - 1) / 2; ++i) power = power * (((argument % p) + p) % p) % p;
  return power == p - 1 ? -1 : power;
}

// Paley's second construction of order 2 (q + 1).
matrix paley_matrix(int q) {
  const int side = q == 9 ? 3 : q;
  matrix h(2 * (q + 1), 2 * (q + 1));
  const Eigen::Matrix2d plus{{1, 1}, {1, -1}};
  const Eigen::Matrix2d diagonal{{1, -1}, {-1, -1}};
  for (int i = 0; i <= q; ++i)
    for (int j = 0; j <= q; ++j) {
      int c = 1;
      if (i > 0 && j > 0)
        c = quadratic_character(q, (i - 1) % side - (j - 1) % side,
                                (i - 1) / side - (j - 1) / side);
      h.block<2, 2>(2 * i, 2 * j) = i == j ? diagonal : Eigen::Matrix2d(c * plus);
    }
  return h;
}

}  // namespace

matrix hadamard_signs(int n) {
  int block = n;
  matrix core = matrix::Ones(1, 1);
  for (const int q : {5, 9, 13})
    if (n % (2 * (q + 1)) == 0 && std::has_single_bit(static_cast<unsigned>(n / (2 * (q + 1))))) {
      core = paley_matrix(q);
      block = n / (2 * (q + 1));
    }
  matrix h(n, n);
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      const auto common = static_cast<unsigned>((i % block) & (j % block));
      h(i, j) = core(i / block, j / block) * (std::popcount(common) % 2 == 0 ? 1 : -1);
    }
  return h;
}

matrix hadamard(int n) { return hadamard_signs(n) / std::sqrt(n); }

// ---- Dual-axis variance normalisation ----

namespace {

double unbiased_std(const vector& x) {
  if (x.size() < 2) return 0.0;
  const vector shifted = x.array() - x[0];  // exactly zero for a constant
  return std::sqrt((shifted.array() - shifted.mean()).square().sum() /
                   static_cast<double>(x.size() - 1));
}

}  // namespace

std::vector<normalized> normalize(const matrix& y, int iterations, bool equivariant) {
  const double low = equivariant ? std::ldexp(1, -10) : std::exp(-0.3);
  const double high = equivariant ? std::ldexp(1, 10) : std::exp(10.0);
  double unit = 1.0;
  if (equivariant) unit = unbiased_std(Eigen::Map<const vector>(y.data(), y.size()));
  if (unit == 0) unit = 1.0;

  const auto stds = [&](const matrix& m) {
    vector s(m.rows());
    for (Eigen::Index r = 0; r < m.rows(); ++r) s[r] = unbiased_std(m.row(r).transpose());
    return s;
  };
  const auto ratio = [&](const vector& s) {
    double largest = 0;
    double smallest = std::numeric_limits<double>::infinity();
    for (const double x : s) {
      if (equivariant && x == 0) continue;
      largest = (std::max)(largest, x);
      smallest = (std::min)(smallest, x);
    }
    return smallest > largest ? 1.0 : largest / (std::max)(smallest, 1e-8);
  };
  const auto clamped_std = [](double s) { return std::clamp(s, 1e-3, 1e3); };

  vector row = vector::Ones(y.rows());
  vector col = vector::Ones(y.cols());
  std::vector<normalized> iterates;
  for (int i = 0;; ++i) {
    const auto scaled = [&] {
      return matrix(row.cwiseInverse().asDiagonal() * (y / unit) * col.cwiseInverse().asDiagonal());
    };
    const vector row_std = stds(scaled());
    iterates.push_back({row * unit, col, ratio(row_std) + ratio(stds(scaled().transpose()))});
    if (i == iterations) return iterates;
    for (Eigen::Index r = 0; r < row.size(); ++r)
      row[r] = std::clamp(row[r] * clamped_std(row_std[r]), low, high);
    const vector col_std = stds(scaled().transpose());
    for (Eigen::Index c = 0; c < col.size(); ++c)
      col[c] = std::clamp(col[c] * clamped_std(col_std[c]), low, high);
  }
}

std::size_t best_iterate(const std::vector<normalized>& iterates) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < iterates.size(); ++i)
    if (iterates[i].imbalance <= iterates[best].imbalance) best = i;
  return best;
}

// ---- Row scales ----

namespace {

// The FP8 codes of row scales: moved by a power of two towards the normal range of the type, all of
// the excess above 2^(largest exponent - 1), half of the lack below 2^(smallest exponent / 2).
std::vector<int> round_row_scales(const vector& scale, bool e4m3) {
  const int low = e4m3 ? -6 / 2 : -14 / 2;
  const int high = e4m3 ? 8 - 1 : 15 - 1;
  const double largest = scale.maxCoeff();
  const int exponent = largest > 0 ? std::ilogb(largest) : 0;
  const int shift = exponent > high  ? exponent - high
                    : exponent < low ? -((low - exponent) / 2)
                                     : 0;
  std::vector<int> codes;
  for (const double s : scale) codes.push_back(fp8_code(std::ldexp(s, -shift), e4m3));
  return codes;
}

vector root_mean_squares(const matrix& y) {
  return y.rowwise().squaredNorm().array().sqrt() / std::sqrt(static_cast<double>(y.cols()));
}

// The mean of n numbers above 2^-100 on a scale that is logarithmic from octave to octave and
// linear within one, cut to 1/2^13 of an octave; 0 where there is none.
double typical(const vector& values) {
  double sum = 0;
  int count = 0;
  for (const double x : values) {
    if (x < std::ldexp(1, -100)) continue;
    const int exponent = std::ilogb(x);
    sum += std::floor(std::ldexp(exponent + std::ldexp(x, -exponent) - 1, 13));
    ++count;
  }
  if (count == 0) return 0;
  const double mean = std::ldexp(std::floor(sum / count), -13);
  const double octave = std::floor(mean);
  return std::ldexp(1 + mean - octave, static_cast<int>(octave));
}

// `scale` times what makes its typical entry the power of two at or below `magnitude`.
vector centered(const vector& scale, double magnitude) {
  const double level = typical(scale);
  return level == 0 ? scale : vector(scale * (std::ldexp(1, std::ilogb(magnitude)) / level));
}

vector rms_scales(const matrix& y) {
  const vector scale = root_mean_squares(y);
  return centered(scale, typical(scale));
}

// Of the tile whose columns are divided by their root mean squares, in the magnitude of the
// typical column. What is typical of the rows is taken without the factor `unit` of the rotation.
vector equalized_rms_scales(const matrix& y, double unit) {
  const vector size = root_mean_squares(y.transpose());
  const vector inverse =
      size.unaryExpr([](double x) { return x < std::ldexp(1, -100) ? 0.0 : 1 / x; });
  return centered(root_mean_squares(y / unit * inverse.asDiagonal()), typical(size));
}

vector fp8_values(const std::vector<int>& codes, bool e4m3) {
  vector values(static_cast<Eigen::Index>(codes.size()));
  for (std::size_t i = 0; i < codes.size(); ++i)
    values[static_cast<Eigen::Index>(i)] = fp8_value(codes[i], e4m3);
  return values;
}

// ---- Steps and zeros ----

// The column grids of one tile divided by its row scales.
class column_fit {
 public:
  column_fit(const vector& column, const vector& row_scale, int bits, bool e4m3)
      : y_(column.cwiseQuotient(row_scale)),
        weight_(row_scale.cwiseAbs2()),
        max_code_((1 << bits) - 1),
        e4m3_(e4m3) {}

  grid from_range(double range, bool cover) const {
    const double width = y_.maxCoeff() - y_.minCoeff();
    const double start = y_.minCoeff() + 0.5 * (1 - range) * width;
    double zero = to_binary16(start);
    if (!cover) return {zero, fp8(range * width / max_code_)};
    if (zero > start) {  // the next binary16 below
      const double magnitude = std::abs(zero);
      const int code = round_binary16()(magnitude);
      zero = zero > 0 ? round_binary16().number(code - 1)
                      : -round_binary16().number((std::min)(code + 1, binary16.max_code));
    }
    return {zero, fp8((start + range * width - zero) / max_code_)};
  }

  // Least squares of zero + step * code over the rows, weighted by the squared row scale.
  grid refitted(const grid& g) const {
    const vector c = codes(g);
    const double w = weight_.sum();
    const double code_mean = weight_.dot(c) / w;
    const double mean = weight_.dot(y_) / w;
    const double code_square = weight_.dot(c.cwiseAbs2()) / w;
    const double variance = code_square - code_mean * code_mean;
    double step = g.step;
    if (variance > 1e-6 * code_square)
      step = fp8((weight_.cwiseProduct(c).dot(y_) / w - code_mean * mean) / variance);
    return {to_binary16(mean - step * code_mean), step};
  }

  // The step under which the regression of stored on original values has slope 1, at most doubled;
  // the zero keeps the mean.
  grid unbiased(const grid& g) const {
    const vector c = codes(g);
    const vector y = y_.array() - y_.mean();
    const double variance = y.squaredNorm();
    const double covariance = y.dot(c);
    double step = g.step;
    if (variance > 0 && covariance > 0) step = fp8((std::min)(variance / covariance, 2 * g.step));
    return {to_binary16(y_.mean() - step * c.mean()), step};
  }

  grid fit(const kvarn::encoder_recipe& recipe) const {
    grid g = from_range(static_cast<double>(recipe.range), recipe.cover);
    for (int i = 0; i < recipe.refits; ++i) g = refitted(g);
    return g;
  }

 private:
  double fp8(double value) const { return fp8_value(fp8_code(value, e4m3_), e4m3_); }
  vector codes(const grid& g) const {
    return ((y_.array() - g.zero) / g.step)
        .cwiseMax(0.0)
        .cwiseMin(max_code_)
        .unaryExpr([](double x) { return std::nearbyint(x); });
  }

  vector y_;
  vector weight_;
  int max_code_;
  bool e4m3_;
};

// ---- Codes ----

// What is rounded to a code: in steps above the column's zero. Without feedback that is the value
// alone; with it, every row as GPTQ (arXiv 2210.17323) has it: the inverse of the damped second
// moment, its Cholesky factor, the error of each entry spread over those that follow.
matrix code_targets(const matrix& scaled, const std::vector<grid>& grids, int bits,
                    const matrix* second_moment, double damping) {
  const Eigen::Index cols = scaled.cols();
  matrix factor = matrix::Zero(cols, cols);
  if (second_moment != nullptr) {
    const double lambda = damping * second_moment->trace() / static_cast<double>(cols) + 1e-20;
    const Eigen::MatrixXd damped = *second_moment + lambda * Eigen::MatrixXd::Identity(cols, cols);
    const Eigen::MatrixXd inverse = damped.llt().solve(Eigen::MatrixXd::Identity(cols, cols));
    factor = inverse.llt().matrixU();
  }
  matrix targets(scaled.rows(), cols);
  for (Eigen::Index r = 0; r < scaled.rows(); ++r) {
    Eigen::RowVectorXd row = scaled.row(r);
    for (Eigen::Index c = 0; c < cols; ++c) {
      const grid& g = grids[static_cast<std::size_t>(c)];
      targets(r, c) = (row[c] - g.zero) / g.step;
      if (second_moment == nullptr) continue;
      const double code = std::nearbyint(std::clamp(targets(r, c), 0.0, (1 << bits) - 1.0));
      const double error = (row[c] - g.zero - code * g.step) / factor(c, c);
      row.tail(cols - c) -= error * factor.row(c).tail(cols - c);
    }
  }
  return targets;
}

}  // namespace

// ---- The whole tile ----

matrix tile_of(std::span<const float> tokens, const kvarn::tile_layout& layout, bool rotate) {
  using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  matrix y =
      Eigen::Map<const float_matrix>(tokens.data(), layout.group, layout.head_dim).cast<double>();
  if (rotate) y = y * hadamard(layout.head_dim);
  return layout.kind == kvarn::tile_kind::key ? y : matrix(y.transpose());
}

double row_cost(const matrix& y, Eigen::Index r, int scale_code, const std::vector<grid>& grids,
                const kvarn::tile_layout& layout, double along) {
  const double scale = fp8_value(scale_code, layout.scale == kvarn::scale_type::e4m3);
  vector error(y.cols());
  for (Eigen::Index c = 0; c < y.cols(); ++c) {
    const grid& g = grids[static_cast<std::size_t>(c)];
    const double target = (y(r, c) / scale - g.zero) / g.step;
    const double code = std::nearbyint(std::clamp(target, 0.0, (1 << layout.bits) - 1.0));
    error[c] = y(r, c) - (g.zero + code * g.step) * scale;
  }
  const double size = y.row(r).norm();
  const double part = size > 0 ? y.row(r).dot(error) / size : 0;
  return error.squaredNorm() + along * part * part;
}

namespace {

// The cheapest of the three FP8 numbers around each scale; a tie leaves it.
std::vector<int> choose_scales(const matrix& y, const std::vector<int>& scales,
                               const std::vector<grid>& grids, const kvarn::tile_layout& layout,
                               double along) {
  const int most = (layout.scale == kvarn::scale_type::e4m3 ? ocp_e4m3 : unsigned_e5m3).max_code;
  std::vector<int> chosen = scales;
  for (std::size_t r = 0; r < scales.size(); ++r) {
    const auto cost = [&](int code) {
      return row_cost(y, static_cast<Eigen::Index>(r), code, grids, layout, along);
    };
    for (const int code : {scales[r] - 1, scales[r] + 1})
      if (code >= 1 && code <= most && cost(code) < cost(chosen[r])) chosen[r] = code;
  }
  return chosen;
}

}  // namespace

encoded encode(const matrix& y, const kvarn::tile_layout& layout,
               const kvarn::encoder_recipe& recipe, const matrix* second_moment, double damping,
               const known_stages& known) {
  const bool e4m3 = layout.scale == kvarn::scale_type::e4m3;
  encoded out;
  if (known.row_scales != nullptr && !recipe.choose_scales) {
    out.fit_scales = *known.row_scales;
  } else if (recipe.scaling == kvarn::row_scaling::rms) {
    out.fit_scales = round_row_scales(rms_scales(y), e4m3);
  } else if (recipe.scaling == kvarn::row_scaling::rms_equalized) {
    out.fit_scales =
        round_row_scales(equalized_rms_scales(y, 1 / std::sqrt(layout.head_dim)), e4m3);
  } else {
    const auto iterates = normalize(y, recipe.iterations,
                                    recipe.scaling == kvarn::row_scaling::dual_axis_equivariant);
    const auto iterate =
        known.iterate < 0 ? best_iterate(iterates) : static_cast<std::size_t>(known.iterate);
    out.fit_scales = round_row_scales(iterates.at(iterate).row_scale, e4m3);
  }
  const vector fit_scale = fp8_values(out.fit_scales, e4m3);

  for (Eigen::Index c = 0; c < y.cols(); ++c) {
    const column_fit fit(y.col(c), fit_scale, layout.bits, e4m3);
    const grid codes_by =
        known.grids != nullptr ? (*known.grids)[static_cast<std::size_t>(c)] : fit.fit(recipe);
    const grid stored = recipe.unbiased ? fit.unbiased(codes_by) : codes_by;
    out.code_grids.push_back(codes_by);
    out.fields.step_code.push_back(fp8_code(stored.step, e4m3));
    const int zero = round_binary16()(stored.zero);
    out.fields.zero_bits.push_back(stored.zero < 0 ? zero | 0x8000 : zero);
  }

  out.fields.scale_code = known.row_scales != nullptr ? *known.row_scales
                          : recipe.choose_scales
                              ? choose_scales(y, out.fit_scales, out.code_grids, layout,
                                              static_cast<double>(recipe.along))
                              : out.fit_scales;
  const vector scale = fp8_values(out.fields.scale_code, e4m3);
  out.targets = code_targets(scale.cwiseInverse().asDiagonal() * y, out.code_grids, layout.bits,
                             recipe.error_feedback ? second_moment : nullptr, damping);
  for (const double target : out.targets.reshaped<Eigen::RowMajor>())
    out.fields.codes.push_back(static_cast<int>(
        std::nearbyint(std::clamp(target, 0.0, static_cast<double>((1 << layout.bits) - 1)))));
  return out;
}

matrix decode(const record_fields& fields, const kvarn::tile_layout& layout) {
  const bool e4m3 = layout.scale == kvarn::scale_type::e4m3;
  const auto [rows, cols] = extent_of(layout);
  matrix y(rows, cols);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; ++c) {
      const auto col = static_cast<std::size_t>(c);
      const int bits = fields.zero_bits[col];
      const double zero = (bits < 0x8000 ? 1 : -1) * binary16.value(bits & 0x7fff);
      y(r, c) = (fields.codes[static_cast<std::size_t>(r * cols + c)] *
                     fp8_value(fields.step_code[col], e4m3) +
                 zero) *
                fp8_value(fields.scale_code[static_cast<std::size_t>(r)], e4m3);
    }
  return y;
}

matrix tokens_of(const matrix& y, const kvarn::tile_layout& layout, bool rotate_back) {
  const matrix tokens = layout.kind == kvarn::tile_kind::key ? y : matrix(y.transpose());
  return rotate_back ? matrix(tokens * hadamard(layout.head_dim)) : tokens;
}

}  // namespace kvarn_test::oracle
