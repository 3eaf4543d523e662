// The number types of records and tokens in vectors of 16, written once; included inside the region
// and namespace of each instruction set. The definitions: format/float8.hpp, format/float16.hpp,
// codec/tokens.hpp, codec/round_columns.hpp.

// FP8 codes to numbers.
KVARN_NOINLINE f32 decode_scales(i32 code, scale_type type) {
  if (type == scale_type::ue5m3) return half_to_float(shift_left<7>(code));
  const f32 normal = from_bits(add(shift_left<20>(code), set1_i32(0x3c000000)));
  const f32 subnormal = mul(to_float(code), set1(0x1p-9f));
  return from_bits(select_less(code, set1_i32(8), bits(subnormal), bits(normal)));
}

// Steps or scales of 16 columns or rows.
KVARN_ALWAYS_INLINE f32 decode_scales(const std::byte* codes, scale_type type) {
  return type == scale_type::ue5m3 ? load_ue5m3(codes) : decode_scales(load_u8(codes), type);
}

// The FP8 codes nearest to `value`.
KVARN_NOINLINE i32 round_scales(f32 value, scale_type type) {
  const f32 positive = max(value, set1(0.0f));
  const i32 one = set1_i32(1);
  if (type == scale_type::ue5m3) {
    const i32 half = float_to_half(positive);
    const i32 odd = bit_and(shift_right<7>(half), one);
    const i32 code = shift_right<7>(add(add(half, set1_i32(0x3f)), odd));
    return min(max(code, set1_i32(ue5m3::min_code)), set1_i32(ue5m3::max_code));
  }
  const i32 pattern = bits(positive);
  const i32 odd = bit_and(shift_right<20>(pattern), one);
  const i32 normal =
      shift_right<20>(add(add(sub(pattern, set1_i32(0x3c000000)), odd), set1_i32(0x7ffff)));
  const i32 subnormal = sub(bits(add(positive, set1(0x1p14f))), set1_i32(0x46800000));
  const i32 code = select_less(pattern, set1_i32(0x3c800000), subnormal, normal);
  return min(max(code, set1_i32(e4m3::min_code)), set1_i32(e4m3::max_code));
}

// float16::saturated, in the low bits of lanes. `value` is not NaN.
KVARN_ALWAYS_INLINE i32 saturated_half(f32 value) {
  const i32 half = float_to_half(value);
  const i32 magnitude = min(bit_and(half, set1_i32(0x7fff)), set1_i32(float16::max_bits));
  return bit_or(bit_and(half, set1_i32(0x8000)), magnitude);
}

// bfloat16::saturated, in the low bits of lanes. `value` is not NaN.
KVARN_ALWAYS_INLINE i32 saturated_bfloat16(f32 value) {
  const i32 pattern = bits(value);
  const i32 odd = bit_and(shift_right<16>(pattern), set1_i32(1));
  const i32 rounded = shift_right<16>(add(add(pattern, set1_i32(0x7fff)), odd));
  const i32 magnitude = min(bit_and(rounded, set1_i32(0x7fff)), set1_i32(bfloat16::max_bits));
  return bit_or(bit_and(rounded, set1_i32(0x8000)), magnitude);
}

// kvarn::nearest_zero.
KVARN_ALWAYS_INLINE i32 nearest_zeros(f32 value) {
  const i32 half = saturated_half(value);
  const i32 magnitude = bit_and(half, set1_i32(0x7fff));
  return select_less(magnitude, set1_i32(1), magnitude, half);
}

// kvarn::zero_below.
KVARN_ALWAYS_INLINE i32 zeros_below(f32 value) {
  const i32 nearest = nearest_zeros(value);
  const i32 one = set1_i32(1);
  const i32 sign = set1_i32(0x8000);
  const i32 stepped = select_less(nearest, sign, sub(nearest, one), add(nearest, one));
  const i32 largest = bit_or(sign, set1_i32(float16::max_bits));
  const i32 below = min(select_less(nearest, one, bit_or(sign, one), stepped), largest);
  return bits(select_less(value, half_to_float(nearest), from_bits(below), from_bits(nearest)));
}

// Sixteen consecutive channels as floats.
KVARN_ALWAYS_INLINE f32 load_channels(const float* p) { return load(p); }
KVARN_ALWAYS_INLINE f32 load_channels(const float16* p) { return load_half(p); }
KVARN_ALWAYS_INLINE f32 load_channels(const bfloat16* p) {
  return from_bits(shift_left<16>(load_u16(p)));
}

// The inverse, saturated.
KVARN_ALWAYS_INLINE void store_channels(float* p, f32 x) { store(p, x); }
KVARN_ALWAYS_INLINE void store_channels(float16* p, f32 x) { store_u16(p, saturated_half(x)); }
KVARN_ALWAYS_INLINE void store_channels(bfloat16* p, f32 x) { store_u16(p, saturated_bfloat16(x)); }

// Lanes that sanitize() replaces are above this when their sign is cleared.
inline constexpr std::int32_t largest_storable = 0x477fe000;  // 65504
KVARN_ALWAYS_INLINE i32 magnitude_bits(f32 x) { return bit_and(bits(x), set1_i32(0x7fffffff)); }

// kvarn::sanitize of 16 numbers.
inline f32 sanitize(f32 x, replaced_values& replaced) {
  const i32 magnitude = magnitude_bits(x);
  const i32 largest = set1_i32(largest_storable);
  const i32 infinity = set1_i32(0x7f800000);
  const int nan = count_less(infinity, magnitude);
  replaced.nan += nan;
  replaced.saturated += count_less(largest, magnitude) - nan;
  const i32 sign = sub(bits(x), magnitude);
  const i32 storable = bit_or(min(magnitude, largest), sign);
  return from_bits(select_less(infinity, magnitude, set1_i32(0), storable));
}
