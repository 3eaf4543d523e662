// Cuts text into the words within which byte-level BPE merges.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "kvarn/error.hpp"

namespace kvarn_engine {

class pre_tokenizer {
 public:
  pre_tokenizer() = default;  // of no use until it is assigned

  // `name` as in tokenizer.ggml.pre: "gpt-2", "smollm" or "qwen2". Error: invalid_data, "is 'x';
  // these are read: ..."
  static kvarn::result<pre_tokenizer> make(std::string_view name);

  // Calls take(word) for every word in order; together they are the text. A byte that is no part
  // of well-formed UTF-8 is a word of its own. Error: PCRE2's message.
  kvarn::status split(std::string_view text,
                      const std::function<void(std::string_view)>& take) const;

 private:
  explicit pre_tokenizer(std::shared_ptr<const void> code) : code_(std::move(code)) {}

  std::shared_ptr<const void> code_;  // a pcre2_code; matches only read it
};

}  // namespace kvarn_engine
