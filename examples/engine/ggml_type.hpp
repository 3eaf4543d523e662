// The element types of tensors in GGUF files: names and sizes of blocks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvarn_engine {

// The numbers that stand in files (ggml's enum ggml_type).
enum class ggml_type : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q6_k = 14,
  bf16 = 30,
};

// A row is a whole number of blocks, each `elements` numbers in `bytes` bytes.
struct ggml_block {
  std::uint32_t type;
  std::string_view name;
  std::uint32_t elements;
  std::uint32_t bytes;
};

// Every type that files have, also those that dequantize() does not read: the reader must know
// where their bytes end. A type that is not here refuses the file.
inline constexpr ggml_block ggml_blocks[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},
    {2, "Q4_0", 32, 2 + 16},  {3, "Q4_1", 32, 4 + 16},
    {6, "Q5_0", 32, 6 + 16},  {7, "Q5_1", 32, 8 + 16},
    {8, "Q8_0", 32, 2 + 32},  {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 4 + 12 + 128},
    {13, "Q5_K", 256, 176},   {14, "Q6_K", 256, 128 + 64 + 16 + 2},
    {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136},
    {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},
    {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
};

// Null for a number that is no type.
constexpr const ggml_block* find_block(ggml_type type) {
  for (const ggml_block& block : ggml_blocks)
    if (block.type == static_cast<std::uint32_t>(type)) return &block;
  return nullptr;
}

// "Q4_K", or "type 99".
inline std::string name_of(ggml_type type) {
  if (const ggml_block* block = find_block(type)) return std::string(block->name);
  return "type " + std::to_string(static_cast<std::uint32_t>(type));
}

}  // namespace kvarn_engine
