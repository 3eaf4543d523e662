// Decoding: one row and all rows of a tile to FP32, as stored, and whole tiles to binary16 with the
// rotation undone.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <string>
#include <vector>

#include "kvarn/kvarn.hpp"
#include "sets.hpp"
#include "support/data.hpp"
#include "support/library.hpp"
#include "support/report.hpp"

namespace kvarn_bench {
namespace {

std::vector<std::byte> make_record(const kvarn::tile_layout& layout) {
  const auto tokens = to_half(random_tokens(layout.group, layout.head_dim, 1));
  std::vector<std::byte> record(layout.record_bytes());
  kvarn::tile_encoder::make(layout).value()(
      kvarn::tokens_view<const kvarn::float16>{tokens.data(), layout.head_dim}, record.data());
  return record;
}

void run_row(benchmark::State& state, kvarn::target on, const kvarn::tile_layout& layout) {
  const std::vector<std::byte> record = make_record(layout);
  const kvarn::const_tile_view tile{record.data(), layout};
  std::vector<float> out(static_cast<std::size_t>(layout.cols()));
  for (auto _ : state)
    for (int row = 0; row < layout.rows(); ++row) {
      kvarn::decode_row(tile, row, out.data(), on);
      benchmark::ClobberMemory();
    }
  set_counters(state, "row", layout.rows(), static_cast<double>(record.size()));
}

void run_rows(benchmark::State& state, kvarn::target on, const kvarn::tile_layout& layout) {
  const std::vector<std::byte> record = make_record(layout);
  const kvarn::const_tile_view tile{record.data(), layout};
  std::vector<float> out(static_cast<std::size_t>(layout.group) *
                         static_cast<std::size_t>(layout.head_dim));
  for (auto _ : state) {
    kvarn::decode_tile(tile, kvarn::tokens_view<float>{out.data(), layout.head_dim}, false, on);
    benchmark::ClobberMemory();
  }
  set_counters(state, "row", layout.rows(), static_cast<double>(record.size()));
}

void run_tile(benchmark::State& state, kvarn::target on, const kvarn::tile_layout& layout) {
  const std::vector<std::byte> record = make_record(layout);
  const kvarn::const_tile_view tile{record.data(), layout};
  std::vector<kvarn::float16> out(static_cast<std::size_t>(layout.group) *
                                  static_cast<std::size_t>(layout.head_dim));
  for (auto _ : state) {
    kvarn::decode_tile(tile, kvarn::tokens_view<kvarn::float16>{out.data(), layout.head_dim}, true,
                       on);
    benchmark::ClobberMemory();
  }
  set_counters(state, "tile", 1, static_cast<double>(record.size()));
}

}  // namespace

void add_decode(benchmark_set set) {
  std::vector<int> head_dims{128}, all_bits{2};
  if (set == benchmark_set::full) {
    head_dims = {64, 128, 256};
    all_bits = {2, 3, 4};
  }
  for (const kvarn::target on : codec_targets())
    for (const int head_dim : head_dims)
      for (const int bits : all_bits)
        for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value}) {
          const kvarn::tile_layout layout{.kind = kind, .head_dim = head_dim, .bits = bits};
          const std::string shape =
              std::string(kvarn::name_of(on)) + "/d" + std::to_string(head_dim) +
              (kind == kvarn::tile_kind::key ? "/k" : "/v") + std::to_string(bits);
          // A row of values is one channel of 128 tokens: the same work as of keys.
          if (kind == kvarn::tile_kind::key) {
            add_benchmark("decode_row/" + shape, {},
                          [=](benchmark::State& s) { run_row(s, on, layout); });
            add_benchmark("decode_rows/" + shape, {},
                          [=](benchmark::State& s) { run_rows(s, on, layout); });
          }
          add_benchmark("decode_tile/" + shape, {},
                        [=](benchmark::State& s) { run_tile(s, on, layout); });
        }
}

}  // namespace kvarn_bench
