// What the launchers take and return: plain structs, which C++ files can fill without nvcc.
//
// Pointers are to device memory unless it says otherwise. A struct that describes one group or one
// sequence stands in an array in device memory, so that a captured graph sees what is there when it
// runs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "../codec/encoder.hpp"
#include "../config.hpp"
#include "../format/float16.hpp"
#include "../format/tile_layout.hpp"

namespace kvarn::cuda {

// Blocks of a launch in y or z: the most sequences, or copies of rows, of one call.
inline constexpr int max_grid = 65535;

// Attention counts positions from a query's own in 32 bits: the first token of a sequence is less
// than this many in front of one past its last query.
inline constexpr std::int64_t max_distance = std::int64_t{1} << 30;

// What a launcher returns: a CUDA error, or cudaErrorInvalidValue for an argument that no kernel
// takes; the message names the value and what is allowed. Launchers neither allocate device memory
// nor synchronise, and can be captured in a graph.
struct [[nodiscard]] launch_status {
  cudaError_t code = cudaSuccess;
  std::string message = {};

  bool ok() const noexcept { return code == cudaSuccess; }
};

// The element types of tokens in device memory.
enum class element_type : std::uint8_t { float32, float16, bfloat16 };

template <class T>
inline constexpr element_type element_type_of = element_type::float32;
template <>
inline constexpr element_type element_type_of<float16> = element_type::float16;
template <>
inline constexpr element_type element_type_of<bfloat16> = element_type::bfloat16;

KVARN_INLINE constexpr int element_bytes(element_type type) {
  return type == element_type::float32 ? 4 : 2;
}

// Element (token, head, channel) stands at token * token + head * head + channel * channel, counted
// in elements; any strides, also negative ones.
struct token_strides {
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int64_t channel = 1;
};

// What was not stored as it came; a kernel adds to it.
struct replaced_counts {
  unsigned nan = 0;        // counted as 0
  unsigned saturated = 0;  // infinities and values beyond FP16, clamped to +-65504
};

// One group of tokens of one layer of one sequence, all KV heads: where it comes from and goes to.
struct encode_group {
  const void* tokens = nullptr;  // [group][kv_heads][head_dim] by encode_arguments::strides
  std::byte* page = nullptr;     // cache_format::page_bytes(kv_heads), 16-byte aligned
  // [kv_heads][head_dim][head_dim], 16-byte aligned; keys of query_aware only.
  const float* factors = nullptr;
};

struct encode_arguments {
  cache_format format = {};
  tile_kind kind = tile_kind::key;
  encoder method = encoder::tuned;
  element_type type = element_type::float16;
  token_strides strides = {};
  bool rotate = true;  // false: the tokens are rotated already
  int kv_heads = 1;
  const encode_group* groups = nullptr;  // device memory, `count` of them
  int count = 0;
  replaced_counts* replaced = nullptr;  // device memory, added to; may be null
  void* workspace = nullptr;            // encode_workspace_bytes, 16-byte aligned
};

// The tokens of one sealed group of one layer, all KV heads: where they come from and go to.
struct decode_group {
  const std::byte* page = nullptr;  // cache_format::page_bytes(kv_heads), 16-byte aligned
  void* tokens = nullptr;           // [count][kv_heads][head_dim] by decode_arguments::strides
  int count = 0;                    // tokens to write, from the first on; at most the group
};

struct decode_arguments {
  cache_format format = {};
  tile_kind kind = tile_kind::key;
  element_type type = element_type::float16;
  token_strides strides = {};
  bool rotate_back = true;
  int kv_heads = 1;
  const decode_group* groups = nullptr;  // device memory, `count` of them
  int count = 0;
};

// Queries of one layer of one sequence, and the sums that they are added to.
struct observed_queries {
  const void* queries = nullptr;  // [count][kv_heads * heads][head_dim] by strides
  float* sums = nullptr;          // [kv_heads][head_dim][head_dim], of no other of the call
  int count = 0;                  // tokens; times observe_arguments::heads below 2^31
};

struct observe_arguments {
  int head_dim = 128;  // of keys
  element_type type = element_type::float16;
  token_strides strides = {};
  bool rotate = true;  // false: the queries are rotated already
  int kv_heads = 1;
  int heads = 1;  // query heads that share a KV head, next to one another
  const observed_queries* sequences = nullptr;  // device memory, `count` of them
  int count = 0;
};

struct factor_arguments {
  int head_dim = 128;
  float damping = 0.1f;         // query_factor::default_damping
  const float* sums = nullptr;  // [count][head_dim][head_dim], the upper triangles
  float* factors = nullptr;     // the same shape; may be `sums`
  int count = 0;
};

// New tokens of one sequence, and the exact rows that take them: the first `to_sink` go to the
// sink, the others to the tail. Rows stand as [token][kv_heads][head_dim] without gaps.
struct append_sequence {
  void* sink_keys = nullptr;  // where the first of the tokens goes
  void* sink_values = nullptr;
  void* tail_keys = nullptr;
  void* tail_values = nullptr;
  std::int64_t first = 0;  // its first token among those of append_arguments
  std::int32_t count = 0;  // tokens; at most append_arguments::max_tokens
  std::int32_t to_sink = 0;
};

struct append_arguments {
  int key_head_dim = 128;
  int value_head_dim = 128;
  int kv_heads = 1;
  const void* keys = nullptr;    // [tokens][kv_heads][key_head_dim] by key_strides
  const void* values = nullptr;  // the same of values
  element_type type = element_type::float16;
  element_type exact_type = element_type::float16;
  token_strides key_strides = {};
  token_strides value_strides = {};
  bool rotate_keys = true;  // false: they are rotated already
  bool rotate_values = true;
  const append_sequence* sequences = nullptr;  // device memory, `count` of them
  int count = 0;
  int max_tokens = 1;                   // of one sequence
  replaced_counts* replaced = nullptr;  // device memory, added to; may be null
};

// Bytes to move; both places and the size are multiples of 16 bytes and do not overlap.
struct row_copy {
  void* to = nullptr;
  const void* from = nullptr;
  std::uint64_t bytes = 0;
};

// Tokens kept exact, rotated: channel c of token t of a KV head stands at
// t * strides.token + head * strides.head + c, by key_strides and value_strides.
struct exact_rows {
  const void* keys = nullptr;    // 16-byte aligned
  const void* values = nullptr;  // the same
  std::int64_t position = 0;     // of the first token
  std::int32_t count = 0;
};

// One sealed group of tokens in a sequence's list (as kvarn::sealed_page).
struct page_entry {
  std::int64_t position = 0;  // of its first token
  std::int32_t page = 0;      // at pages + page * page_bytes(kv_heads)
  std::int32_t count = 0;     // tokens that count, from the first on
};

// One sequence: its queries, and where its tokens are. Positions ascend from the sink to the tail,
// and are at most max_distance apart.
struct attention_sequence {
  const void* queries = nullptr;  // [tokens][kv_heads * heads][key_head_dim] by query_strides
  void* out = nullptr;            // [tokens][kv_heads * heads][value_head_dim] by out_strides
  float* lse = nullptr;           // [tokens][kv_heads * heads], or null
  std::int64_t position = 0;      // of the first query token
  std::int32_t tokens = 1;        // query tokens; at most attention_arguments::max_tokens
  std::int32_t page_count = 0;
  const page_entry* pages = nullptr;
  exact_rows sink = {};
  exact_rows tail = {};
};

struct attention_arguments {
  int kv_heads = 1;
  int heads = 1;  // query heads that share a KV head, next to one another
  element_type query_type = element_type::float16;
  element_type out_type = element_type::float16;
  element_type exact_type = element_type::float16;
  token_strides query_strides = {};
  token_strides out_strides = {};
  token_strides key_strides = {};      // of exact rows; multiples of 16 bytes, channel 1
  token_strides value_strides = {};    // the same
  float softmax_scale = 0.0f;          // most often 1/sqrt(key head_dim)
  float logit_soft_cap = 0.0f;         // cap * tanh(logit / cap); 0: none
  std::int64_t window = 0;             // tokens a query sees, itself and those before it; 0: all
  const float* sink_logits = nullptr;  // [kv_heads * heads]: joins the softmax without a value
  bool queries_rotated = false;
  bool rotate_output = true;
  const std::byte* pages = nullptr;               // 16-byte aligned
  const attention_sequence* sequences = nullptr;  // device memory, `count` of them
  int count = 0;
  // Bounds, over all sequences of the call (and of later runs of a captured graph).
  int max_tokens = 1;
  int max_pages = 0;
  int max_sink = 0;
  int max_tail = 0;
  void* workspace = nullptr;  // attention_workspace_bytes, 16-byte aligned
  int splits = 0;             // into how many parts a sequence is cut; 0: as the device needs
};

}  // namespace kvarn::cuda
