// Byte-level BPE out of a GGUF file: text to token ids and back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf.hpp"
#include "kvarn/error.hpp"

namespace kvarn_engine {

using token_id = std::int32_t;

// Immutable after from_gguf: threads may share one.
class tokenizer {
 public:
  // From tokenizer.ggml.{model, pre, tokens, token_type, merges, *_token_id, add_bos_token}, which
  // are copied. model must be "gpt2" and pre "gpt-2", "smollm" or "qwen2". Errors: invalid_data,
  // names the key and the value.
  static kvarn::result<tokenizer> from_gguf(const gguf_file& file);

  // Text of any bytes; decode gives them back, also where they are no UTF-8. No token is put in
  // front (see adds_bos). parse_special: the names of control tokens, as "<|im_end|>", become
  // these tokens; otherwise they are text like any other. Errors: invalid_data where the
  // vocabulary lacks a byte of the text and has no unknown token.
  kvarn::result<std::vector<token_id>> encode(std::string_view text, bool parse_special) const;

  // The bytes of all tokens, one after the other. Ids outside of [0, size()) have none.
  std::string decode(std::span<const token_id> ids, bool show_control = true) const;
  // The bytes of one; of a control token its name.
  std::string_view piece(token_id id) const;

  token_id size() const;
  std::optional<token_id> find_special(std::string_view name) const;  // "<|im_start|>"
  bool is_control(token_id id) const;

  std::optional<token_id> bos() const;
  std::optional<token_id> eos() const;
  // Whether the model wants bos() in front of every text.
  bool adds_bos() const;
  // Whether generation stops at this token: eos, or the end of a turn or document.
  bool ends_generation(token_id id) const;
};

// Text of tokens as they come, in whole characters: the bytes of a character that is not complete
// are kept until they are. All outputs together equal tokenizer::decode.
class text_stream {
 public:
  // The tokenizer must outlive the stream.
  explicit text_stream(const tokenizer& vocabulary, bool show_control = false);
  std::string push(token_id id);
  std::string finish();  // what is left of an incomplete character
};

}  // namespace kvarn_engine
