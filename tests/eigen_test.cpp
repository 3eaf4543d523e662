// Eigen matrices in and out: every scalar, storage order and stride against the plain functions.
#include "kvarn/eigen.hpp"

#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/oracle.hpp"
#include "support/tiles.hpp"

namespace {

using Eigen::Dynamic;
using kvarn::attend_matrix;
using kvarn::decode_matrix;
using kvarn::encode_matrix;
using kvarn::error_code;
using kvarn::head_matrix;
using kvarn::tile_kind;
using kvarn::tile_layout;
using kvarn::tokens;
using kvarn::tokens_view;

// rows x cols numbers, every one different and exact in bfloat16's 8 bits.
template <class Matrix>
void fill(Matrix&& m) {
  for (Eigen::Index r = 0; r < m.rows(); ++r)
    for (Eigen::Index c = 0; c < m.cols(); ++c)
      m(r, c) = static_cast<typename std::remove_cvref_t<Matrix>::Scalar>(
          static_cast<float>(r * m.cols() + c - 20));
}

// Reads every element through the view, and writes through it where it can.
template <class Matrix>
void expect_viewed(Matrix&& m) {
  const auto view = tokens(m);
  using view_type = std::remove_const_t<decltype(view)>;
  for (int t = 0; t < m.rows(); ++t)
    for (int d = 0; d < m.cols(); ++d) {
      ASSERT_EQ(view.load(t, d), static_cast<float>(m(t, d)));
      if constexpr (!std::is_same_v<view_type, tokens_view<const typename view_type::element>>) {
        view.store(t, d, -3.5f);
        ASSERT_EQ(static_cast<float>(m(t, d)), -3.5f);
      }
    }
}

template <class Scalar>
class EigenTokens : public testing::Test {};

struct test_names {
  template <class Scalar>
  static std::string GetName(int) {
    return std::is_same_v<Scalar, float>             ? "float32"
           : std::is_same_v<Scalar, Eigen::half>     ? "EigenHalf"
           : std::is_same_v<Scalar, Eigen::bfloat16> ? "EigenBfloat16"
           : std::is_same_v<Scalar, kvarn::float16>  ? "Float16"
                                                     : "Bfloat16";
  }
};
using scalars =
    testing::Types<float, Eigen::half, Eigen::bfloat16, kvarn::float16, kvarn::bfloat16>;
TYPED_TEST_SUITE(EigenTokens, scalars, test_names);

TYPED_TEST(EigenTokens, StorageOrders) {
  Eigen::Matrix<TypeParam, Dynamic, Dynamic, Eigen::RowMajor> rows(5, 7);
  fill(rows);
  expect_viewed(rows);
  Eigen::Matrix<TypeParam, Dynamic, Dynamic> columns(5, 7);
  fill(columns);
  expect_viewed(columns);
  Eigen::Matrix<TypeParam, 5, 7> fixed;
  fill(fixed);
  expect_viewed(fixed);
  Eigen::Array<TypeParam, 5, Dynamic, Eigen::RowMajor> array(5, 7);
  fill(array);
  expect_viewed(array);
  Eigen::Matrix<TypeParam, 1, Dynamic> one(7);
  fill(one);
  expect_viewed(one);
}

TYPED_TEST(EigenTokens, BlocksMapsAndRefs) {
  using matrix = Eigen::Matrix<TypeParam, Dynamic, Dynamic>;
  matrix m(9, 11);
  fill(m);
  expect_viewed(m.block(2, 3, 4, 5));
  expect_viewed(m.middleRows(1, 6));
  expect_viewed(m.row(4));
  expect_viewed(m.transpose());
  fill(m);
  EXPECT_EQ(tokens(m.block(2, 3, 4, 5)).load(1, 2), static_cast<float>(m(3, 5)));
  Eigen::Ref<matrix> ref = m.rightCols(4);
  expect_viewed(ref);

  // A map with both strides, as an engine lays heads beside each other.
  std::vector<TypeParam> memory(400);
  Eigen::Map<Eigen::Matrix<TypeParam, Dynamic, Dynamic, Eigen::RowMajor>, 0,
             Eigen::Stride<Dynamic, Dynamic>>
      strided(memory.data() + 3, 6, 5, Eigen::Stride<Dynamic, Dynamic>(40, 2));
  fill(strided);
  expect_viewed(strided);
  EXPECT_EQ(tokens(strided).token_stride, 40);
  EXPECT_EQ(tokens(strided).channel_stride, 2);
}

TYPED_TEST(EigenTokens, ReadOnlyWhereTheMatrixIs) {
  using matrix = Eigen::Matrix<TypeParam, Dynamic, Dynamic>;
  matrix m(3, 4);
  fill(m);
  const matrix& read_only = m;
  const Eigen::Map<const matrix> map(m.data(), 3, 4);
  using element = typename decltype(tokens(m))::element;
  static_assert(std::is_same_v<decltype(tokens(m)), tokens_view<element>>);
  static_assert(std::is_same_v<decltype(tokens(m.topRows(2))), tokens_view<element>>);
  static_assert(std::is_same_v<decltype(tokens(read_only)), tokens_view<const element>>);
  static_assert(std::is_same_v<decltype(tokens(read_only.topRows(2))), tokens_view<const element>>);
  static_assert(std::is_same_v<decltype(tokens(map)), tokens_view<const element>>);
  expect_viewed(read_only);
  expect_viewed(map);
  EXPECT_EQ(static_cast<const void*>(tokens(read_only).data), m.data());
}

// ---- Encoding and decoding ----

head_matrix<float> numbers(const tile_layout& layout, std::uint64_t seed) {
  const auto values = kvarn_test::random_tokens(layout.group, layout.head_dim, seed);
  return Eigen::Map<const head_matrix<float>>(values.data(), layout.group, layout.head_dim);
}

std::vector<std::byte> plain_encoding(const head_matrix<float>& m, const tile_layout& layout,
                                      const kvarn::encode_options& options = {}) {
  return kvarn_test::encode(layout, std::vector<float>(m.data(), m.data() + m.size()), options)
      .record;
}

TEST(EncodeMatrix, BytesOfThePlainEncoder) {
  for (const auto& layout :
       {tile_layout{tile_kind::key, 64, 128, 2}, tile_layout{tile_kind::value, 80, 64, 3}}) {
    const auto m = numbers(layout, 1);
    const auto want = plain_encoding(m, layout);
    EXPECT_EQ(encode_matrix(m, layout).value(), want);
    EXPECT_EQ(encode_matrix(Eigen::MatrixXf(m), layout).value(), want);
    EXPECT_EQ(encode_matrix(m.array(), layout).value(), want);
    EXPECT_EQ(encode_matrix(m.cast<double>().cast<float>(), layout).value(), want);
    EXPECT_EQ(encode_matrix(0.5f * (m + m), layout).value(), want);

    Eigen::MatrixXf larger = Eigen::MatrixXf::Constant(layout.group + 5, layout.head_dim + 3, 9e4f);
    larger.block(2, 1, layout.group, layout.head_dim) = m;
    EXPECT_EQ(encode_matrix(larger.block(2, 1, layout.group, layout.head_dim), layout).value(),
              want);

    const Eigen::Matrix<Eigen::half, Dynamic, Dynamic> half = m.cast<Eigen::half>();
    EXPECT_EQ(encode_matrix(half, layout).value(), plain_encoding(half.cast<float>(), layout));
    const Eigen::Matrix<Eigen::bfloat16, Dynamic, Dynamic> brain = m.cast<Eigen::bfloat16>();
    EXPECT_EQ(encode_matrix(brain, layout).value(), plain_encoding(brain.cast<float>(), layout));
  }
}

TEST(EncodeMatrix, OptionsAndReport) {
  const tile_layout layout{tile_kind::key, 64, 128, 2};
  auto m = numbers(layout, 2);
  const kvarn::query_factor factor(kvarn_test::random_moment(64, 100, 3));
  const kvarn::encode_options options{
      .method = kvarn::encoder::query_aware, .rotate = false, .factor = &factor};
  const auto want = plain_encoding(m, layout, options);
  EXPECT_NE(want, plain_encoding(m, layout));
  EXPECT_EQ(encode_matrix(m, layout, options).value(), want);

  m(3, 4) = std::numeric_limits<float>::quiet_NaN();
  m(5, 6) = std::numeric_limits<float>::infinity();
  m(7, 8) = -1e6f;
  kvarn::encode_report report;
  ASSERT_TRUE(encode_matrix(m, layout, {}, &report).ok());
  EXPECT_EQ(report.replaced, (kvarn::replaced_values{.nan = 1, .saturated = 2}));
}

TEST(DecodeMatrix, NumbersOfThePlainDecoder) {
  for (const auto& layout :
       {tile_layout{tile_kind::key, 64, 128, 2}, tile_layout{tile_kind::value, 80, 64, 3}}) {
    const auto record = plain_encoding(numbers(layout, 4), layout);
    for (const bool rotate_back : {true, false}) {
      const auto values = kvarn_test::decode(layout, record, rotate_back);
      const Eigen::Map<const head_matrix<float>> want(values.data(), layout.group, layout.head_dim);
      EXPECT_EQ(decode_matrix(record, layout, rotate_back).value(), want);
      // Both sides round to nearest even.
      EXPECT_EQ(decode_matrix<Eigen::half>(record, layout, rotate_back).value(),
                want.cast<Eigen::half>());
      EXPECT_EQ(decode_matrix<Eigen::bfloat16>(record, layout, rotate_back).value(),
                want.cast<Eigen::bfloat16>());
    }
    // Into a matrix that is there already: the plain decoder and a view.
    Eigen::MatrixXf columns(layout.group, layout.head_dim);
    kvarn::decode_tile(kvarn::const_tile_view{record.data(), layout}, tokens(columns));
    EXPECT_EQ(columns, decode_matrix(record, layout).value());
  }
}

TEST(HadamardRows, IsTheRotation) {
  for (const int dim : {1, 2, 12, 64, 80, 96, 112}) {
    const Eigen::MatrixXf original = Eigen::MatrixXf::Random(5, dim);
    const kvarn_test::oracle::matrix want =
        original.cast<double>() * kvarn_test::oracle::hadamard(dim);
    Eigen::MatrixXf m = original;
    ASSERT_TRUE(kvarn::hadamard_rows(m).ok());
    EXPECT_LT((m.cast<double>() - want).cwiseAbs().maxCoeff(), 1e-6);
    ASSERT_TRUE(kvarn::hadamard_rows(m).ok());
    EXPECT_LT((m - original).cwiseAbs().maxCoeff(), 1e-6f);

    Eigen::Matrix<Eigen::half, Dynamic, Dynamic, Eigen::RowMajor> half =
        original.cast<Eigen::half>();
    ASSERT_TRUE(kvarn::hadamard_rows(half).ok());
    EXPECT_LT((half.cast<double>() - want).cwiseAbs().maxCoeff(), 4e-3);

    Eigen::MatrixXf larger = Eigen::MatrixXf::Constant(7, dim + 2, 3.0f);
    larger.block(1, 1, 5, dim) = original;
    ASSERT_TRUE(kvarn::hadamard_rows(larger.block(1, 1, 5, dim)).ok());
    EXPECT_LT((larger.block(1, 1, 5, dim).cast<double>() - want).cwiseAbs().maxCoeff(), 1e-6);
    EXPECT_EQ((larger.array() == 3.0f).count(), 7 * (dim + 2) - 5 * dim);
  }
}

// ---- Attention ----

struct attention_fixture {
  attention_fixture() {
    for (Eigen::MatrixXf* m : {&sink_keys, &sink_values})
      if (!kvarn::hadamard_rows(*m).ok()) throw std::runtime_error("no rotation");
    keys = encode_matrix(numbers(format.key_layout(), 5), format.key_layout()).value();
    values = encode_matrix(numbers(format.value_layout(), 6), format.value_layout()).value();
    group = {keys.data(), values.data(), 9, 100};
    memory = {format,
              {tokens(std::as_const(sink_keys)), tokens(std::as_const(sink_values)), 0, 9},
              {&group, 1},
              {}};
  }

  kvarn::cache_format format{.key_head_dim = 64, .value_head_dim = 80, .value_bits = 3};
  Eigen::MatrixXf sink_keys = Eigen::MatrixXf::Random(9, 64);
  Eigen::MatrixXf sink_values = Eigen::MatrixXf::Random(9, 80);
  std::vector<std::byte> keys, values;
  kvarn::sealed_group group;
  kvarn::attention_memory<float> memory;
  kvarn::attention_options options{.softmax_scale = 0.125f};
};

TEST(AttendMatrix, BitsOfAttend) {
  const attention_fixture f;
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(6, 64);
  head_matrix<float> want(6, 80);
  std::vector<float> want_lse(6), lse, workspace(kvarn::attention_workspace(f.format));
  kvarn::attend(kvarn::attention_queries<float>{tokens(q), 3, 2, 106}, f.memory, f.options,
                tokens(want), want_lse.data(), workspace.data());

  EXPECT_EQ(attend_matrix(q, 2, 106, f.memory, f.options, &lse).value(), want);
  EXPECT_EQ(lse, want_lse);
  EXPECT_EQ(attend_matrix(head_matrix<float>(q), 2, 106, f.memory, f.options).value(), want);
  EXPECT_EQ(attend_matrix(0.5f * (q + q), 2, 106, f.memory, f.options).value(), want);

  const Eigen::Matrix<Eigen::half, Dynamic, Dynamic> half = q.cast<Eigen::half>();
  EXPECT_EQ(attend_matrix(half, 2, 106, f.memory, f.options).value(),
            attend_matrix(half.cast<float>(), 2, 106, f.memory, f.options).value());
}

// ---- Errors ----

template <class T>
std::string refusal(const kvarn::result<T>& result,
                    error_code code = error_code::invalid_argument) {
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.why().code(), code);
  return result.why().message();
}

TEST(EigenErrors, NameTheValue) {
  const tile_layout layout{tile_kind::key, 64, 128, 2};
  EXPECT_EQ(refusal(encode_matrix(Eigen::MatrixXf::Zero(127, 64), layout)),
            "token matrix is 127 x 64; it must be 128 x 64 (tokens x head_dim)");
  EXPECT_EQ(refusal(encode_matrix(Eigen::MatrixXf::Zero(64, 128), layout)),
            "token matrix is 64 x 128; it must be 128 x 64 (tokens x head_dim)");
  EXPECT_NE(refusal(encode_matrix(Eigen::MatrixXf::Zero(128, 63), {.head_dim = 63}),
                    error_code::invalid_format)
                .find("head_dim is 63"),
            std::string::npos);
  EXPECT_NE(refusal(encode_matrix(Eigen::MatrixXf::Zero(128, 64), layout,
                                  {.method = kvarn::encoder::query_aware}))
                .find("query_factor"),
            std::string::npos);

  const auto record = encode_matrix(Eigen::MatrixXf::Zero(128, 64), layout).value();
  EXPECT_NE(refusal(decode_matrix(std::span(record).first(record.size() - 1), layout),
                    error_code::short_buffer)
                .find(std::to_string(record.size() - 1)),
            std::string::npos);
  auto damaged = record;
  damaged[layout.step_offset() + 5] = std::byte{0xff};
  EXPECT_NE(refusal(decode_matrix(damaged, layout), error_code::invalid_data).find("step 5"),
            std::string::npos);

  Eigen::MatrixXf odd = Eigen::MatrixXf::Zero(2, 30);
  const kvarn::status rotation = kvarn::hadamard_rows(odd);
  EXPECT_EQ(rotation.code(), error_code::invalid_argument);
  EXPECT_EQ(rotation.message(),
            "matrix is 2 x 30; the number of columns must be 1, 12, 20 or 28 times a power of two");

  const attention_fixture f;
  const auto attend = [&](int rows, int cols, int heads) {
    return attend_matrix(Eigen::MatrixXf::Zero(rows, cols), heads, 100, f.memory, f.options);
  };
  EXPECT_EQ(refusal(attend(6, 80, 2)),
            "query matrix is 6 x 80; it must be 6 x 64 (tokens x head_dim)");
  for (const int heads : {0, -1, 4})
    EXPECT_EQ(refusal(attend(6, 64, heads)),
              "query matrix has 6 rows; it must be a multiple of the heads, of which there are " +
                  std::to_string(heads));
  EXPECT_NE(refusal(attend_matrix(Eigen::MatrixXf::Zero(2, 64), 2, 100, f.memory, {}))
                .find("softmax_scale is 0"),
            std::string::npos);
  auto memory = f.memory;
  memory.format.value_bits = 5;
  EXPECT_NE(refusal(attend_matrix(Eigen::MatrixXf::Zero(2, 64), 2, 100, memory, f.options),
                    error_code::invalid_format)
                .find("value bits is 5"),
            std::string::npos);
}

}  // namespace
