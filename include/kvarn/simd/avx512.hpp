// AVX-512 (F, BW, DQ, VL, VNNI, VBMI): the vector operations, and the kernels compiled for them.
#pragma once

#include "kernel_includes.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((                                                                         \
        target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi"))), \
    apply_to = function)
#else
#pragma GCC push_options
// g++ 12 takes the undefined vectors of its own intrinsics for variables (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")
#endif

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace avx512 {

// Sixteen lanes.
struct f32 {
  __m512 v;
};
struct i32 {
  __m512i v;
};

KVARN_ALWAYS_INLINE f32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
KVARN_ALWAYS_INLINE void store(float* p, f32 a) { _mm512_storeu_ps(p, a.v); }
KVARN_ALWAYS_INLINE f32 set1(float x) { return {_mm512_set1_ps(x)}; }
KVARN_ALWAYS_INLINE f32 add(f32 a, f32 b) { return {_mm512_add_ps(a.v, b.v)}; }
KVARN_ALWAYS_INLINE f32 sub(f32 a, f32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
// A product that no compiler fuses into an addition.
KVARN_ALWAYS_INLINE f32 mul(f32 a, f32 b) {
  __m512 product = _mm512_mul_ps(a.v, b.v);
  __asm__("" : "+v"(product));
  return {product};
}
KVARN_ALWAYS_INLINE f32 div(f32 a, f32 b) { return {_mm512_div_ps(a.v, b.v)}; }
KVARN_ALWAYS_INLINE f32 sqrt(f32 a) { return {_mm512_sqrt_ps(a.v)}; }
// a * b + c and c - a * b, one rounding.
KVARN_ALWAYS_INLINE f32 fma(f32 a, f32 b, f32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
KVARN_ALWAYS_INLINE f32 fnma(f32 a, f32 b, f32 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
KVARN_ALWAYS_INLINE f32 fms(f32 a, f32 b, f32 c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }
KVARN_ALWAYS_INLINE f32 min(f32 a, f32 b) { return {_mm512_min_ps(a.v, b.v)}; }
KVARN_ALWAYS_INLINE f32 max(f32 a, f32 b) { return {_mm512_max_ps(a.v, b.v)}; }
KVARN_ALWAYS_INLINE f32 abs(f32 a) { return {_mm512_abs_ps(a.v)}; }
// Where a < b: x, else y.
KVARN_ALWAYS_INLINE f32 select_less(f32 a, f32 b, f32 x, f32 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}

KVARN_ALWAYS_INLINE i32 bits(f32 a) { return {_mm512_castps_si512(a.v)}; }
KVARN_ALWAYS_INLINE f32 from_bits(i32 a) { return {_mm512_castsi512_ps(a.v)}; }
KVARN_ALWAYS_INLINE f32 to_float(i32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
KVARN_ALWAYS_INLINE i32 set1_i32(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
KVARN_ALWAYS_INLINE i32 load_i32(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
KVARN_ALWAYS_INLINE i32 add(i32 a, i32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
KVARN_ALWAYS_INLINE i32 sub(i32 a, i32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
KVARN_ALWAYS_INLINE i32 bit_and(i32 a, i32 b) { return {_mm512_and_si512(a.v, b.v)}; }
KVARN_ALWAYS_INLINE i32 bit_or(i32 a, i32 b) { return {_mm512_or_si512(a.v, b.v)}; }
KVARN_ALWAYS_INLINE i32 min(i32 a, i32 b) { return {_mm512_min_epi32(a.v, b.v)}; }
KVARN_ALWAYS_INLINE i32 max(i32 a, i32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N>
KVARN_ALWAYS_INLINE i32 shift_left(i32 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
KVARN_ALWAYS_INLINE i32 shift_right(i32 a) {  // filled with zeros
  return {_mm512_srli_epi32(a.v, N)};
}
// Where a < b: x, else y.
KVARN_ALWAYS_INLINE i32 select_less(i32 a, i32 b, i32 x, i32 y) {
  return {_mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(a.v, b.v), y.v, x.v)};
}
KVARN_ALWAYS_INLINE bool any_less(i32 a, i32 b) { return _mm512_cmplt_epi32_mask(a.v, b.v) != 0; }
KVARN_ALWAYS_INLINE int count_less(i32 a, i32 b) {
  return __builtin_popcount(_mm512_cmplt_epi32_mask(a.v, b.v));
}

// 16 bytes or 16-bit numbers to lanes, filled with zeros; and the low bits of lanes back.
KVARN_ALWAYS_INLINE i32 load_u8(const void* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
KVARN_ALWAYS_INLINE void store_u8(void* p, i32 a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
KVARN_ALWAYS_INLINE i32 load_u16(const void* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
KVARN_ALWAYS_INLINE void store_u16(void* p, i32 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}

// binary16 in the low bits of lanes.
KVARN_ALWAYS_INLINE f32 half_to_float(i32 a) {
  return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))};
}
KVARN_ALWAYS_INLINE i32 float_to_half(f32 a) {
  return {
      _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
KVARN_ALWAYS_INLINE f32 load_half(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}

// 16 UE5M3 codes: binary16 numbers without their sign and low 7 bits.
KVARN_ALWAYS_INLINE f32 load_ue5m3(const void* p) {
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return {_mm512_cvtph_ps(_mm256_slli_epi16(bytes, 7))};
}

// The sum of the lanes and their maximum; the order of the sum is that of kvarn::fold.
KVARN_ALWAYS_INLINE float fold(f32 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
KVARN_ALWAYS_INLINE float max_lane(f32 a) { return _mm512_reduce_max_ps(a.v); }
KVARN_ALWAYS_INLINE float min_lane(f32 a) { return _mm512_reduce_min_ps(a.v); }

enum class reduction { sum, minimum, maximum };
template <reduction Kind>
KVARN_ALWAYS_INLINE __m512 reduce_pair(__m512 a, __m512 b) {
  if constexpr (Kind == reduction::sum) return _mm512_add_ps(a, b);
  if constexpr (Kind == reduction::minimum) return _mm512_min_ps(a, b);
  if constexpr (Kind == reduction::maximum) return _mm512_max_ps(a, b);
}
template <reduction Kind>
KVARN_ALWAYS_INLINE f32 reduce_each(const f32 (&r)[16]) {
  // Each level joins the halves of two vectors: (a low, b high) with (a high, b low).
  __m512 t[8];
  KVARN_UNROLL
  for (int i = 0; i < 8; ++i)
    t[i] = reduce_pair<Kind>(_mm512_mask_blend_ps(0xff00, r[i].v, r[i + 8].v),
                             _mm512_shuffle_f32x4(r[i].v, r[i + 8].v, 0x4e));
  const __m512i swap4 =
      _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i)
    t[i] = reduce_pair<Kind>(_mm512_mask_blend_ps(0xf0f0, t[i], t[i + 4]),
                             _mm512_permutex2var_ps(t[i], swap4, t[i + 4]));
  KVARN_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(t[i]);
    const __m512d b = _mm512_castps_pd(t[i + 2]);
    t[i] = reduce_pair<Kind>(_mm512_mask_blend_ps(0xcccc, t[i], t[i + 2]),
                             _mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0x55)));
  }
  const __m512i swap1 =
      _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
  return {reduce_pair<Kind>(_mm512_mask_blend_ps(0xaaaa, t[0], t[1]),
                            _mm512_permutex2var_ps(t[0], swap1, t[1]))};
}
// Lane i: fold(r[i]), the minimum and the maximum of the lanes of r[i].
KVARN_ALWAYS_INLINE f32 fold_each(const f32 (&r)[16]) { return reduce_each<reduction::sum>(r); }
KVARN_ALWAYS_INLINE f32 min_each(const f32 (&r)[16]) { return reduce_each<reduction::minimum>(r); }
KVARN_ALWAYS_INLINE f32 max_each(const f32 (&r)[16]) { return reduce_each<reduction::maximum>(r); }

// 1 in the lanes whose index lacks the bit Half, -1 in the others.
template <int Half>
KVARN_ALWAYS_INLINE __m512 butterfly_signs() {
  constexpr __mmask16 upper = Half == 1 ? 0xaaaa : Half == 2 ? 0xcccc : Half == 4 ? 0xf0f0 : 0xff00;
  return _mm512_mask_blend_ps(upper, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}
// One stage of the Hadamard transform within lanes: (a, b) -> (a + b, a - b) at distance Half.
template <int Half>
KVARN_ALWAYS_INLINE f32 butterfly(f32 a) {
  static_assert(Half == 1 || Half == 2 || Half == 4 || Half == 8);
  __m512 other;
  if constexpr (Half == 1) other = _mm512_permute_ps(a.v, 0xb1);
  if constexpr (Half == 2) other = _mm512_permute_ps(a.v, 0x4e);
  if constexpr (Half == 4) other = _mm512_shuffle_f32x4(a.v, a.v, 0xb1);
  if constexpr (Half == 8) other = _mm512_shuffle_f32x4(a.v, a.v, 0x4e);
  return {_mm512_fmadd_ps(a.v, butterfly_signs<Half>(), other)};
}
// butterfly<1>(load(p)): loads that duplicate lanes cost no shuffle.
KVARN_ALWAYS_INLINE f32 load_butterfly(const float* p) {
  const __m512 even = _mm512_moveldup_ps(_mm512_loadu_ps(p));
  const __m512 odd = _mm512_movehdup_ps(_mm512_loadu_ps(p));
  return {_mm512_fmadd_ps(odd, butterfly_signs<1>(), even)};
}

// Lane i of vector j to lane j of vector i.
KVARN_ALWAYS_INLINE void transpose(f32 (&r)[16]) {
  __m512 t[16];
  KVARN_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  __m512 u[16];
  KVARN_UNROLL
  for (int i = 0; i < 16; i += 4) {
    KVARN_UNROLL
    for (int k = 0; k < 2; ++k) {
      const __m512d low = _mm512_castps_pd(t[i + k]);
      const __m512d high = _mm512_castps_pd(t[i + 2 + k]);
      u[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      u[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  KVARN_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    r[c].v = _mm512_shuffle_f32x4(a, d, 0x88);
    r[8 + c].v = _mm512_shuffle_f32x4(a, d, 0xdd);
    r[4 + c].v = _mm512_shuffle_f32x4(b, e, 0x88);
    r[12 + c].v = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
}

// Packed codes: 32-bit words of `rows_at_once` rows, one row a lane.
inline constexpr int rows_at_once = 16;
inline constexpr int words_at_once = 8;
using words = i32;
KVARN_ALWAYS_INLINE words broadcast_words(std::int32_t x) { return set1_i32(x); }
KVARN_ALWAYS_INLINE words load_words(const std::int32_t* p) { return load_i32(p); }
// Each lane by its own count.
KVARN_ALWAYS_INLINE words shift_right(words a, words count) {
  return {_mm512_srlv_epi32(a.v, count.v)};
}
KVARN_ALWAYS_INLINE words shift_left(words a, words count) {
  return {_mm512_sllv_epi32(a.v, count.v)};
}
KVARN_ALWAYS_INLINE void store_words(std::int32_t* p, words a) { _mm512_storeu_si512(p, a.v); }

// Words first .. first + count - 1 of 16 rows that are `stride` bytes apart; count <=
// words_at_once.
KVARN_ALWAYS_INLINE void load_words(const std::byte* first, std::size_t stride, int count,
                                    words (&out)[words_at_once]) {
  __m512i t[8];
  const auto mask = static_cast<__mmask8>((1u << count) - 1u);
  KVARN_UNROLL
  for (int r = 0; r < 8; ++r) {
    const std::byte* low = first + static_cast<std::size_t>(r) * stride;
    const __m256i a = _mm256_maskz_loadu_epi32(mask, low);
    const __m256i b = _mm256_maskz_loadu_epi32(mask, low + 8 * stride);
    t[r] = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
  }
  __m512i u[8];
  KVARN_UNROLL
  for (int i = 0; i < 8; i += 2) {
    u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
    u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
  }
  KVARN_UNROLL
  for (int i = 0; i < 8; i += 4) KVARN_UNROLL
  for (int k = 0; k < 2; ++k) {
    t[i + 2 * k] = _mm512_unpacklo_epi64(u[i + k], u[i + 2 + k]);
    t[i + 2 * k + 1] = _mm512_unpackhi_epi64(u[i + k], u[i + 2 + k]);
  }
  // Vector c now has word c (128-bit lanes 0, 2) and word c + 4 (lanes 1, 3) of four rows.
  const __m512i low_words = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high_words = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  KVARN_UNROLL
  for (int c = 0; c < 4; ++c) {
    out[c].v = _mm512_permutex2var_epi64(t[c], low_words, t[4 + c]);
    out[c + 4].v = _mm512_permutex2var_epi64(t[c], high_words, t[4 + c]);
  }
}

// The inverse: the first `bytes` (at most 32) bytes of 8 words of 16 rows.
KVARN_ALWAYS_INLINE void store_rows(std::byte* first, std::size_t stride, int bytes,
                                    const words (&in)[words_at_once]) {
  __m512i u[8];
  KVARN_UNROLL
  for (int i = 0; i < 8; i += 2) {
    u[i] = _mm512_unpacklo_epi32(in[i].v, in[i + 1].v);
    u[i + 1] = _mm512_unpackhi_epi32(in[i].v, in[i + 1].v);
  }
  // t[k]: words 0 .. 3 of rows k, k + 4, k + 8, k + 12; t[k + 4]: words 4 .. 7.
  __m512i t[8];
  KVARN_UNROLL
  for (int i = 0; i < 8; i += 4) KVARN_UNROLL
  for (int k = 0; k < 2; ++k) {
    t[i + 2 * k] = _mm512_unpacklo_epi64(u[i + k], u[i + 2 + k]);
    t[i + 2 * k + 1] = _mm512_unpackhi_epi64(u[i + k], u[i + 2 + k]);
  }
  const __m512i low_rows = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high_rows = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const auto mask = static_cast<__mmask32>((std::uint64_t{1} << bytes) - 1u);
  KVARN_UNROLL
  for (int k = 0; k < 4; ++k) {
    const __m512i low = _mm512_permutex2var_epi64(t[k], low_rows, t[k + 4]);
    const __m512i high = _mm512_permutex2var_epi64(t[k], high_rows, t[k + 4]);
    std::byte* const row = first + static_cast<std::size_t>(k) * stride;
    _mm256_mask_storeu_epi8(row, mask, _mm512_castsi512_si256(low));
    _mm256_mask_storeu_epi8(row + 4 * stride, mask, _mm512_extracti64x4_epi64(low, 1));
    _mm256_mask_storeu_epi8(row + 8 * stride, mask, _mm512_castsi512_si256(high));
    _mm256_mask_storeu_epi8(row + 12 * stride, mask, _mm512_extracti64x4_epi64(high, 1));
  }
}

// word << Width, and the low Width bits of x in the place that this frees.
template <int Width>
KVARN_ALWAYS_INLINE i32 append(i32 word, i32 x) {
  const __m512i mask = _mm512_set1_epi32((1 << Width) - 1);
  return {_mm512_ternarylogic_epi32(_mm512_slli_epi32(word.v, Width), x.v, mask, 0xf8)};
}

// 16 packed codes of 2, 3 or 4 bits as numbers, from the plane of 4 bits, or from those of 2 and of
// 1 bit.
template <int Bits>
KVARN_ALWAYS_INLINE f32 load_codes(const std::byte* low, [[maybe_unused]] const std::byte* high) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // The lookup takes the low 4 bits of its index: no mask, no conversion.
  constexpr int period = (1 << Bits) - 1;
  const __m512 number = _mm512_cvtepi32_ps(_mm512_and_si512(lane, _mm512_set1_epi32(period)));
  std::int32_t word;
  std::memcpy(&word, low, sizeof(word));
  __m512i index = _mm512_set1_epi32(word);
  if constexpr (Bits == 4) {
    std::memcpy(&word, low + sizeof(word), sizeof(word));
    index = _mm512_mask_set1_epi32(index, 0xff00, word);
    const __m512i shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    index = _mm512_srlv_epi32(index, shift);
  } else {
    index = _mm512_srlv_epi32(index, _mm512_add_epi32(lane, lane));
    if constexpr (Bits == 3) {
      std::uint16_t bits;
      std::memcpy(&bits, high, sizeof(bits));
      const __m512i top = _mm512_srlv_epi32(_mm512_set1_epi32(bits << 2), lane);
      index =
          _mm512_ternarylogic_epi32(_mm512_set1_epi32(3), index, top, 0xca);  // mask ? low : top
    }
  }
  return {_mm512_permutexvar_ps(index, number)};
}

KVARN_ALWAYS_INLINE void prefetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// Exact sums of products of codes (unsigned bytes) and operands (signed bytes), four a lane.
struct dot_sum {
  __m512i v;
};
inline constexpr int dot_accumulators = 16;
inline constexpr int heads_at_once = 4;
inline constexpr bool dots_need_flush = false;
constexpr int dots_before_flush(int) { return max_head_dim; }
KVARN_ALWAYS_INLINE dot_sum no_dots() { return {_mm512_setzero_si512()}; }
KVARN_ALWAYS_INLINE void dot(dot_sum& sum, words codes, const std::int32_t* operand) {
  // Written out for the broadcast memory operand, which g++ 12 does not form: it spends a register
  // and a load on each operand instead, spills, and is 1.4 times slower.
  __asm__("vpdpbusd {%2%{1to16%}, %1, %0|%0, %1, %2%{1to16%}}"
          : "+v"(sum.v)
          : "v"(codes.v), "m"(*operand));
}
KVARN_ALWAYS_INLINE words flush(dot_sum sum) { return {sum.v}; }

// The first 16 bytes at p, byte i from byte pattern[i].
KVARN_ALWAYS_INLINE void shuffle16(const std::uint8_t* p, const std::uint8_t* pattern,
                                   std::uint8_t* out) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pattern));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(bytes, order));
}

// In this order: later ones use earlier ones.
// clang-format off
#include "number_kernels.inl"
#include "hadamard_kernels.inl"
#include "normalize_kernels.inl"
#include "encode_kernels.inl"
#include "feedback_kernels.inl"
#include "codec_kernels.inl"
#include "attention_kernels.inl"
#include "kernels.inl"
// clang-format on

}  // namespace avx512
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#endif  // __x86_64__
