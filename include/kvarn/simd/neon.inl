// AArch64 with the dot product extension: the vector operations, and the kernels compiled for them.
// Sixteen lanes are four registers. No target region: only the dot product is beyond the baseline
// of AArch64.
#if defined(KVARN_TARGET)
KVARN_TARGET(neon, AARCH64, has_dot_product())
#elif defined(__aarch64__)
#include <arm_neon.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#if !defined(__ARM_FEATURE_DOTPROD)
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#endif

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace neon {

// Sixteen lanes, four a register.
struct f32 {
  float32x4_t v[4];
};
struct i32 {
  int32x4_t v[4];
};

KVARN_ALWAYS_INLINE f32 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
KVARN_ALWAYS_INLINE void store(float* p, f32 x) {
  KVARN_UNROLL
  for (std::ptrdiff_t i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
KVARN_ALWAYS_INLINE f32 set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
KVARN_ALWAYS_INLINE f32 add(f32 x, f32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vaddq_f32(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE f32 sub(f32 x, f32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vsubq_f32(x.v[i], y.v[i]);
  return x;
}
// A product that no compiler fuses into an addition.
KVARN_ALWAYS_INLINE f32 mul(f32 x, f32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) {
    x.v[i] = vmulq_f32(x.v[i], y.v[i]);
    __asm__("" : "+w"(x.v[i]));
  }
  return x;
}
KVARN_ALWAYS_INLINE f32 div(f32 x, f32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vdivq_f32(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE f32 sqrt(f32 x) {
  KVARN_UNROLL
  for (float32x4_t& v : x.v) v = vsqrtq_f32(v);
  return x;
}
// x * y + z, z - x * y and x * y - z, one rounding.
KVARN_ALWAYS_INLINE f32 fma(f32 x, f32 y, f32 z) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]);
  return z;
}
KVARN_ALWAYS_INLINE f32 fnma(f32 x, f32 y, f32 z) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) z.v[i] = vfmsq_f32(z.v[i], x.v[i], y.v[i]);
  return z;
}
KVARN_ALWAYS_INLINE f32 fms(f32 x, f32 y, f32 z) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) z.v[i] = vfmaq_f32(vnegq_f32(z.v[i]), x.v[i], y.v[i]);
  return z;
}
// x < y ? x : y and x > y ? x : y, which vminq and vmaxq are not for zeros of unlike sign.
KVARN_ALWAYS_INLINE float32x4_t min(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vcltq_f32(x, y), x, y);
}
KVARN_ALWAYS_INLINE float32x4_t max(float32x4_t x, float32x4_t y) {
  return vbslq_f32(vcgtq_f32(x, y), x, y);
}
KVARN_ALWAYS_INLINE f32 min(f32 x, f32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = min(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE f32 max(f32 x, f32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = max(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE f32 abs(f32 x) {
  KVARN_UNROLL
  for (float32x4_t& v : x.v) v = vabsq_f32(v);
  return x;
}
// max(x, abs(y)) of an x that is not negative.
KVARN_ALWAYS_INLINE f32 max_magnitude(f32 x, f32 y) { return max(x, abs(y)); }
// Where x < y: p, else q.
KVARN_ALWAYS_INLINE f32 select_less(f32 x, f32 y, f32 p, f32 q) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vbslq_f32(vcltq_f32(x.v[i], y.v[i]), p.v[i], q.v[i]);
  return x;
}

KVARN_ALWAYS_INLINE i32 bits(f32 x) {
  i32 r;
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) r.v[i] = vreinterpretq_s32_f32(x.v[i]);
  return r;
}
KVARN_ALWAYS_INLINE f32 from_bits(i32 x) {
  f32 r;
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) r.v[i] = vreinterpretq_f32_s32(x.v[i]);
  return r;
}
KVARN_ALWAYS_INLINE f32 to_float(i32 x) {
  f32 r;
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) r.v[i] = vcvtq_f32_s32(x.v[i]);
  return r;
}
KVARN_ALWAYS_INLINE i32 set1_i32(std::int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {{v, v, v, v}};
}
KVARN_ALWAYS_INLINE i32 load_i32(const std::int32_t* p) {
  return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
KVARN_ALWAYS_INLINE void store_i32(std::int32_t* p, i32 x) {
  KVARN_UNROLL
  for (std::ptrdiff_t i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]);
}
KVARN_ALWAYS_INLINE i32 add(i32 x, i32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vaddq_s32(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE i32 sub(i32 x, i32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vsubq_s32(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE i32 bit_and(i32 x, i32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vandq_s32(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE i32 bit_or(i32 x, i32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vorrq_s32(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE i32 min(i32 x, i32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vminq_s32(x.v[i], y.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE i32 max(i32 x, i32 y) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vmaxq_s32(x.v[i], y.v[i]);
  return x;
}
template <int N>
KVARN_ALWAYS_INLINE i32 shift_left(i32 x) {
  KVARN_UNROLL
  for (int32x4_t& v : x.v) v = vshlq_n_s32(v, N);
  return x;
}
KVARN_ALWAYS_INLINE int32x4_t shift_right(int32x4_t x, int32x4_t count) {  // filled with zeros
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), vnegq_s32(count)));
}
template <int N>
KVARN_ALWAYS_INLINE i32 shift_right(i32 x) {  // filled with zeros
  KVARN_UNROLL
  for (int32x4_t& v : x.v) v = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), N));
  return x;
}
// Where x < y: p, else q.
KVARN_ALWAYS_INLINE i32 select_less(i32 x, i32 y, i32 p, i32 q) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vbslq_s32(vcltq_s32(x.v[i], y.v[i]), p.v[i], q.v[i]);
  return x;
}
KVARN_ALWAYS_INLINE int count_less(i32 x, i32 y) {
  uint32x4_t count = vdupq_n_u32(0);
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) count = vsubq_u32(count, vcltq_s32(x.v[i], y.v[i]));
  return static_cast<int>(vaddvq_u32(count));
}
KVARN_ALWAYS_INLINE bool any_less(i32 x, i32 y) { return count_less(x, y) != 0; }

// 16 bytes or 16-bit numbers to lanes, filled with zeros; and the low bits of lanes back.
KVARN_ALWAYS_INLINE i32 widen(uint16x8_t low, uint16x8_t high) {
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
           vreinterpretq_s32_u32(vmovl_high_u16(low)),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
           vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}
KVARN_ALWAYS_INLINE i32 load_u8(const void* p) {
  const uint8x16_t bytes = vld1q_u8(static_cast<const std::uint8_t*>(p));
  return widen(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
}
// Which need not be aligned.
KVARN_ALWAYS_INLINE uint16x8_t load_eight_u16(const void* p) {
  return vreinterpretq_u16_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)));
}
KVARN_ALWAYS_INLINE i32 load_u16(const void* p) {
  return widen(load_eight_u16(p), load_eight_u16(static_cast<const std::byte*>(p) + 16));
}
// The low words of lanes 8 * half to 8 * half + 7.
KVARN_ALWAYS_INLINE uint16x8_t low_words(i32 x, std::ptrdiff_t half) {
  return vuzp1q_u16(vreinterpretq_u16_s32(x.v[2 * half]), vreinterpretq_u16_s32(x.v[2 * half + 1]));
}
KVARN_ALWAYS_INLINE void store_u16(void* p, i32 x) {
  auto* const out = static_cast<std::uint8_t*>(p);
  vst1q_u8(out, vreinterpretq_u8_u16(low_words(x, 0)));
  vst1q_u8(out + 16, vreinterpretq_u8_u16(low_words(x, 1)));
}
KVARN_ALWAYS_INLINE void store_u8(void* p, i32 x) {
  const uint8x16_t low = vreinterpretq_u8_u16(low_words(x, 0));
  const uint8x16_t high = vreinterpretq_u8_u16(low_words(x, 1));
  vst1q_u8(static_cast<std::uint8_t*>(p), vuzp1q_u8(low, high));
}

// binary16 in the low bits of lanes.
KVARN_ALWAYS_INLINE f32 half_to_float(uint16x8_t low, uint16x8_t high) {
  const float16x8_t a = vreinterpretq_f16_u16(low);
  const float16x8_t b = vreinterpretq_f16_u16(high);
  return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)),
           vcvt_high_f32_f16(b)}};
}
KVARN_ALWAYS_INLINE f32 half_to_float(i32 x) {
  return half_to_float(low_words(x, 0), low_words(x, 1));
}
KVARN_ALWAYS_INLINE i32 float_to_half(f32 x) {
  const float16x8_t low = vcombine_f16(vcvt_f16_f32(x.v[0]), vcvt_f16_f32(x.v[1]));
  const float16x8_t high = vcombine_f16(vcvt_f16_f32(x.v[2]), vcvt_f16_f32(x.v[3]));
  return widen(vreinterpretq_u16_f16(low), vreinterpretq_u16_f16(high));
}
KVARN_ALWAYS_INLINE f32 load_half(const void* p) {
  return half_to_float(load_eight_u16(p), load_eight_u16(static_cast<const std::byte*>(p) + 16));
}
// 16 UE5M3 codes: binary16 numbers without their sign and low 7 bits.
KVARN_ALWAYS_INLINE f32 load_ue5m3(const void* p) {
  const uint8x16_t codes = vld1q_u8(static_cast<const std::uint8_t*>(p));
  return half_to_float(vshll_n_u8(vget_low_u8(codes), 7), vshll_high_n_u8(codes, 7));
}

// The sum, the maximum and the minimum of the lanes; the order of the sum is that of kvarn::fold.
enum class reduction { sum, minimum, maximum };
template <reduction Kind>
KVARN_ALWAYS_INLINE float32x4_t reduce_pair(float32x4_t x, float32x4_t y) {
  if constexpr (Kind == reduction::sum) return vaddq_f32(x, y);
  if constexpr (Kind == reduction::minimum) return min(x, y);
  if constexpr (Kind == reduction::maximum) return max(x, y);
}
template <reduction Kind>
KVARN_ALWAYS_INLINE float32x4_t reduce_to_four(f32 x) {
  return reduce_pair<Kind>(reduce_pair<Kind>(x.v[0], x.v[2]), reduce_pair<Kind>(x.v[1], x.v[3]));
}
// Lane i: the reduction of x[i].
template <reduction Kind>
KVARN_ALWAYS_INLINE float32x4_t reduce_four(const f32* x) {
  float32x4_t t[4];
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) t[i] = reduce_to_four<Kind>(x[i]);
  KVARN_UNROLL
  for (int i = 0; i < 4; i += 2) {
    const float64x2_t a = vreinterpretq_f64_f32(t[i]);
    const float64x2_t b = vreinterpretq_f64_f32(t[i + 1]);
    t[i] = reduce_pair<Kind>(vreinterpretq_f32_f64(vzip1q_f64(a, b)),
                             vreinterpretq_f32_f64(vzip2q_f64(a, b)));
  }
  return reduce_pair<Kind>(vuzp1q_f32(t[0], t[2]), vuzp2q_f32(t[0], t[2]));
}
template <reduction Kind>
KVARN_ALWAYS_INLINE float reduce(f32 x) {
  float32x4_t r = reduce_to_four<Kind>(x);
  r = reduce_pair<Kind>(r, vextq_f32(r, r, 2));
  return vgetq_lane_f32(reduce_pair<Kind>(r, vrev64q_f32(r)), 0);
}
KVARN_ALWAYS_INLINE float fold(f32 x) { return reduce<reduction::sum>(x); }
KVARN_ALWAYS_INLINE float max_lane(f32 x) { return reduce<reduction::maximum>(x); }
KVARN_ALWAYS_INLINE float min_lane(f32 x) { return reduce<reduction::minimum>(x); }
template <reduction Kind>
KVARN_ALWAYS_INLINE f32 reduce_each(const f32 (&r)[16]) {
  return {{reduce_four<Kind>(r), reduce_four<Kind>(r + 4), reduce_four<Kind>(r + 8),
           reduce_four<Kind>(r + 12)}};
}
// Lane i: fold(r[i]), and the maximum of the lanes of r[i].
KVARN_ALWAYS_INLINE f32 fold_each(const f32 (&r)[16]) { return reduce_each<reduction::sum>(r); }
KVARN_ALWAYS_INLINE f32 max_each(const f32 (&r)[16]) { return reduce_each<reduction::maximum>(r); }

// How 16 vectors are rotated: all in registers, or a few at a time.
inline constexpr bool holds_16_vectors = false;
inline constexpr int odd_radix = 8;

// One stage of the Hadamard transform within lanes: (a, b) -> (a + b, a - b) at distance Half.
template <int Half>
KVARN_ALWAYS_INLINE f32 butterfly(f32 x) {
  static_assert(Half == 1 || Half == 2 || Half == 4 || Half == 8);
  f32 r;
  if constexpr (Half >= 4) {
    constexpr int distance = Half / 4;
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) == 0)
        r.v[i] = vaddq_f32(x.v[i], x.v[i + distance]);
      else
        r.v[i] = vsubq_f32(x.v[i - distance], x.v[i]);
    }
  } else {
    const float32x4_t sign = Half == 2 ? float32x4_t{1, 1, -1, -1} : float32x4_t{1, -1, 1, -1};
    KVARN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float32x4_t other = Half == 2 ? vextq_f32(x.v[i], x.v[i], 2) : vrev64q_f32(x.v[i]);
      r.v[i] = vfmaq_f32(other, x.v[i], sign);
    }
  }
  return r;
}
KVARN_ALWAYS_INLINE f32 load_butterfly(const float* p) { return butterfly<1>(load(p)); }

KVARN_ALWAYS_INLINE void transpose_four(int32x4_t (&r)[4]) {
  const int64x2_t a = vreinterpretq_s64_s32(vtrn1q_s32(r[0], r[1]));
  const int64x2_t b = vreinterpretq_s64_s32(vtrn2q_s32(r[0], r[1]));
  const int64x2_t c = vreinterpretq_s64_s32(vtrn1q_s32(r[2], r[3]));
  const int64x2_t d = vreinterpretq_s64_s32(vtrn2q_s32(r[2], r[3]));
  r[0] = vreinterpretq_s32_s64(vzip1q_s64(a, c));
  r[1] = vreinterpretq_s32_s64(vzip1q_s64(b, d));
  r[2] = vreinterpretq_s32_s64(vzip2q_s64(a, c));
  r[3] = vreinterpretq_s32_s64(vzip2q_s64(b, d));
}
// Lane i of vector j to lane j of vector i.
KVARN_ALWAYS_INLINE void transpose(f32 (&r)[16]) {
  f32 out[16];
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) KVARN_UNROLL
  for (int k = 0; k < 4; ++k) {
    int32x4_t block[4];
    KVARN_UNROLL
    for (int row = 0; row < 4; ++row) block[row] = vreinterpretq_s32_f32(r[4 * i + row].v[k]);
    transpose_four(block);
    KVARN_UNROLL
    for (int row = 0; row < 4; ++row) out[4 * k + row].v[i] = vreinterpretq_f32_s32(block[row]);
  }
  KVARN_UNROLL
  for (int i = 0; i < 16; ++i) r[i] = out[i];
}

// p * 2^whole where x >= least, else 0. `whole` has integers; the results are normal numbers.
KVARN_ALWAYS_INLINE f32 scale_from(f32 x, float least, f32 p, f32 whole) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int32x4_t exponent = vshlq_n_s32(vcvtnq_s32_f32(whole.v[i]), 23);
    const int32x4_t scaled = vaddq_s32(vreinterpretq_s32_f32(p.v[i]), exponent);
    const uint32x4_t keep = vcgeq_f32(x.v[i], vdupq_n_f32(least));
    x.v[i] = vreinterpretq_f32_s32(vandq_s32(scaled, vreinterpretq_s32_u32(keep)));
  }
  return x;
}

// Packed codes: 32-bit words of `rows_at_once` rows, one row a lane.
inline constexpr int rows_at_once = 4;
inline constexpr int words_at_once = 4;
struct words {
  int32x4_t v;
};
KVARN_ALWAYS_INLINE words broadcast_words(std::int32_t x) { return {vdupq_n_s32(x)}; }
KVARN_ALWAYS_INLINE words load_words(const std::int32_t* p) { return {vld1q_s32(p)}; }
KVARN_ALWAYS_INLINE void store_words(std::int32_t* p, words x) { vst1q_s32(p, x.v); }
KVARN_ALWAYS_INLINE words add(words x, words y) { return {vaddq_s32(x.v, y.v)}; }
// Each lane by its own count.
KVARN_ALWAYS_INLINE words shift_left(words x, words count) { return {vshlq_s32(x.v, count.v)}; }

// Four words, from `first` on, of rows_at_once rows that are `stride` bytes apart.
KVARN_ALWAYS_INLINE void load_words(const std::byte* first, std::size_t stride, words (&out)[4]) {
  int32x4_t t[4];
  KVARN_UNROLL
  for (int r = 0; r < 4; ++r) {
    const std::byte* const row = first + static_cast<std::size_t>(r) * stride;
    t[r] = vreinterpretq_s32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(row)));
  }
  transpose_four(t);
  KVARN_UNROLL
  for (int c = 0; c < 4; ++c) out[c].v = t[c];
}

// The first `bytes` (at most 32) bytes of 8 words of 16 rows, one row a lane.
KVARN_ALWAYS_INLINE void store_rows(std::byte* first, std::size_t stride, int bytes,
                                    const i32 (&in)[8]) {
  for (int word = 0; word < 8; word += 4) {
    const int offset = 4 * word;
    const int left = bytes - offset < 16 ? bytes - offset : 16;
    if (left <= 0) break;
    KVARN_UNROLL
    for (int k = 0; k < 4; ++k) {
      int32x4_t t[4] = {in[word].v[k], in[word + 1].v[k], in[word + 2].v[k], in[word + 3].v[k]};
      transpose_four(t);
      std::byte* const out = first + static_cast<std::size_t>(4 * k) * stride + offset;
      KVARN_UNROLL
      for (int r = 0; r < 4; ++r)
        std::memcpy(out + static_cast<std::size_t>(r) * stride, &t[r],
                    static_cast<std::size_t>(left));
    }
  }
}

// word << Width, and the low Width bits of x in the place that this frees.
template <int Width>
KVARN_ALWAYS_INLINE i32 append(i32 word, i32 x) {
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) x.v[i] = vsliq_n_s32(x.v[i], word.v[i], Width);
  return x;
}

// 16 packed codes of 2, 3 or 4 bits as numbers, from the plane of 4 bits, or from those of 2 and of
// 1 bit.
template <int Bits>
KVARN_ALWAYS_INLINE f32 load_codes(const std::byte* low, [[maybe_unused]] const std::byte* high) {
  constexpr int width = Bits == 4 ? 4 : 2;
  const int32x4_t lane = {0, 1, 2, 3};
  std::uint64_t word = 0;
  std::memcpy(&word, low, sizeof(std::uint16_t) * width);
  std::uint16_t top = 0;
  if constexpr (Bits == 3) std::memcpy(&top, high, sizeof(top));
  i32 code;
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const auto four = static_cast<std::int32_t>((word >> (4 * width * i)) & 0xffffu);
    const int32x4_t shifted = shift_right(vdupq_n_s32(four), vmulq_n_s32(lane, width));
    code.v[i] = vandq_s32(shifted, vdupq_n_s32((1 << width) - 1));
    if constexpr (Bits == 3) {
      const int32x4_t bit = shift_right(vdupq_n_s32((top >> (4 * i)) << 2), lane);
      code.v[i] = vorrq_s32(code.v[i], vandq_s32(bit, vdupq_n_s32(4)));
    }
  }
  return to_float(code);
}

KVARN_ALWAYS_INLINE void prefetch(const std::byte* p) { __builtin_prefetch(p); }

// Takes the codes of a plane out of the bytes of a word.
class code_cutter {
 public:
  KVARN_ALWAYS_INLINE explicit code_cutter(int width)
      : mask_(vdupq_n_s32(0x01010101 * ((1 << width) - 1))), shift_(vdupq_n_s32(-width)) {}
  // Code s of each byte, for s = 0 .. 8 / width - 1 in this order.
  KVARN_ALWAYS_INLINE words cut(words& word, int) const {
    const int32x4_t code = vandq_s32(word.v, mask_);
    word.v = vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(word.v), shift_));
    return {code};
  }

 private:
  int32x4_t mask_;
  int32x4_t shift_;
};

// Exact sums of products of codes and operands (signed bytes both), four a lane.
struct dot_sum {
  int32x4_t v;
};
inline constexpr int dot_accumulators = 16;
inline constexpr int max_dot_blocks = 4;  // of rows
inline constexpr bool dots_need_flush = false;
constexpr int dots_before_flush(int) { return max_head_dim; }
KVARN_ALWAYS_INLINE dot_sum no_dots() { return {vdupq_n_s32(0)}; }
KVARN_ALWAYS_INLINE void add_dots(dot_sum& sum, words codes, words operands) {
  // Not vdotq_s32, which clang 14 declares only where the whole file is compiled for it.
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sum.v) : "w"(codes.v), "w"(operands.v));
}
KVARN_ALWAYS_INLINE words flush(dot_sum sum) { return {sum.v}; }

// The low byte of each lane of four vectors, as the signed number that it is, and the second byte
// of what is left without it.
struct bytes64 {
  uint8x16_t v[4];
};
struct split_bytes {
  bytes64 low;
  bytes64 high;
};
inline constexpr int bytes_at_once = 64;
KVARN_ALWAYS_INLINE split_bytes split(const i32 (&x)[4]) {
  split_bytes r;
  KVARN_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint16x8_t a = low_words(x[i], 0);
    const uint16x8_t b = low_words(x[i], 1);
    const uint16x8_t carry = vdupq_n_u16(128);
    r.low.v[i] = vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
    r.high.v[i] = vuzp2q_u8(vreinterpretq_u8_u16(vaddq_u16(a, carry)),
                            vreinterpretq_u8_u16(vaddq_u16(b, carry)));
  }
  return r;
}
// To the order in which codes of a width leave a word: see folded_heads.
KVARN_ALWAYS_INLINE void store_quads(std::int32_t* out, const bytes64& bytes, int width) {
  auto* const p = reinterpret_cast<std::uint8_t*>(out);
  if (width == 1) {
    const uint8x16_t order = {0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27};
    KVARN_UNROLL
    for (std::ptrdiff_t i = 0; i < 4; i += 2) {
      const uint8x16x2_t pair = {{bytes.v[i], bytes.v[i + 1]}};
      vst1q_u8(p + 16 * i, vqtbl2q_u8(pair, order));
      vst1q_u8(p + 16 * i + 16, vqtbl2q_u8(pair, vaddq_u8(order, vdupq_n_u8(4))));
    }
  } else {
    const uint8x16_t two = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t four = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    const uint8x16_t order = width == 2 ? two : four;
    KVARN_UNROLL
    for (std::ptrdiff_t i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, vqtbl1q_u8(bytes.v[i], order));
  }
}

namespace here = neon;
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

}  // namespace neon
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __aarch64__
