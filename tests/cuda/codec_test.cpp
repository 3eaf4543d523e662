// Encoding, decoding and query moments on the device against the CPU library, byte for byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/launch.hpp"
#include "kvarn/codec/query_moment.hpp"
#include "kvarn/codec/tile_codec.hpp"
#include "support/layouts.hpp"
#include "support/tile_inputs.hpp"
#include "support/tiles.hpp"

namespace {

using kvarn::encoder;
using kvarn::tile_kind;
using kvarn::tile_layout;
using kvarn_test::check;
using kvarn_test::device_array;
using kvarn_test::launch;
namespace cuda = kvarn::cuda;

kvarn::cache_format format_of(const tile_layout& layout) {
  return {layout.head_dim, layout.head_dim, layout.group, layout.bits, layout.bits, layout.scale};
}

// Vectors [token][head][channel] on the host, with strides that no vector instruction fits unless
// `plain`.
template <class T>
struct token_memory {
  std::vector<T> values;
  cuda::token_strides strides;

  token_memory(int tokens, int heads, int dim, bool plain) {
    strides.channel = plain ? 1 : 2;
    strides.head = dim * strides.channel + (plain ? 0 : 3);
    strides.token = heads * strides.head + (plain ? 0 : 5);
    values.assign(static_cast<std::size_t>(tokens * strides.token), T(77.0f));
  }
  std::size_t index(int token, int head, int channel) const {
    return static_cast<std::size_t>(token * strides.token + head * strides.head +
                                    channel * strides.channel);
  }
  kvarn::tokens_view<const T> view(int head) const {
    return {values.data() + head * strides.head, strides.token, strides.channel};
  }
};

struct encode_case {
  tile_layout layout;
  encoder method = encoder::tuned;
  int heads = 2;
  bool plain = true;
  bool rotate = true;
};

// Encodes the tiles `inputs` (one per head and group) on both sides and compares whole pages.
template <class T>
void expect_equal_pages(const encode_case& c, const std::vector<std::vector<float>>& inputs) {
  const kvarn::cache_format format = format_of(c.layout);
  const int groups = static_cast<int>(inputs.size()) / c.heads;
  const auto page_bytes = format.page_bytes(c.heads);
  const int dim = c.layout.head_dim;
  std::vector<float> factors;
  for (int h = 0; h < c.heads; ++h) {
    const float* const upper = kvarn_test::fixed_factor(dim).upper();
    factors.insert(factors.end(), upper, upper + std::ptrdiff_t{dim} * dim);
  }
  const device_array<float> device_factors(factors);
  const device_array<std::byte> pages(page_bytes * static_cast<std::size_t>(groups));
  std::vector<std::byte> expected(pages.size(), std::byte{0xa5});
  std::vector<kvarn::encode_report> reports;
  kvarn::replaced_values replaced;

  std::vector<token_memory<T>> memory;
  std::vector<std::unique_ptr<device_array<T>>> device;
  std::vector<cuda::encode_group> table;
  std::vector<float> workspace(kvarn::encode_workspace(c.layout));
  for (int g = 0; g < groups; ++g) {
    token_memory<T>& m = memory.emplace_back(c.layout.group, c.heads, dim, c.plain);
    for (int h = 0; h < c.heads; ++h)
      for (int t = 0; t < c.layout.group; ++t)
        for (int d = 0; d < dim; ++d)
          m.values[m.index(t, h, d)] =
              static_cast<T>(inputs[static_cast<std::size_t>(g * c.heads + h)]
                                   [static_cast<std::size_t>(t * dim + d)]);
    device.push_back(std::make_unique<device_array<T>>(m.values));
    std::byte* const page = expected.data() + page_bytes * static_cast<std::size_t>(g);
    for (int h = 0; h < c.heads; ++h) {
      std::byte* const record =
          page + (c.layout.kind == tile_kind::key ? format.key_offset(h) : format.value_offset(h));
      const auto report = kvarn::encode_tile(
          m.view(h), kvarn::tile_view{record, c.layout},
          {.method = c.method, .rotate = c.rotate, .factor = &kvarn_test::fixed_factor(dim)},
          workspace.data());
      replaced.nan += report.replaced.nan;
      replaced.saturated += report.replaced.saturated;
    }
    table.push_back({device.back()->data(), pages.data() + page_bytes * static_cast<std::size_t>(g),
                     device_factors.data()});
  }
  const device_array<cuda::encode_group> device_table(table);
  const device_array<cuda::replaced_counts> counts(std::vector<cuda::replaced_counts>(1));
  const device_array<std::byte> device_workspace(
      kvarn_test::workspace_bytes(format, c.layout.kind, c.method), 0xff);
  check(launch(cuda::encode_arguments{.format = format,
                                      .kind = c.layout.kind,
                                      .method = c.method,
                                      .type = cuda::element_type_of<T>,
                                      .strides = memory[0].strides,
                                      .rotate = c.rotate,
                                      .kv_heads = c.heads,
                                      .groups = device_table.data(),
                                      .count = groups,
                                      .replaced = counts.data(),
                                      .workspace = device_workspace.data()},
               nullptr));
  kvarn_test::synchronize();
  const auto actual = pages.to_host();
  std::size_t different = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < actual.size(); ++i)
    if (actual[i] != expected[i] && different++ == 0) first = i;
  EXPECT_EQ(different, 0u) << "of " << actual.size() << " bytes; the first at "
                           << first % page_bytes << " of page " << first / page_bytes;
  EXPECT_EQ(counts.to_host()[0].nan, static_cast<unsigned>(replaced.nan));
  EXPECT_EQ(counts.to_host()[0].saturated, static_cast<unsigned>(replaced.saturated));

  // And back, in every output type, with a token count that is not the whole group.
  for (const bool rotate_back : {true, false}) {
    const int count = c.layout.group - 37;
    token_memory<T> out(c.layout.group, c.heads, dim, c.plain);
    const device_array<T> device_out(out.values);
    std::vector<cuda::decode_group> decode_table{{pages.data(), device_out.data(), count}};
    const device_array<cuda::decode_group> device_decode(decode_table);
    check(launch(cuda::decode_arguments{.format = format,
                                        .kind = c.layout.kind,
                                        .type = cuda::element_type_of<T>,
                                        .strides = out.strides,
                                        .rotate_back = rotate_back,
                                        .kv_heads = c.heads,
                                        .groups = device_decode.data(),
                                        .count = 1},
                 nullptr));
    kvarn_test::synchronize();
    for (int h = 0; h < c.heads; ++h) {
      const std::byte* const record =
          expected.data() +
          (c.layout.kind == tile_kind::key ? format.key_offset(h) : format.value_offset(h));
      kvarn::decode_tokens(kvarn::const_tile_view{record, c.layout}, 0, count,
                           kvarn::tokens_view<T>{out.values.data() + h * out.strides.head,
                                                 out.strides.token, out.strides.channel},
                           rotate_back);
    }
    const auto values = device_out.to_host();
    EXPECT_EQ(std::memcmp(values.data(), out.values.data(), values.size() * sizeof(T)), 0)
        << "decoded, rotated back: " << rotate_back;
  }
}

std::vector<std::vector<float>> tiles_of(const tile_layout& layout, int count, std::uint64_t seed) {
  std::vector<std::vector<float>> tiles;
  for (int i = 0; i < count; ++i)
    tiles.push_back(kvarn_test::make_tile(
        kvarn_test::tile_inputs[static_cast<std::size_t>(i) % std::size(kvarn_test::tile_inputs)],
        layout.group, layout.head_dim, seed + static_cast<std::uint64_t>(i)));
  return tiles;
}

TEST(CudaCodec, EveryLayoutAndEncoder) {
  for (const tile_layout& layout : kvarn_test::all_layouts())
    for (const encoder method : kvarn_test::encoders) {
      SCOPED_TRACE(kvarn_test::name_of(layout) + " " + kvarn_test::name_of(method));
      const bool plain = layout.bits != 3;
      expect_equal_pages<kvarn::float16>({layout, method, 3, plain, true}, tiles_of(layout, 9, 17));
    }
}

TEST(CudaCodec, EveryElementType) {
  for (const int dim : {64, 80, 128, 256})
    for (const tile_kind kind : kvarn_test::tile_kinds)
      for (const bool plain : {true, false})
        for (const bool rotate : {true, false}) {
          const tile_layout layout{.kind = kind, .head_dim = dim};
          const encode_case c{layout, encoder::tuned, 3, plain, rotate};
          SCOPED_TRACE(kvarn_test::name_of(layout) + (plain ? " plain" : " strided") +
                       (rotate ? " rotated" : ""));
          expect_equal_pages<float>(c, tiles_of(layout, 9, 3));
          expect_equal_pages<kvarn::bfloat16>(c, tiles_of(layout, 9, 4));
          expect_equal_pages<kvarn::float16>(c, tiles_of(layout, 9, 5));
        }
}

TEST(CudaCodec, ThousandTiles) {
  for (const tile_kind kind : kvarn_test::tile_kinds)
    for (const encoder method : kvarn_test::encoders) {
      const tile_layout layout{.kind = kind};
      SCOPED_TRACE(kvarn_test::name_of(layout) + " " + kvarn_test::name_of(method));
      expect_equal_pages<kvarn::float16>({layout, method, 8}, tiles_of(layout, 1000, 99));
    }
}

TEST(CudaCodec, RealHeads) {
  for (const char* const name : kvarn_test::real_heads) {
    const kvarn_test::real_head head(name);
    for (const tile_kind kind : kvarn_test::tile_kinds)
      for (const encoder method : kvarn_test::encoders) {
        const tile_layout layout{.kind = kind, .head_dim = head.head_dim};
        SCOPED_TRACE(std::string(name) + " " + kvarn_test::name_of(method));
        std::vector<std::vector<float>> tiles;
        for (int t = 0; t < kvarn_test::real_tiles; ++t) tiles.push_back(head.tile(kind, t));
        expect_equal_pages<float>({layout, method, 2}, tiles);
      }
  }
}

TEST(CudaCodec, QueryMomentsAndFactors) {
  for (const int dim : kvarn::supported_head_dims) {
    SCOPED_TRACE(dim);
    const int kv_heads = 2;
    const int heads = 3;
    const int tokens = 21;
    token_memory<kvarn::bfloat16> m(tokens, kv_heads * heads, dim, dim % 32 == 0);
    for (int h = 0; h < kv_heads * heads; ++h) {
      const auto values = kvarn_test::make_tile(
          h == 4 ? kvarn_test::tile_input::not_finite : kvarn_test::tile_input::ordinary, tokens,
          dim, static_cast<std::uint64_t>(h));
      for (int t = 0; t < tokens; ++t)
        for (int d = 0; d < dim; ++d)
          m.values[m.index(t, h, d)] =
              kvarn::bfloat16(values[static_cast<std::size_t>(t * dim + d)]);
    }
    const device_array<kvarn::bfloat16> queries(m.values);
    const auto square = static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim);
    const device_array<float> sums(std::vector<float>(kv_heads * square));
    const device_array<float> factors(kv_heads * square);
    // In two pieces, as an engine would.
    for (const auto& [first, count] : {std::pair{0, 8}, std::pair{8, tokens - 8}}) {
      const device_array<cuda::observed_queries> table(std::vector<cuda::observed_queries>{
          {queries.data() + first * m.strides.token, sums.data(), count}});
      check(launch(cuda::observe_arguments{.head_dim = dim,
                                           .type = cuda::element_type::bfloat16,
                                           .strides = m.strides,
                                           .kv_heads = kv_heads,
                                           .heads = heads,
                                           .sequences = table.data(),
                                           .count = 1},
                   nullptr));
      kvarn_test::synchronize();
    }
    check(launch(
        cuda::factor_arguments{
            .head_dim = dim, .sums = sums.data(), .factors = factors.data(), .count = kv_heads},
        nullptr));
    kvarn_test::synchronize();
    const auto device_sums = sums.to_host();
    const auto device_factors = factors.to_host();
    for (int k = 0; k < kv_heads; ++k) {
      kvarn::query_moment moment(dim);
      for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) moment.add(m.view(k * heads + h).from(t), 1);
      EXPECT_EQ(std::memcmp(moment.sums().data(), device_sums.data() + k * square,
                            square * sizeof(float)),
                0);
      const kvarn::query_factor factor(moment);
      // A zero may have either sign.
      std::size_t different = 0;
      for (std::size_t i = 0; i < square; ++i)
        different += factor.upper()[i] != device_factors[k * square + i];
      EXPECT_EQ(different, 0u);
    }
  }
}

TEST(CudaCodec, RefusesWhatNoKernelTakes) {
  cuda::encode_arguments bad{.count = 1};
  bad.format.key_head_dim = 100;
  EXPECT_EQ(launch(bad, nullptr).code, cudaErrorInvalidValue);
  EXPECT_NE(launch(bad, nullptr).message.find("100"), std::string::npos);
  const cuda::encode_arguments unknown{.method = static_cast<encoder>(9)};
  EXPECT_EQ(launch(unknown, nullptr).message,
            "encoder is 9; allowed are 0 (paper) 1 (tuned) 2 (query_aware)");
  cuda::decode_arguments no_groups{.count = 1};
  EXPECT_NE(launch(no_groups, nullptr).message.find("groups"), std::string::npos);
  EXPECT_NE(launch(cuda::factor_arguments{.head_dim = 72}, nullptr).message.find("72"),
            std::string::npos);
}

}  // namespace
