// The patterns of pre-tokenisation, run by PCRE2 (https://www.pcre.org).
//
// They split as the Python package tokenizers does: its ByteLevel for gpt-2, Digits before
// ByteLevel for smollm, its Split for qwen2. tools/compare_tokenizer.py compares them.
#include "pre_tokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "utf8.hpp"

namespace kvarn_engine {

namespace {

// \s as tokenizers knows it, the Unicode property White_Space, for use inside of []. PCRE2's own \s
// also has U+180E.
#define KVARN_SPACE R"(\t-\r\x{85}\p{Z})"

struct split_pattern {
  std::string_view name;
  std::string_view pattern;
};

// One of the alternatives matches at every character.
constexpr split_pattern split_patterns[] = {
    {"gpt-2",
     "'(?:[sdmt]|ll|ve|re)"
     R"(| ?\p{L}+| ?\p{N}+)"
     "| ?[^" KVARN_SPACE R"(\p{L}\p{N}]+)"
     "|[" KVARN_SPACE "]+(?![^" KVARN_SPACE "])"
     "|[" KVARN_SPACE "]+"},
    // Digits are cut off first, one by one, and end the text before them: spaces in front of a
    // digit stay together, as at the end.
    {"smollm",
     "'(?:[sdmt]|ll|ve|re)"
     R"(| ?\p{L}+|\p{N})"
     "| ?[^" KVARN_SPACE R"(\p{L}\p{N}]+)"
     "|[" KVARN_SPACE "]+(?![^" KVARN_SPACE R"(\p{N}]))"
     "|[" KVARN_SPACE "]+"},
    {"qwen2",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
     R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
     "| ?[^" KVARN_SPACE R"(\p{L}\p{N}]+[\r\n]*)"
     "|[" KVARN_SPACE R"(]*[\r\n]+)"
     "|[" KVARN_SPACE "]+(?![^" KVARN_SPACE "])"
     "|[" KVARN_SPACE "]+"},
};

#undef KVARN_SPACE

kvarn::status regex_failure(int code) {
  if (code == PCRE2_ERROR_NOMEMORY) return {kvarn::error_code::out_of_memory, "out of memory"};
  unsigned char text[256] = "";
  pcre2_get_error_message(code, text, sizeof text);
  return {kvarn::error_code::invalid_data,
          std::string("pre-tokenisation: PCRE2: ") + reinterpret_cast<const char*>(text)};
}

const pcre2_code* code_of(const std::shared_ptr<const void>& code) {
  return static_cast<const pcre2_code*>(code.get());
}

// `text` is well formed.
kvarn::status split_well_formed(const pcre2_code* code, std::string_view text,
                                pcre2_match_data* match,
                                const std::function<void(std::string_view)>& take) {
  for (std::size_t at = 0; at < text.size();) {
    // Unchecked: to check all that is left for every word would take quadratic time.
    const int found = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                  PCRE2_NO_UTF_CHECK, match, nullptr);
    if (found < 0) return regex_failure(found);
    const std::size_t end = pcre2_get_ovector_pointer(match)[1];
    take(text.substr(at, end - at));
    at = end;
  }
  return {};
}

}  // namespace

kvarn::result<pre_tokenizer> pre_tokenizer::make(std::string_view name) {
  std::string known;
  for (const split_pattern& candidate : split_patterns) {
    known += (known.empty() ? "" : ", ") + std::string(candidate.name);
    if (candidate.name != name) continue;
    int error = 0;
    std::size_t at = 0;
    pcre2_code* const code = pcre2_compile(
        reinterpret_cast<PCRE2_SPTR>(candidate.pattern.data()), candidate.pattern.size(),
        PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &at, nullptr);
    if (code == nullptr) return regex_failure(error);
    const std::shared_ptr<const void> owner(code, [code](const void*) { pcre2_code_free(code); });
    // Where this fails, matches are interpreted: slower, the same result.
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    return pre_tokenizer(owner);
  }
  return kvarn::status(kvarn::error_code::invalid_data,
                       "is '" + std::string(name.substr(0, 80)) + "'; these are read: " + known);
}

kvarn::status pre_tokenizer::split(std::string_view text,
                                   const std::function<void(std::string_view)>& take) const {
  const pcre2_code* const code = code_of(code_);
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create_from_pattern(code, nullptr), pcre2_match_data_free);
  if (match == nullptr) return regex_failure(PCRE2_ERROR_NOMEMORY);
  while (!text.empty()) {
    const std::size_t good = well_formed_prefix(text);
    auto status = split_well_formed(code, text.substr(0, good), match.get(), take);
    if (!status.ok()) return status;
    if (good < text.size()) take(text.substr(good, 1));
    text.remove_prefix((std::min)(good + 1, text.size()));
  }
  return {};
}

}  // namespace kvarn_engine
