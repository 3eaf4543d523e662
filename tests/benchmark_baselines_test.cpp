// What the benchmarks compare with computes attention, and reads what it says it reads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../benchmarks/baselines/dense.hpp"
#include "kvarn/metrics.hpp"
#include "support/profiles.hpp"

namespace {

using namespace kvarn_bench;

std::vector<float> normal_numbers(int count, std::uint64_t seed) {
  kvarn_test::gaussian_source random(seed);
  std::vector<float> numbers;
  for (int i = 0; i < count; ++i) numbers.push_back(static_cast<float>(random.normal()));
  return numbers;
}

std::vector<kvarn::float16> to_half(const std::vector<float>& numbers) {
  std::vector<kvarn::float16> halves;
  for (const float x : numbers) halves.push_back(kvarn::float16::saturated(x));
  return halves;
}

// In double precision.
template <class T>
std::vector<float> reference(const std::vector<T>& keys, const std::vector<T>& values, int tokens,
                             int dim, const std::vector<float>& queries, int rows, double scale) {
  std::vector<float> out;
  for (int h = 0; h < rows; ++h) {
    std::vector<double> weights, total(static_cast<std::size_t>(dim));
    double sum = 0;
    for (int t = 0; t < tokens; ++t) {
      double score = 0;
      for (int d = 0; d < dim; ++d)
        score +=
            static_cast<double>(queries[static_cast<std::size_t>(h * dim + d)]) *
            static_cast<double>(static_cast<float>(keys[static_cast<std::size_t>(t * dim + d)]));
      const double weight = std::exp(score * scale);
      sum += weight;
      for (int d = 0; d < dim; ++d)
        total[static_cast<std::size_t>(d)] +=
            weight *
            static_cast<double>(static_cast<float>(values[static_cast<std::size_t>(t * dim + d)]));
    }
    for (const double x : total) out.push_back(static_cast<float>(x / sum));
  }
  return out;
}

struct target_kernels {
  std::string name;
  const dense_kernels* kernels;
};

std::vector<target_kernels> available_kernels() {
  std::vector<target_kernels> all;
  for (const kvarn::target_info& info : kvarn::target_infos)
    if (kvarn::is_available(info.id) && dense_kernels_of(info.id) != nullptr)
      all.push_back({std::string(info.name), dense_kernels_of(info.id)});
  return all;
}

TEST(dense_baselines, half_attention_is_attention) {
  for (const auto& [name, kernels] : available_kernels())
    for (const int dim : {64, 128, 256})
      for (const int rows : {1, 2, 3, 4, 6, 8, 32}) {
        constexpr int tokens = 3 * block_tokens;
        const auto keys = to_half(normal_numbers(tokens * dim, 1));
        const auto values = to_half(normal_numbers(tokens * dim, 2));
        const auto queries = normal_numbers(rows * dim, 3);
        const float scale = 2.0f / std::sqrt(static_cast<float>(dim));
        std::vector<float> out(queries.size());
        attention_state state(rows, dim);
        kernels->attend_half({keys.data(), values.data(), tokens, dim},
                             {queries.data(), rows, scale, out.data()}, state);
        const auto expected =
            reference(keys, values, tokens, dim, queries, rows, static_cast<double>(scale));
        EXPECT_LT(kvarn::relative_squared_error(expected, out), 1e-10)
            << name << " D" << dim << " rows " << rows;
      }
}

TEST(dense_baselines, byte_attention_is_attention_with_the_error_of_8_bits) {
  for (const auto& [name, kernels] : available_kernels()) {
    if (kernels->attend_bytes == nullptr) continue;
    for (const int dim : {64, 128, 256})
      for (const int rows : {1, 2, 4, 7, 8}) {
        constexpr int tokens = 3 * block_tokens;
        const auto keys = normal_numbers(tokens * dim, 1);
        const auto values = normal_numbers(tokens * dim, 2);
        const auto queries = normal_numbers(rows * dim, 3);
        const float scale = 2.0f / std::sqrt(static_cast<float>(dim));
        byte_memory memory{nullptr, nullptr, tokens, dim};
        const auto tile = static_cast<std::size_t>(memory.tile_bytes());
        std::vector<std::byte> packed_keys(tokens / 16 * tile), packed_values(tokens / 16 * tile);
        for (std::size_t t = 0; t < tokens / 16; ++t) {
          const std::size_t first = t * 16 * static_cast<std::size_t>(dim);
          quantize_bytes(keys.data() + first, dim, packed_keys.data() + t * tile);
          quantize_bytes(values.data() + first, dim, packed_values.data() + t * tile);
        }
        memory.keys = packed_keys.data();
        memory.values = packed_values.data();
        std::vector<float> out(queries.size());
        attention_state state(rows, dim);
        kernels->attend_bytes(memory, {queries.data(), rows, scale, out.data()}, state);
        const auto expected =
            reference(keys, values, tokens, dim, queries, rows, static_cast<double>(scale));
        const double error = kvarn::relative_squared_error(expected, out);
        EXPECT_LT(error, 1e-3) << name << " D" << dim << " rows " << rows;
        EXPECT_GT(error, 1e-6) << name << " D" << dim << " rows " << rows;
      }
  }
}

// A bit in any byte reaches the result.
TEST(dense_baselines, stream_read_reads_every_byte) {
  for (const auto& [name, kernels] : available_kernels()) {
    std::vector<std::byte> bytes(8192);
    const auto size = static_cast<std::ptrdiff_t>(bytes.size());
    EXPECT_EQ(kernels->stream_read(bytes.data(), size), 0u) << name;
    for (std::byte& b : bytes) {
      b = std::byte{0x40};
      ASSERT_NE(kernels->stream_read(bytes.data(), size), 0u) << name << " " << &b - bytes.data();
      b = std::byte{0};
    }
  }
}

}  // namespace
