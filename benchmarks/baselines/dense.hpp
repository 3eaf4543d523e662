// What attention from packed codes is compared with: the same attention over binary16 and over
// 8-bit numbers, and a plain read of memory.
//
// Written once with the library's vector operations and compiled for each instruction set. Token
// counts are multiples of block_tokens, head dimensions multiples of 64; queries see every token.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kvarn/kvarn.hpp"
#include "kvarn/simd/dispatch.hpp"

namespace kvarn_bench {

inline constexpr int block_tokens = 64;  // of an online softmax
inline constexpr int byte_block = 32;    // channels that share a scale
inline constexpr int max_rows = 64;      // query vectors of one call

// Keys and values of one KV head, [tokens][head_dim].
struct half_memory {
  const kvarn::float16* keys;
  const kvarn::float16* values;
  int tokens;
  int head_dim;
};

// The same in tiles of 16 tokens: [16][head_dim] bytes that are 128 more than the number, then
// [head_dim / byte_block][16] binary16 scales. 8.5 bits per element.
struct byte_memory {
  const std::byte* keys;
  const std::byte* values;
  int tokens;
  int head_dim;

  std::ptrdiff_t tile_bytes() const { return 16 * (head_dim + head_dim / byte_block * 2); }
};

// [rows][head_dim] query vectors and the place of their outputs.
struct dense_queries {
  const float* vectors;
  int rows;
  float softmax_scale;
  float* out;
};

// The memory of one attention.
class attention_state {
 public:
  attention_state(int rows, int head_dim)
      : storage_(2 * static_cast<std::size_t>(rows) * static_cast<std::size_t>(head_dim)),
        queries(storage_.data()),
        values(storage_.data() + storage_.size() / 2) {}

 private:
  std::vector<float> storage_;

 public:
  float* queries;  // [rows][head_dim]
  float* values;   // [rows][head_dim]
  float maximum[max_rows];
  float sum[max_rows];
};

// Writes 16 tokens to a tile of byte_memory.
inline void quantize_bytes(const float* tokens, int head_dim, std::byte* tile) {
  std::byte* const scales = tile + std::ptrdiff_t{16} * head_dim;
  for (int t = 0; t < 16; ++t)
    for (int b = 0; b < head_dim / byte_block; ++b) {
      const float* const x = tokens + t * head_dim + b * byte_block;
      float largest = 0.0f;
      for (int i = 0; i < byte_block; ++i) largest = std::fmax(largest, std::fabs(x[i]));
      const kvarn::float16 scale(largest / 127.0f);
      const auto step = static_cast<float>(scale);
      for (int i = 0; i < byte_block; ++i) {
        const float code = step > 0.0f ? std::nearbyint(x[i] / step) : 0.0f;
        tile[t * head_dim + b * byte_block + i] = static_cast<std::byte>(
            static_cast<int>(std::fmin(std::fmax(code, -127.0f), 127.0f)) + 128);
      }
      std::memcpy(scales + 32 * b + 2 * t, &scale, sizeof(scale));
    }
}

// The functions of one instruction set; attend_bytes is null where it has none.
struct dense_kernels {
  const char* name;
  void (*attend_half)(const half_memory&, const dense_queries&, attention_state&);
  void (*attend_bytes)(const byte_memory&, const dense_queries&, attention_state&);
  std::uint32_t (*stream_read)(const std::byte* p, std::ptrdiff_t bytes);
};

}  // namespace kvarn_bench

#if defined(__x86_64__)

// A region needs all that the library's region for these vectors has: its operations are inlined.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace kvarn_bench::avx2 {
using namespace kvarn::avx2;
inline constexpr int half_accumulators = 4;  // of 8 pairs of registers
// clang-format off
#include "stream_read.inl"
#include "online_softmax.inl"
#include "half_attention.inl"
// clang-format on
inline constexpr dense_kernels dense{"avx2", attend_half, nullptr, stream_read};
}  // namespace kvarn_bench::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(                                                                    \
    __attribute__((                                                                              \
        target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12, of its own intrinsics
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni")
#endif
namespace kvarn_bench::avx512 {
using namespace kvarn::avx512;
inline constexpr int half_accumulators = 16;  // of 32 registers
// sum += the products of four unsigned bytes a lane and the four signed bytes at `operand`. Written
// out for the broadcast memory operand, which g++ 12 does not form.
KVARN_ALWAYS_INLINE void dot_bytes(i32& sum, i32 bytes, const std::int32_t* operand) {
  __asm__("vpdpbusd {%2%{1to16%}, %1, %0|%0, %1, %2%{1to16%}}"
          : "+v"(sum.v)
          : "v"(bytes.v), "m"(*operand));
}
// clang-format off
#include "stream_read.inl"
#include "online_softmax.inl"
#include "half_attention.inl"
#include "byte_attention.inl"
// clang-format on
inline constexpr dense_kernels dense{"avx512", attend_half, attend_bytes, stream_read};
}  // namespace kvarn_bench::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

#endif  // __x86_64__

namespace kvarn_bench {

// Those compiled for a target: AMX shares the vectors of AVX-512, AVX-VNNI those of AVX2.
inline const dense_kernels* dense_kernels_of(kvarn::target on) {
  switch (on) {
#if defined(__x86_64__)
    case kvarn::target::avx2:
    case kvarn::target::avx_vnni:
      return &avx2::dense;
    case kvarn::target::avx512:
    case kvarn::target::amx:
      return &avx512::dense;
#endif
    default:
      return nullptr;
  }
}

// Those of the best target of this machine: what ratios refer to.
inline const dense_kernels* best_dense_kernels() {
  const dense_kernels* best = nullptr;
  for (const kvarn::target_info& info : kvarn::target_infos)
    if (kvarn::is_available(info.id) && dense_kernels_of(info.id) != nullptr)
      best = dense_kernels_of(info.id);
  return best;
}

}  // namespace kvarn_bench
