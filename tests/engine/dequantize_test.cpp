// Dequantisation: blocks packed here from known codes, blocks decoded by the Python package gguf,
// and bad requests.
#include "../examples/engine/dequantize.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kvarn/format/float16.hpp"
#include "support/gguf_writer.hpp"

namespace {

using kvarn_engine::dequantize;
using kvarn_engine::dequantize_row;
using kvarn_engine::ggml_type;
using kvarn_engine::gguf_file;
using kvarn_engine::gguf_tensor;

void put16(std::string& out, std::uint16_t bits) {
  out += static_cast<char>(bits & 255);
  out += static_cast<char>(bits >> 8);
}

// A random factor, exactly a float16, appended.
float put_factor(std::string& out, std::mt19937& random) {
  const kvarn::float16 factor(std::normal_distribution<float>(0, 0.1f)(random));
  put16(out, factor.bits);
  return static_cast<float>(factor);
}

int draw(std::mt19937& random, int count) {
  return static_cast<int>(random() % static_cast<unsigned>(count));
}

// A block and the numbers that its definition gives.
struct example {
  std::string block;
  std::vector<float> values;
};

// Codes are written bit by bit, to the place that the layout's description gives them.
void set_bits(std::string& bytes, std::size_t at, int shift, int value) {
  bytes[at] = static_cast<char>(static_cast<unsigned char>(bytes[at]) | value << shift);
}

example q8_0(std::mt19937& random) {
  example e;
  const float d = put_factor(e.block, random);
  for (int i = 0; i < 32; ++i) {
    const int code = draw(random, 256) - 128;
    e.block += static_cast<char>(code);
    e.values.push_back(d * static_cast<float>(code));
  }
  return e;
}

example q4_or_q5(std::mt19937& random, int bits, bool has_minimum) {
  example e;
  const float d = put_factor(e.block, random);
  const float m = has_minimum ? put_factor(e.block, random) : 0.0f;
  const std::size_t fifths = e.block.size();
  const std::size_t codes = fifths + (bits == 5 ? 4 : 0);
  e.block.resize(codes + 16);
  for (std::size_t i = 0; i < 32; ++i) {
    const int code = draw(random, 1 << bits);
    if (bits == 5) set_bits(e.block, fifths + i / 8, static_cast<int>(i % 8), code >> 4);
    set_bits(e.block, codes + i % 16, i < 16 ? 0 : 4, code & 15);
    const int signed_code = has_minimum ? code : code - (bits == 5 ? 16 : 8);
    e.values.push_back(d * static_cast<float>(signed_code) + m);
  }
  return e;
}

example q4_k(std::mt19937& random) {
  example e;
  const float d = put_factor(e.block, random);
  const float e_factor = put_factor(e.block, random);
  e.block.resize(144);
  for (std::size_t part = 0; part < 8; ++part) {
    const int scale = draw(random, 64);
    const int minimum = draw(random, 64);
    if (part < 4) {
      set_bits(e.block, 4 + part, 0, scale);
      set_bits(e.block, 8 + part, 0, minimum);
    } else {
      set_bits(e.block, 8 + part, 0, scale & 15);
      set_bits(e.block, 8 + part, 4, minimum & 15);
      set_bits(e.block, part, 6, scale >> 4);
      set_bits(e.block, 4 + part, 6, minimum >> 4);
    }
    for (std::size_t i = 0; i < 32; ++i) {
      const int code = draw(random, 16);
      set_bits(e.block, 16 + part / 2 * 32 + i, part % 2 == 0 ? 0 : 4, code);
      e.values.push_back(d * static_cast<float>(scale * code) -
                         e_factor * static_cast<float>(minimum));
    }
  }
  return e;
}

example q6_k(std::mt19937& random) {
  example e;
  e.block.resize(208);
  const float d = put_factor(e.block, random);
  for (std::size_t i = 0; i < 256; ++i) {
    if (i % 16 == 0) e.block[192 + i / 16] = static_cast<char>(draw(random, 256) - 128);
    const int scale = static_cast<signed char>(e.block[192 + i / 16]);
    const int code = draw(random, 64);
    const std::size_t half = i / 128;
    const std::size_t quarter = i % 128 / 32;
    const std::size_t within = i % 32;
    set_bits(e.block, half * 64 + quarter % 2 * 32 + within, quarter < 2 ? 0 : 4, code & 15);
    set_bits(e.block, 128 + half * 32 + within, static_cast<int>(2 * quarter), code >> 4);
    e.values.push_back(d * static_cast<float>(scale) * static_cast<float>(code - 32));
  }
  return e;
}

example make_example(ggml_type type, std::mt19937& random) {
  switch (type) {
    case ggml_type::q4_0:
      return q4_or_q5(random, 4, false);
    case ggml_type::q4_1:
      return q4_or_q5(random, 4, true);
    case ggml_type::q5_0:
      return q4_or_q5(random, 5, false);
    case ggml_type::q5_1:
      return q4_or_q5(random, 5, true);
    case ggml_type::q8_0:
      return q8_0(random);
    case ggml_type::q4_k:
      return q4_k(random);
    case ggml_type::q6_k:
      return q6_k(random);
    default:
      break;
  }
  example e;
  const float value = std::normal_distribution<float>()(random);
  if (type == ggml_type::f32) {
    e.block.assign(reinterpret_cast<const char*>(&value), 4);
    e.values = {value};
  } else if (type == ggml_type::f16) {
    put16(e.block, kvarn::float16(value).bits);
    e.values = {static_cast<float>(kvarn::float16(value))};
  } else {
    const auto upper = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    put16(e.block, upper);
    e.values = {std::bit_cast<float>(std::uint32_t{upper} << 16)};
  }
  return e;
}

constexpr ggml_type readable[] = {
    ggml_type::f32,  ggml_type::f16,  ggml_type::bf16, ggml_type::q4_0, ggml_type::q4_1,
    ggml_type::q5_0, ggml_type::q5_1, ggml_type::q8_0, ggml_type::q4_k, ggml_type::q6_k};

TEST(Dequantize, BlocksPackedByHand) {
  std::mt19937 random(3);
  for (const ggml_type type : readable) {
    SCOPED_TRACE(name_of(type));
    constexpr std::uint64_t blocks_of_row = 3;
    constexpr std::uint64_t rows = 4;
    std::string data;
    std::vector<float> expected;
    for (std::uint64_t i = 0; i < blocks_of_row * rows; ++i) {
      const example e = make_example(type, random);
      data += e.block;
      expected.insert(expected.end(), e.values.begin(), e.values.end());
    }
    const std::uint64_t cols = expected.size() / rows;
    kvarn_test::gguf_writer writer;
    writer.add_tensor("t", type, {cols, 2, 2}, data);
    const auto file = gguf_file::from_bytes(writer.bytes()).value();
    const auto tensor = file.get_tensor("t").value();

    const auto matrix = dequantize(tensor).value();
    ASSERT_EQ(matrix.rows(), static_cast<Eigen::Index>(rows));
    ASSERT_EQ(matrix.cols(), static_cast<Eigen::Index>(cols));
    for (std::size_t i = 0; i < expected.size(); ++i)
      ASSERT_EQ(matrix.data()[i], expected[i]) << "element " << i;
    std::vector<float> row(cols);
    for (std::uint64_t r = 0; r < rows; ++r) {
      ASSERT_TRUE(dequantize_row(tensor, r, row).ok());
      EXPECT_TRUE(std::equal(row.begin(), row.end(), matrix.data() + r * cols));
    }
  }
}

// tests/data/dequantize.json: what the Python package gguf makes of random blocks.
TEST(Dequantize, BlocksOfThePythonPackage) {
  std::ifstream input(std::filesystem::path(KVARN_TEST_DATA_DIR) / "dequantize.json");
  const auto examples = nlohmann::json::parse(input);
  ASSERT_EQ(examples.size(), 7u);
  std::size_t found = 0;
  for (const ggml_type type : readable) {
    if (!examples.contains(name_of(type))) continue;
    ++found;
    const auto& e = examples[name_of(type)];
    const auto hex = e["block"].get<std::string>();
    std::vector<std::byte> block;
    for (std::size_t i = 0; i < hex.size(); i += 2)
      block.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
    const auto bits = e["value_bits"].get<std::vector<std::uint32_t>>();
    const gguf_tensor tensor{"t", type, 1, {bits.size(), 1, 1, 1}, block};
    const auto values = dequantize(tensor).value();
    for (std::size_t i = 0; i < bits.size(); ++i)
      ASSERT_EQ(values.data()[i], std::bit_cast<float>(bits[i])) << name_of(type) << " " << i;
  }
  EXPECT_EQ(found, examples.size());
}

TEST(Dequantize, OtherTypesAreNamed) {
  kvarn_test::gguf_writer writer;
  writer.add_tensor("t", static_cast<ggml_type>(11), {256}, std::string(110, 'x'));
  const auto file = gguf_file::from_bytes(writer.bytes()).value();
  const auto tensor = file.get_tensor("t").value();
  std::vector<float> row(256);
  for (const auto& why : {dequantize(tensor).why(), dequantize_row(tensor, 0, row)}) {
    EXPECT_EQ(why.code(), kvarn::error_code::invalid_format);
    EXPECT_EQ(why.message(),
              "tensor 't' is Q3_K; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q6_K can "
              "be dequantised");
  }
}

TEST(Dequantize, RowsOutOfRange) {
  kvarn_test::gguf_writer writer;
  writer.add_tensor("t", ggml_type::f32, {2, 2}, std::string(16, '\0'));
  const auto file = gguf_file::from_bytes(writer.bytes()).value();
  const auto tensor = file.get_tensor("t").value();
  std::vector<float> row(3);
  EXPECT_TRUE(dequantize_row(tensor, 1, std::span(row).first(2)).ok());
  EXPECT_EQ(dequantize_row(tensor, 2, std::span(row).first(2)).message(),
            "row 2 into 2 numbers; tensor 't' has 2 rows of 2");
  EXPECT_EQ(dequantize_row(tensor, 0, row).code(), kvarn::error_code::invalid_argument);
}

}  // namespace
