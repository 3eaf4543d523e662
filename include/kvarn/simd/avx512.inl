// AVX-512 (F, BW, DQ, VL, VNNI, VBMI, GFNI): the vector operations, and the kernels compiled for
// them.
#if defined(KVARN_TARGET)  // F, DQ, BW, VL, VNNI, VBMI, GFNI
KVARN_TARGET(avx512, X86_64,
             machine.runs(target::avx2) && machine.saves(0xe6) && bit(machine.seven.b, 16) &&
                 bit(machine.seven.b, 17) && bit(machine.seven.b, 30) && bit(machine.seven.b, 31) &&
                 bit(machine.seven.c, 11) && bit(machine.seven.c, 1) && bit(machine.seven.c, 8))
#elif defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                                    \
    __attribute__((                                                                              \
        target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni"))), \
    apply_to = function)
#else
#pragma GCC push_options
// g++ 12 takes the undefined vectors of its own intrinsics for variables (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni")
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
// max(a, abs(b)) of an a that is not negative.
KVARN_ALWAYS_INLINE f32 max_magnitude(f32 a, f32 b) { return {_mm512_range_ps(a.v, b.v, 0x0b)}; }
// Where a < b: x, else y.
KVARN_ALWAYS_INLINE f32 select_less(f32 a, f32 b, f32 x, f32 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}

KVARN_ALWAYS_INLINE i32 bits(f32 a) { return {_mm512_castps_si512(a.v)}; }
KVARN_ALWAYS_INLINE f32 from_bits(i32 a) { return {_mm512_castsi512_ps(a.v)}; }
KVARN_ALWAYS_INLINE f32 to_float(i32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
KVARN_ALWAYS_INLINE i32 set1_i32(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
KVARN_ALWAYS_INLINE i32 load_i32(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
KVARN_ALWAYS_INLINE void store_i32(std::int32_t* p, i32 a) { _mm512_storeu_si512(p, a.v); }
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

enum class reduction { sum, maximum };
template <reduction Kind>
KVARN_ALWAYS_INLINE __m512 reduce_pair(__m512 a, __m512 b) {
  if constexpr (Kind == reduction::sum) return _mm512_add_ps(a, b);
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
// Lane i: fold(r[i]), and the maximum of the lanes of r[i].
KVARN_ALWAYS_INLINE f32 fold_each(const f32 (&r)[16]) { return reduce_each<reduction::sum>(r); }
KVARN_ALWAYS_INLINE f32 max_each(const f32 (&r)[16]) { return reduce_each<reduction::maximum>(r); }

// How 16 vectors are rotated: all in registers, or a few at a time.
inline constexpr bool holds_16_vectors = true;
inline constexpr int odd_radix = 8;

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
KVARN_ALWAYS_INLINE words shift_left(words a, words count) {
  return {_mm512_sllv_epi32(a.v, count.v)};
}
KVARN_ALWAYS_INLINE void store_words(std::int32_t* p, words a) { store_i32(p, a); }

// Four or eight words, from `first` on, of 16 rows that are `stride` bytes apart.
KVARN_ALWAYS_INLINE void load_words(const std::byte* first, std::size_t stride, words (&out)[4]) {
  __m512i t[4];
  KVARN_UNROLL
  for (int r = 0; r < 4; ++r) {
    __m128i four[4];
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::byte* const row = first + static_cast<std::size_t>(r + 4 * i) * stride;
      four[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
    }
    t[r] = _mm512_inserti32x4(_mm512_zextsi128_si512(four[0]), four[1], 1);
    t[r] = _mm512_inserti32x4(t[r], four[2], 2);
    t[r] = _mm512_inserti32x4(t[r], four[3], 3);
  }
  const __m512i u0 = _mm512_unpacklo_epi32(t[0], t[1]);
  const __m512i u1 = _mm512_unpackhi_epi32(t[0], t[1]);
  const __m512i u2 = _mm512_unpacklo_epi32(t[2], t[3]);
  const __m512i u3 = _mm512_unpackhi_epi32(t[2], t[3]);
  out[0].v = _mm512_unpacklo_epi64(u0, u2);
  out[1].v = _mm512_unpackhi_epi64(u0, u2);
  out[2].v = _mm512_unpacklo_epi64(u1, u3);
  out[3].v = _mm512_unpackhi_epi64(u1, u3);
}
KVARN_ALWAYS_INLINE void load_words(const std::byte* first, std::size_t stride, words (&out)[8]) {
  __m512i t[8];
  KVARN_UNROLL
  for (int r = 0; r < 8; ++r) {
    const std::byte* const low = first + static_cast<std::size_t>(r) * stride;
    const auto* const high = reinterpret_cast<const __m256i*>(low + 8 * stride);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
    t[r] = _mm512_inserti64x4(_mm512_zextsi256_si512(a), _mm256_loadu_si256(high), 1);
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

// The first `bytes` (at most 32) bytes of 8 words of 16 rows, one row a lane.
KVARN_ALWAYS_INLINE void store_rows(std::byte* first, std::size_t stride, int bytes,
                                    const i32 (&in)[8]) {
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

// p * 2^whole where x >= least, else 0. `whole` has integers; the results are normal numbers.
KVARN_ALWAYS_INLINE f32 scale_from(f32 x, float least, f32 p, f32 whole) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(least), _CMP_GE_OQ);
  return {_mm512_maskz_scalef_ps(keep, p.v, whole.v)};
}

// For each code of a byte the 8 x 8 matrix of bits that takes it out and shifts it left by `shift`:
// row 7 - i selects bit i of the result.
struct cut_matrices {
  std::int64_t of_code[8] = {};
  constexpr cut_matrices(int width, int shift) {
    for (int s = 0; s < 8 / width; ++s) {
      std::uint64_t rows = 0;
      for (int i = 0; i < width; ++i)
        rows |= std::uint64_t{1} << (8 * (7 - shift - i) + width * s + i);
      of_code[s] = static_cast<std::int64_t>(rows);
    }
  }
};
// Takes the codes of a plane out of the bytes of a word.
class code_cutter {
 public:
  // Of `width` bits, to be shifted left by `shift`, which is 0 or 2.
  KVARN_ALWAYS_INLINE explicit code_cutter(int width, int shift = 0)
      : matrices_(all[shift / 2][width / 2].of_code) {}
  // Code s of each byte, for s = 0 .. 8 / width - 1 in this order.
  KVARN_ALWAYS_INLINE words cut(words& word, int s) const {
    return {_mm512_gf2p8affine_epi64_epi8(word.v, _mm512_set1_epi64(matrices_[s]), 0)};
  }

 private:
  static constexpr cut_matrices all[2][3] = {{{1, 0}, {2, 0}, {4, 0}}, {{1, 2}, {2, 2}, {4, 2}}};
  const std::int64_t* matrices_;
};

// Exact sums of products of codes (unsigned bytes) and operands (signed bytes), four a lane.
struct dot_sum {
  __m512i v;
};
inline constexpr int dot_accumulators = 16;
inline constexpr int max_dot_blocks = 4;  // of rows
inline constexpr bool dots_need_flush = false;
constexpr int dots_before_flush(int) { return max_head_dim; }
KVARN_ALWAYS_INLINE dot_sum no_dots() { return {_mm512_setzero_si512()}; }
KVARN_ALWAYS_INLINE void add_dots(dot_sum& sum, words codes, words operands) {
  sum.v = _mm512_dpbusd_epi32(sum.v, codes.v, operands.v);
}
KVARN_ALWAYS_INLINE words flush(dot_sum sum) { return {sum.v}; }

// The low byte of each lane of four vectors, as the signed number that it is, and the second byte
// of what is left without it; in an order that store_quads undoes.
struct split_bytes {
  __m512i low;
  __m512i high;
};
inline constexpr int bytes_at_once = 64;
KVARN_ALWAYS_INLINE split_bytes split(const i32 (&a)[4]) {
  constexpr __mmask32 odd_words = 0xaaaaaaaa;
  constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaa;
  const __m512i first = _mm512_mask_blend_epi16(odd_words, a[0].v, _mm512_slli_epi32(a[1].v, 16));
  const __m512i second = _mm512_mask_blend_epi16(odd_words, a[2].v, _mm512_slli_epi32(a[3].v, 16));
  const __m512i carry = _mm512_set1_epi16(128);
  const __m512i first_high = _mm512_srli_epi16(_mm512_add_epi16(first, carry), 8);
  const __m512i second_high = _mm512_add_epi16(second, carry);
  return {_mm512_mask_blend_epi8(odd_bytes, first, _mm512_slli_epi16(second, 8)),
          _mm512_mask_blend_epi8(odd_bytes, first_high, second_high)};
}
struct quad_order {
  std::uint8_t source[64];
};
constexpr quad_order order_of_quads(int width) {
  quad_order order{};
  const int shifts = 8 / width;
  for (int i = 0; i < 64; ++i) {
    const int quad = i / 4;
    const int column = 32 / width * (quad / shifts) + shifts * (i % 4) + quad % shifts;
    const int vector = column / 16;
    order.source[i] = static_cast<std::uint8_t>(4 * (column % 16) + 2 * (vector % 2) + vector / 2);
  }
  return order;
}
// To the order in which codes of a width leave a word: see folded_heads.
KVARN_ALWAYS_INLINE void store_quads(std::int32_t* out, __m512i bytes, int width) {
  alignas(64) static constexpr quad_order orders[3] = {order_of_quads(1), order_of_quads(2),
                                                       order_of_quads(4)};
  const __m512i order = _mm512_load_si512(orders[width / 2].source);
  _mm512_store_si512(out, _mm512_permutexvar_epi8(order, bytes));
}

namespace here = avx512;
// In this order: later ones use earlier ones.
// clang-format off
#include "number_kernels.inl"
#include "hadamard_kernels.inl"
#include "normalize_kernels.inl"
#include "encode_kernels.inl"
#include "feedback_kernels.inl"
#include "codec_kernels.inl"
#include "operands.inl"
#include "code_words.inl"
#include "code_sums.inl"
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
