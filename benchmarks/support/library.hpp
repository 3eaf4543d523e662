// All calls from the benchmarks into what the library does per instruction set, in one place.
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

#include "kvarn/kvarn.hpp"
#include "kvarn/simd/dispatch.hpp"

namespace kvarn_bench {

// Whether this machine can run the target and the library has kernels of its own for it.
inline bool has_kernels(kvarn::target on) {
  if (!kvarn::is_available(on)) return false;
  return on == kvarn::target::scalar || kvarn::with_kernels(on, [](auto kernels) {
           return !std::is_same_v<decltype(kernels), kvarn::scalar::kernels>;
         });
}

inline std::vector<kvarn::target> targets() {
  std::vector<kvarn::target> all;
  for (const kvarn::target_info& info : kvarn::target_infos)
    if (has_kernels(info.id)) all.push_back(info.id);
  return all;
}

// Rotates `count` vectors of n floats, one after another.
inline void hadamard(float* x, int n, int count, kvarn::target on) {
  if (on == kvarn::target::avx512)
    kvarn::avx512::hadamard(x, n, count, n);
  else
    kvarn::hadamard(x, n, count, n);
}

// Floats of workspace that variance_normalize needs on any target: vector kernels keep a tile whose
// columns are contiguous and padded.
inline std::size_t normalize_floats(int rows, int cols) {
  return kvarn::normalize_workspace(rows, cols) +
         (static_cast<std::size_t>(rows) + 64) * static_cast<std::size_t>(cols);
}

// `workspace`: normalize_floats(rows, cols) floats.
inline void variance_normalize(const float* x, int rows, int cols,
                               const kvarn::normalize_options& options, float* row_scale,
                               float* col_scale, float* workspace, kvarn::target on) {
  if (on == kvarn::target::avx512)
    kvarn::avx512::variance_normalize(x, rows, cols, 1.0f, options, row_scale, col_scale,
                                      workspace);
  else
    kvarn::variance_normalize(x, rows, cols, 1.0f, options, row_scale, col_scale, workspace);
}

// Floats of workspace that encode_tile needs on any target.
inline std::size_t encode_floats(const kvarn::tile_layout& layout) {
  return kvarn::encode_workspace(layout) + 64 * static_cast<std::size_t>(layout.cols());
}

// `workspace`: encode_floats(out.layout) floats.
inline void encode_tile(kvarn::tokens_view<const kvarn::float16> tokens, kvarn::tile_view out,
                        const kvarn::encode_options& options, float* workspace, kvarn::target on) {
  if (on == kvarn::target::avx512)
    kvarn::avx512::encode_tile(tokens, out,
                               kvarn::recipe_of(options.method, out.layout.kind, out.layout.bits),
                               options.rotate, options.factor, workspace);
  else
    kvarn::encode_tile(tokens, out, options, workspace);
}

inline kvarn::query_factor make_factor(const kvarn::query_moment& moment, kvarn::target on) {
  (void)on;
  return kvarn::query_factor(moment);
}

inline void decode_row(kvarn::const_tile_view tile, int row, float* out, kvarn::target on) {
  if (on == kvarn::target::avx512)
    kvarn::avx512::decode_row(tile, row, out);
  else
    kvarn::decode_row(tile, row, out);
}

inline void decode_tile(kvarn::const_tile_view tile, kvarn::tokens_view<kvarn::float16> out,
                        kvarn::target on) {
  if (on == kvarn::target::avx512)
    kvarn::avx512::decode_tile(tile, out);
  else
    kvarn::decode_tile(tile, out);
}

}  // namespace kvarn_bench
