// AVX2 with FMA and F16C: the vector operations, and the kernels compiled for them. Sixteen lanes
// are two registers.
#if defined(KVARN_TARGET)  // AVX, FMA, F16C, AVX2
KVARN_TARGET(avx2, X86_64,
             machine.saves(0x6) && bit(machine.one.c, 28) && bit(machine.one.c, 12) &&
                 bit(machine.one.c, 29) && bit(machine.seven.b, 5))
#elif defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace avx2 {

// Sixteen lanes: 0 to 7 and 8 to 15.
struct f32 {
  __m256 a;
  __m256 b;
};
struct i32 {
  __m256i a;
  __m256i b;
};

KVARN_ALWAYS_INLINE f32 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
KVARN_ALWAYS_INLINE void store(float* p, f32 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
KVARN_ALWAYS_INLINE f32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KVARN_ALWAYS_INLINE f32 add(f32 x, f32 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
KVARN_ALWAYS_INLINE f32 sub(f32 x, f32 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
// A product that no compiler fuses into an addition.
KVARN_ALWAYS_INLINE f32 mul(f32 x, f32 y) {
  f32 product{_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
  __asm__("" : "+x"(product.a), "+x"(product.b));
  return product;
}
KVARN_ALWAYS_INLINE f32 div(f32 x, f32 y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
KVARN_ALWAYS_INLINE f32 sqrt(f32 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
// x * y + z, z - x * y and x * y - z, one rounding.
KVARN_ALWAYS_INLINE f32 fma(f32 x, f32 y, f32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
KVARN_ALWAYS_INLINE f32 fnma(f32 x, f32 y, f32 z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
KVARN_ALWAYS_INLINE f32 fms(f32 x, f32 y, f32 z) {
  return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
KVARN_ALWAYS_INLINE f32 min(f32 x, f32 y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
KVARN_ALWAYS_INLINE f32 max(f32 x, f32 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
KVARN_ALWAYS_INLINE f32 abs(f32 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// max(x, abs(y)) of an x that is not negative.
KVARN_ALWAYS_INLINE f32 max_magnitude(f32 x, f32 y) { return max(x, abs(y)); }
// Where x < y: p, else q.
KVARN_ALWAYS_INLINE f32 select_less(f32 x, f32 y, f32 p, f32 q) {
  return {_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

KVARN_ALWAYS_INLINE i32 bits(f32 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
KVARN_ALWAYS_INLINE f32 from_bits(i32 x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
KVARN_ALWAYS_INLINE f32 to_float(i32 x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
KVARN_ALWAYS_INLINE i32 set1_i32(std::int32_t x) {
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
KVARN_ALWAYS_INLINE i32 load_i32(const std::int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
KVARN_ALWAYS_INLINE void store_i32(std::int32_t* p, i32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
KVARN_ALWAYS_INLINE i32 add(i32 x, i32 y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
KVARN_ALWAYS_INLINE i32 sub(i32 x, i32 y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
KVARN_ALWAYS_INLINE i32 bit_and(i32 x, i32 y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
KVARN_ALWAYS_INLINE i32 bit_or(i32 x, i32 y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
KVARN_ALWAYS_INLINE i32 min(i32 x, i32 y) {
  return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)};
}
KVARN_ALWAYS_INLINE i32 max(i32 x, i32 y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
template <int N>
KVARN_ALWAYS_INLINE i32 shift_left(i32 x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
KVARN_ALWAYS_INLINE i32 shift_right(i32 x) {  // filled with zeros
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
// All bits of the lanes where x < y.
KVARN_ALWAYS_INLINE i32 less(i32 x, i32 y) {
  return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)};
}
// Where x < y: p, else q.
KVARN_ALWAYS_INLINE i32 select_less(i32 x, i32 y, i32 p, i32 q) {
  const i32 mask = less(x, y);
  return {_mm256_blendv_epi8(q.a, p.a, mask.a), _mm256_blendv_epi8(q.b, p.b, mask.b)};
}
KVARN_ALWAYS_INLINE int count_less(i32 x, i32 y) {
  const f32 mask = from_bits(less(x, y));
  return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(mask.a)) |
                            static_cast<unsigned>(_mm256_movemask_ps(mask.b)) << 8);
}
KVARN_ALWAYS_INLINE bool any_less(i32 x, i32 y) {
  const i32 mask = less(x, y);
  return _mm256_movemask_epi8(_mm256_or_si256(mask.a, mask.b)) != 0;
}

// 16 bytes or 16-bit numbers to lanes, filled with zeros; and the low bits of lanes back.
KVARN_ALWAYS_INLINE i32 load_u8(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
KVARN_ALWAYS_INLINE i32 load_u16(const void* p) {
  const auto* const half = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(half)),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(half + 1))};
}
KVARN_ALWAYS_INLINE __m256i low_words(i32 x) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i words =
      _mm256_packus_epi32(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
  return _mm256_permute4x64_epi64(words, 0xd8);
}
KVARN_ALWAYS_INLINE void store_u16(void* p, i32 x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), low_words(x));
}
KVARN_ALWAYS_INLINE void store_u8(void* p, i32 x) {
  const __m256i bytes = _mm256_and_si256(low_words(x), _mm256_set1_epi16(0xff));
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm_packus_epi16(_mm256_castsi256_si128(bytes),
                                                              _mm256_extracti128_si256(bytes, 1)));
}

// binary16 in the low bits of lanes.
KVARN_ALWAYS_INLINE f32 half_to_float(__m256i halves) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
KVARN_ALWAYS_INLINE f32 half_to_float(i32 x) { return half_to_float(low_words(x)); }
KVARN_ALWAYS_INLINE i32 float_to_half(f32 x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.a, nearest)),
          _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.b, nearest))};
}
// 16 UE5M3 codes: binary16 numbers without their sign and low 7 bits.
KVARN_ALWAYS_INLINE f32 load_ue5m3(const void* p) {
  const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return half_to_float(_mm256_slli_epi16(codes, 7));
}
KVARN_ALWAYS_INLINE f32 load_half(const void* p) {
  const auto* const half = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(half)), _mm256_cvtph_ps(_mm_loadu_si128(half + 1))};
}

// The sum, the maximum and the minimum of the lanes; the order of the sum is that of kvarn::fold.
enum class reduction { sum, minimum, maximum };
template <reduction Kind>
KVARN_ALWAYS_INLINE __m256 reduce_pair(__m256 x, __m256 y) {
  if constexpr (Kind == reduction::sum) return _mm256_add_ps(x, y);
  if constexpr (Kind == reduction::minimum) return _mm256_min_ps(x, y);
  if constexpr (Kind == reduction::maximum) return _mm256_max_ps(x, y);
}
template <reduction Kind>
KVARN_ALWAYS_INLINE float reduce(f32 x) {
  __m256 r = reduce_pair<Kind>(x.a, x.b);
  r = reduce_pair<Kind>(r, _mm256_permute2f128_ps(r, r, 1));
  r = reduce_pair<Kind>(r, _mm256_permute_ps(r, 0x4e));
  r = reduce_pair<Kind>(r, _mm256_permute_ps(r, 0xb1));
  return _mm256_cvtss_f32(r);
}
KVARN_ALWAYS_INLINE float fold(f32 x) { return reduce<reduction::sum>(x); }
KVARN_ALWAYS_INLINE float max_lane(f32 x) { return reduce<reduction::maximum>(x); }
KVARN_ALWAYS_INLINE float min_lane(f32 x) { return reduce<reduction::minimum>(x); }

template <reduction Kind>
KVARN_ALWAYS_INLINE __m256 reduce_eight(const f32* r) {
  __m256 t[4];
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m256 x = reduce_pair<Kind>(r[i].a, r[i].b);
    const __m256 y = reduce_pair<Kind>(r[i + 4].a, r[i + 4].b);
    t[i] =
        reduce_pair<Kind>(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  }
  KVARN_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m256d x = _mm256_castps_pd(t[i]);
    const __m256d y = _mm256_castps_pd(t[i + 2]);
    t[i] = reduce_pair<Kind>(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                             _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  const __m256 sums =
      reduce_pair<Kind>(_mm256_shuffle_ps(t[0], t[1], 0x88), _mm256_shuffle_ps(t[0], t[1], 0xdd));
  return _mm256_permute_ps(sums, 0xd8);  // from rows 0, 2, 1, 3
}
// Lane i: fold(r[i]), and the maximum of the lanes of r[i].
KVARN_ALWAYS_INLINE f32 fold_each(const f32 (&r)[16]) {
  return {reduce_eight<reduction::sum>(r), reduce_eight<reduction::sum>(r + 8)};
}
KVARN_ALWAYS_INLINE f32 max_each(const f32 (&r)[16]) {
  return {reduce_eight<reduction::maximum>(r), reduce_eight<reduction::maximum>(r + 8)};
}

// How 16 vectors are rotated: all in registers, or a few at a time.
inline constexpr bool holds_16_vectors = false;
inline constexpr int odd_radix = 8;

// One stage of the Hadamard transform within lanes: (a, b) -> (a + b, a - b) at distance Half.
template <int Half>
KVARN_ALWAYS_INLINE __m256 butterfly_half(__m256 x) {
  constexpr float p = 1.0f;
  constexpr float m = -1.0f;
  if constexpr (Half == 1)
    return _mm256_fmadd_ps(x, _mm256_setr_ps(p, m, p, m, p, m, p, m), _mm256_permute_ps(x, 0xb1));
  if constexpr (Half == 2)
    return _mm256_fmadd_ps(x, _mm256_setr_ps(p, p, m, m, p, p, m, m), _mm256_permute_ps(x, 0x4e));
  if constexpr (Half == 4)
    return _mm256_fmadd_ps(x, _mm256_setr_ps(p, p, p, p, m, m, m, m),
                           _mm256_permute2f128_ps(x, x, 1));
}
template <int Half>
KVARN_ALWAYS_INLINE f32 butterfly(f32 x) {
  static_assert(Half == 1 || Half == 2 || Half == 4 || Half == 8);
  if constexpr (Half == 8)
    return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
  else
    return {butterfly_half<Half>(x.a), butterfly_half<Half>(x.b)};
}
// butterfly<1>(load(p)): loads that duplicate lanes cost no shuffle.
KVARN_ALWAYS_INLINE f32 load_butterfly(const float* p) {
  const __m256 sign = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
  const f32 x = load(p);
  return {_mm256_fmadd_ps(_mm256_movehdup_ps(x.a), sign, _mm256_moveldup_ps(x.a)),
          _mm256_fmadd_ps(_mm256_movehdup_ps(x.b), sign, _mm256_moveldup_ps(x.b))};
}

KVARN_ALWAYS_INLINE void transpose_eight(__m256 (&r)[8]) {
  __m256 t[8];
  KVARN_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  // u[4 i + c]: column c (low half) and c + 4 (high half) of rows 4 i .. 4 i + 3.
  __m256 u[8];
  KVARN_UNROLL
  for (int i = 0; i < 8; i += 4) KVARN_UNROLL
  for (int k = 0; k < 2; ++k) {
    const __m256d low = _mm256_castps_pd(t[i + k]);
    const __m256d high = _mm256_castps_pd(t[i + 2 + k]);
    u[i + 2 * k] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
    u[i + 2 * k + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
  }
  KVARN_UNROLL
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
}
// Lane i of vector j to lane j of vector i.
KVARN_ALWAYS_INLINE void transpose(f32 (&r)[16]) {
  __m256 blocks[2][2][8];
  KVARN_UNROLL
  for (int i = 0; i < 8; ++i) {
    blocks[0][0][i] = r[i].a;
    blocks[0][1][i] = r[i].b;
    blocks[1][0][i] = r[8 + i].a;
    blocks[1][1][i] = r[8 + i].b;
  }
  KVARN_UNROLL
  for (auto& pair : blocks) KVARN_UNROLL
  for (auto& block : pair) transpose_eight(block);
  KVARN_UNROLL
  for (int i = 0; i < 8; ++i) {
    r[i] = {blocks[0][0][i], blocks[1][0][i]};
    r[8 + i] = {blocks[0][1][i], blocks[1][1][i]};
  }
}

// p * 2^whole where x >= least, else 0. `whole` has integers; the results are normal numbers.
KVARN_ALWAYS_INLINE __m256 scale_from(__m256 x, float least, __m256 p, __m256 whole) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(p), exponent);
  const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(least), _CMP_GE_OQ);
  return _mm256_and_ps(_mm256_castsi256_ps(scaled), keep);
}
KVARN_ALWAYS_INLINE f32 scale_from(f32 x, float least, f32 p, f32 whole) {
  return {scale_from(x.a, least, p.a, whole.a), scale_from(x.b, least, p.b, whole.b)};
}

// Packed codes: 32-bit words of `rows_at_once` rows, one row a lane.
inline constexpr int rows_at_once = 8;
inline constexpr int words_at_once = 4;
struct words {
  __m256i v;
};
KVARN_ALWAYS_INLINE words broadcast_words(std::int32_t x) { return {_mm256_set1_epi32(x)}; }
KVARN_ALWAYS_INLINE words load_words(const std::int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
KVARN_ALWAYS_INLINE void store_words(std::int32_t* p, words x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v);
}
KVARN_ALWAYS_INLINE words add(words x, words y) { return {_mm256_add_epi32(x.v, y.v)}; }
// Each lane by its own count.
KVARN_ALWAYS_INLINE words shift_left(words x, words count) {
  return {_mm256_sllv_epi32(x.v, count.v)};
}

// Four rows of a 4 x 4 matrix in each 128-bit lane, transposed.
KVARN_ALWAYS_INLINE void transpose_four(__m256i (&r)[4]) {
  const __m256i t0 = _mm256_unpacklo_epi32(r[0], r[1]);
  const __m256i t1 = _mm256_unpackhi_epi32(r[0], r[1]);
  const __m256i t2 = _mm256_unpacklo_epi32(r[2], r[3]);
  const __m256i t3 = _mm256_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm256_unpacklo_epi64(t0, t2);
  r[1] = _mm256_unpackhi_epi64(t0, t2);
  r[2] = _mm256_unpacklo_epi64(t1, t3);
  r[3] = _mm256_unpackhi_epi64(t1, t3);
}

// Four words, from `first` on, of rows_at_once rows that are `stride` bytes apart.
KVARN_ALWAYS_INLINE void load_words(const std::byte* first, std::size_t stride, words (&out)[4]) {
  __m256i t[4];
  KVARN_UNROLL
  for (int r = 0; r < 4; ++r) {
    const std::byte* const row = first + static_cast<std::size_t>(r) * stride;
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
    const auto* const high = reinterpret_cast<const __m128i*>(row + 4 * stride);
    t[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_loadu_si128(high), 1);
  }
  transpose_four(t);
  KVARN_UNROLL
  for (int c = 0; c < 4; ++c) out[c].v = t[c];
}

// The first `bytes` (at most 32) bytes of 8 words of 16 rows, one row a lane.
KVARN_ALWAYS_INLINE void store_rows(std::byte* first, std::size_t stride, int bytes,
                                    const i32 (&in)[8]) {
  for (int half = 0; half < 2; ++half) {
    const int offset = 16 * half;
    const int left = bytes - offset < 16 ? bytes - offset : 16;
    if (left <= 0) break;
    for (int rows = 0; rows < 16; rows += 8) {
      __m256i t[4];
      KVARN_UNROLL
      for (int c = 0; c < 4; ++c) t[c] = rows == 0 ? in[4 * half + c].a : in[4 * half + c].b;
      transpose_four(t);
      for (int r = 0; r < 4; ++r) {
        alignas(32) std::byte row[32];
        _mm256_store_si256(reinterpret_cast<__m256i*>(row), t[r]);
        std::byte* const out = first + static_cast<std::size_t>(rows + r) * stride + offset;
        std::memcpy(out, row, static_cast<std::size_t>(left));
        std::memcpy(out + 4 * stride, row + 16, static_cast<std::size_t>(left));
      }
    }
  }
}

// word << Width, and the low Width bits of x in the place that this frees.
template <int Width>
KVARN_ALWAYS_INLINE i32 append(i32 word, i32 x) {
  return bit_or(shift_left<Width>(word), bit_and(x, set1_i32((1 << Width) - 1)));
}

// 16 packed codes of 2, 3 or 4 bits as numbers, from the plane of 4 bits, or from those of 2 and of
// 1 bit.
template <int Bits>
KVARN_ALWAYS_INLINE f32 load_codes(const std::byte* low, [[maybe_unused]] const std::byte* high) {
  constexpr int width = Bits == 4 ? 4 : 2;
  std::int32_t word[2];
  std::memcpy(word, low, sizeof(std::uint16_t) * width);
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i shift = _mm256_mullo_epi32(lane, _mm256_set1_epi32(width));
  i32 code;
  code.a = _mm256_srlv_epi32(_mm256_set1_epi32(word[0]), shift);
  if constexpr (Bits == 4)
    code.b = _mm256_srlv_epi32(_mm256_set1_epi32(word[1]), shift);
  else
    code.b = _mm256_srli_epi32(_mm256_srlv_epi32(_mm256_set1_epi32(word[0]), shift), 16);
  code = bit_and(code, set1_i32((1 << width) - 1));
  if constexpr (Bits == 3) {
    std::uint16_t top;
    std::memcpy(&top, high, sizeof(top));
    const __m256i bit = _mm256_srlv_epi32(_mm256_set1_epi32(top << 2), lane);
    code = bit_or(code, bit_and(i32{bit, _mm256_srli_epi32(bit, 8)}, set1_i32(4)));
  }
  return to_float(code);
}

KVARN_ALWAYS_INLINE void prefetch(const std::byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// Takes the codes of a plane out of the bytes of a word.
class code_cutter {
 public:
  KVARN_ALWAYS_INLINE explicit code_cutter(int width)
      : mask_(_mm256_set1_epi32(0x01010101 * ((1 << width) - 1))),
        width_(_mm256_set1_epi32(width)) {}
  // Code s of each byte, for s = 0 .. 8 / width - 1 in this order.
  KVARN_ALWAYS_INLINE words cut(words& word, int) const {
    const __m256i code = _mm256_and_si256(word.v, mask_);
    word.v = _mm256_srlv_epi32(word.v, width_);
    return {code};
  }

 private:
  __m256i mask_;
  __m256i width_;
};

// Exact sums of products of codes (unsigned bytes) and operands (signed bytes): pairs in 16 bits,
// four a lane when flushed.
struct dot_sum {
  __m256i v;
};
inline constexpr int dot_accumulators = 8;
inline constexpr int max_dot_blocks = 2;  // of rows
inline constexpr bool dots_need_flush = true;
constexpr int dots_before_flush(int width) { return 0x7fff / (2 * 128 * ((1 << width) - 1)); }
KVARN_ALWAYS_INLINE dot_sum no_dots() { return {_mm256_setzero_si256()}; }
KVARN_ALWAYS_INLINE void add_dots(dot_sum& sum, words codes, words operands) {
  sum.v = _mm256_add_epi16(sum.v, _mm256_maddubs_epi16(codes.v, operands.v));
}
KVARN_ALWAYS_INLINE words flush(dot_sum sum) {
  return {_mm256_madd_epi16(sum.v, _mm256_set1_epi16(1))};
}

// The low byte of each lane of four vectors, as the signed number that it is, and the second byte
// of what is left without it.
struct bytes64 {
  __m256i v[2];
};
struct split_bytes {
  bytes64 low;
  bytes64 high;
};
inline constexpr int bytes_at_once = 64;
// In order, from the words in the order that packing leaves.
KVARN_ALWAYS_INLINE __m256i pack_bytes(__m256i first, __m256i second) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
}
KVARN_ALWAYS_INLINE split_bytes split(const i32 (&x)[4]) {
  const __m256i low_word = _mm256_set1_epi32(0xffff);
  const __m256i low_byte = _mm256_set1_epi16(0xff);
  const __m256i carry = _mm256_set1_epi16(128);
  __m256i low[4];
  __m256i high[4];
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m256i packed =
        _mm256_packus_epi32(_mm256_and_si256(x[i].a, low_word), _mm256_and_si256(x[i].b, low_word));
    low[i] = _mm256_and_si256(packed, low_byte);
    high[i] = _mm256_srli_epi16(_mm256_add_epi16(packed, carry), 8);
  }
  return {{{pack_bytes(low[0], low[1]), pack_bytes(low[2], low[3])}},
          {{pack_bytes(high[0], high[1]), pack_bytes(high[2], high[3])}}};
}
// To the order in which codes of a width leave a word: see folded_heads.
KVARN_ALWAYS_INLINE void store_quads(std::int32_t* out, const bytes64& bytes, int width) {
  const __m256i two = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i four = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  const __m256i one = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  auto* const p = reinterpret_cast<__m256i*>(out);
  KVARN_UNROLL
  for (int i = 0; i < 2; ++i) {
    if (width == 2) {
      _mm256_store_si256(p + i, _mm256_shuffle_epi8(bytes.v[i], two));
    } else if (width == 4) {
      _mm256_store_si256(p + i, _mm256_shuffle_epi8(bytes.v[i], four));
    } else {
      const __m256i pairs = _mm256_shuffle_epi8(bytes.v[i], one);
      const __m128i a = _mm256_castsi256_si128(pairs);
      const __m128i b = _mm256_extracti128_si256(pairs, 1);
      _mm256_store_si256(p + i,
                         _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b)));
    }
  }
}

namespace here = avx2;
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

}  // namespace avx2
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
