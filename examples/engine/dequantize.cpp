// The blocks of ggml's quantised types, one function each.
//
// The layouts are those of ggml (src/ggml-common.h and ggml-quants.c). Everything but the last
// product of Q6_K is exact in float, so that the result does not depend on contraction.
#include "dequantize.hpp"

#include <cstddef>
#include <cstring>
#include <string>

#include "kvarn/format/float16.hpp"

namespace kvarn_engine {

namespace {

float half_at(const std::byte* bytes) {
  return static_cast<float>(kvarn::float16::from_bits(detail::load<std::uint16_t>(bytes)));
}

int byte_at(const std::byte* bytes, int i) { return std::to_integer<int>(bytes[i]); }

// Every decoder below turns one block into its numbers.

void decode_f32(const std::byte* in, float* out) { *out = detail::load<float>(in); }

void decode_f16(const std::byte* in, float* out) { *out = half_at(in); }

void decode_bf16(const std::byte* in, float* out) {
  *out = static_cast<float>(kvarn::bfloat16::from_bits(detail::load<std::uint16_t>(in)));
}

// d, then 32 signed bytes q: d q.
void decode_q8_0(const std::byte* in, float* out) {
  const float d = half_at(in);
  for (int i = 0; i < 32; ++i)
    out[i] = d * static_cast<float>(detail::load<std::int8_t>(in + 2 + i));
}

// d, with kHasMinimum m, of 5 bits the 32 fifth bits, then 16 bytes: low halves are the codes q of
// numbers 0 to 15, high halves of 16 to 31. d q + m, or d (q - 2^(bits - 1)).
template <int kBits, bool kHasMinimum>
void decode_q4_q5(const std::byte* in, float* out) {
  const float d = half_at(in);
  const float m = kHasMinimum ? half_at(in + 2) : 0.0f;
  const std::byte* next = in + (kHasMinimum ? 4 : 2);
  std::uint32_t fifth = 0;
  if constexpr (kBits == 5) {
    fifth = detail::load<std::uint32_t>(next);
    next += 4;
  }
  for (int i = 0; i < 32; ++i) {
    const int low = i < 16 ? byte_at(next, i) & 15 : byte_at(next, i - 16) >> 4;
    const int code = low | static_cast<int>(fifth >> i & 1) << 4;
    const int centre = kHasMinimum ? 0 : 1 << (kBits - 1);
    out[i] = d * static_cast<float>(code - centre) + m;
  }
}

// d, e, 8 scales s and 8 minimums m of 6 bits in 12 bytes, then 4 times 32 bytes: low halves are
// the codes q of numbers 0 to 31 of 64, high halves of the others. d s q - e m, s and m per 32.
void decode_q4_k(const std::byte* in, float* out) {
  const float d = half_at(in);
  const float e = half_at(in + 2);
  const std::byte* const packed = in + 4;
  const std::byte* const codes = in + 16;
  for (int part = 0; part < 8; ++part) {
    // The first four have 6 bits of a byte. The last four have their low 4 bits in bytes 8 to 11,
    // and the upper 2 in what the first four leave.
    int scale = byte_at(packed, part % 4);
    int minimum = byte_at(packed, part % 4 + 4);
    if (part < 4) {
      scale &= 63;
      minimum &= 63;
    } else {
      const int low = byte_at(packed, part + 4);
      scale = scale >> 6 << 4 | (low & 15);
      minimum = minimum >> 6 << 4 | low >> 4;
    }
    const float step = d * static_cast<float>(scale);
    const float zero = e * static_cast<float>(minimum);
    for (int i = 0; i < 32; ++i) {
      const int pair = byte_at(codes, part / 2 * 32 + i);
      out[part * 32 + i] = step * static_cast<float>(part % 2 == 0 ? pair & 15 : pair >> 4) - zero;
    }
  }
}

// 128 bytes with low 4 bits, 64 with upper 2 bits, 16 signed scales s, d: d s (q - 32), s per 16.
// Of each half (128 numbers) 64 bytes hold the low bits of number i (0 to 63) below those of i +
// 64, and 32 bytes the upper bits of i, i + 32, i + 64 and i + 96 (i 0 to 31), lowest first.
void decode_q6_k(const std::byte* in, float* out) {
  const std::byte* const scales = in + 192;
  const float d = half_at(in + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128;
    const int at = i % 128;
    const int low = byte_at(in, half * 64 + at % 64) >> (at < 64 ? 0 : 4) & 15;
    const int high = byte_at(in, 128 + half * 32 + at % 32) >> (at / 32 * 2) & 3;
    const float step = d * static_cast<float>(detail::load<std::int8_t>(scales + i / 16));
    out[i] = step * static_cast<float>((high << 4 | low) - 32);
  }
}

using decoder = void (*)(const std::byte* block, float* out);

decoder decoder_of(ggml_type type) {
  switch (type) {
    case ggml_type::f32:
      return decode_f32;
    case ggml_type::f16:
      return decode_f16;
    case ggml_type::bf16:
      return decode_bf16;
    case ggml_type::q4_0:
      return decode_q4_q5<4, false>;
    case ggml_type::q4_1:
      return decode_q4_q5<4, true>;
    case ggml_type::q5_0:
      return decode_q4_q5<5, false>;
    case ggml_type::q5_1:
      return decode_q4_q5<5, true>;
    case ggml_type::q8_0:
      return decode_q8_0;
    case ggml_type::q4_k:
      return decode_q4_k;
    case ggml_type::q6_k:
      return decode_q6_k;
  }
  return nullptr;
}

kvarn::status unreadable(const gguf_tensor& tensor) {
  return {kvarn::error_code::invalid_format,
          "tensor " + detail::quoted(tensor.name) + " is " + name_of(tensor.type) +
              "; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q6_K can be dequantised"};
}

void decode_row(const gguf_tensor& tensor, std::uint64_t row, decoder decode, float* out) {
  const ggml_block& block = *find_block(tensor.type);
  const std::byte* in = tensor.bytes.data() + row * tensor.row_bytes();
  for (std::uint64_t i = 0; i < tensor.cols(); i += block.elements, in += block.bytes)
    decode(in, out + i);
}

}  // namespace

kvarn::result<float_matrix> dequantize(const gguf_tensor& tensor) {
  const decoder decode = decoder_of(tensor.type);
  if (decode == nullptr) return unreadable(tensor);
  return kvarn::or_out_of_memory([&]() -> kvarn::result<float_matrix> {
    float_matrix matrix(static_cast<Eigen::Index>(tensor.rows()),
                        static_cast<Eigen::Index>(tensor.cols()));
    for (std::uint64_t row = 0; row < tensor.rows(); ++row)
      decode_row(tensor, row, decode, matrix.data() + row * tensor.cols());
    return matrix;
  });
}

kvarn::status dequantize_row(const gguf_tensor& tensor, std::uint64_t row, std::span<float> out) {
  const decoder decode = decoder_of(tensor.type);
  if (decode == nullptr) return unreadable(tensor);
  if (row >= tensor.rows() || out.size() != tensor.cols())
    return {kvarn::error_code::invalid_argument,
            "row " + std::to_string(row) + " into " + std::to_string(out.size()) +
                " numbers; tensor " + detail::quoted(tensor.name) + " has " +
                std::to_string(tensor.rows()) + " rows of " + std::to_string(tensor.cols())};
  decode_row(tensor, row, decode, out.data());
  return {};
}

}  // namespace kvarn_engine
