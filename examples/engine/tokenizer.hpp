// Byte-level BPE out of a GGUF file: text to token ids and back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "byte_pair.hpp"
#include "gguf.hpp"
#include "kvarn/error.hpp"
#include "pre_tokenizer.hpp"

namespace kvarn_engine {

// Immutable: threads may share one.
class tokenizer {
 public:
  // From tokenizer.ggml.{model, pre, tokens, token_type, merges, bos_token_id, eos_token_id,
  // eot_token_id, add_bos_token}, which are copied. model must be "gpt2", pre one of those that
  // pre_tokenizer::make knows. Errors: invalid_data, names the key and the value.
  static kvarn::result<tokenizer> from_gguf(const gguf_file& file);

  // The tokens of a text of any bytes, UTF-8 or not; decode gives the same bytes back. No token is
  // put in front (see adds_bos). parse_special: the names of control tokens, as "<|im_end|>",
  // become these tokens; without it they are text like any other, which is what text from others
  // needs. Errors: invalid_argument, with its place, where the vocabulary has no token for a byte
  // of the text (a few control characters and bytes that UTF-8 never has), and for 4 GiB or more.
  kvarn::result<std::vector<token_id>> encode(std::string_view text, bool parse_special) const;

  // The bytes of the tokens, one after the other; without show_control nothing for control tokens.
  std::string decode(std::span<const token_id> ids, bool show_control = true) const;
  // The bytes of one token; of a control token its name; of an id outside of [0, size()) nothing.
  std::string_view piece(token_id id) const;

  token_id size() const { return static_cast<token_id>(kinds_.size()); }
  // A control token or one that the model's authors added, by name.
  std::optional<token_id> find_special(std::string_view name) const;
  bool is_control(token_id id) const;

  std::optional<token_id> bos() const { return bos_; }
  std::optional<token_id> eos() const { return eos_; }
  // Whether the model wants bos() in front of every text.
  bool adds_bos() const { return adds_bos_; }
  // Whether generation stops at this token: the end of a text, of a turn or of a document.
  bool ends_generation(token_id id) const;

 private:
  friend class tokenizer_builder;

  // As they are numbered in tokenizer.ggml.token_type.
  enum class kind : std::int8_t { normal = 1, unknown, control, user_defined, unused, byte };

  // A token that is found in text as it stands, before words are cut.
  struct special_token {
    std::string name;
    token_id id;
  };

  tokenizer() = default;
  bool contains(token_id id) const { return id >= 0 && id < size(); }
  const special_token* longest_special(std::string_view text, bool parse_special) const;
  kvarn::status encode_plain(std::string_view text, std::size_t offset,
                             std::vector<token_id>& out) const;

  pre_tokenizer words_;
  byte_pair_encoder merges_{{}, 0};
  std::array<token_id, 256> byte_tokens_{};  // -1: none
  std::vector<kind> kinds_;                  // of every token
  std::string bytes_;                        // of all tokens
  std::vector<std::size_t> ends_;            // of each one's bytes
  std::vector<special_token> specials_;      // sorted by name
  std::vector<token_id> ends_of_generation_;
  std::optional<token_id> bos_;
  std::optional<token_id> eos_;
  bool adds_bos_ = false;
};

// Text of tokens as they come, in whole characters: the first bytes of a character are kept until
// its last one is there. All outputs together equal tokenizer::decode.
class text_stream {
 public:
  // Precondition: the tokenizer outlives the stream.
  explicit text_stream(const tokenizer& vocabulary, bool show_control = false)
      : vocabulary_(&vocabulary), show_control_(show_control) {}
  std::string push(token_id id);
  // What is left of an incomplete character.
  std::string finish() { return std::exchange(pending_, {}); }

 private:
  const tokenizer* vocabulary_;
  bool show_control_;
  std::string pending_;
};

}  // namespace kvarn_engine
