// libFuzzer on the tokenizer: the first bytes choose merges of a vocabulary of bytes, the others
// are text, which must come back, whole and as a stream.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer_files.hpp"
#include "support/choices.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t*, std::size_t);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t longest_choices = 64;
  const std::size_t chosen = size < longest_choices ? size : longest_choices;
  kvarn_test::choices c(std::span<const std::uint8_t>(data, chosen));
  const char* const pre = c.of({"gpt-2", "smollm", "qwen2"});

  // Merges of the bytes of words that fuzzers and people write, and of earlier results.
  std::vector<std::string> symbols;
  for (const char byte : std::string(" \n'ab1<\xc3\xa9\xff"))
    symbols.push_back(kvarn_engine::symbol_of_byte(static_cast<unsigned char>(byte)));
  std::set<std::string> known(symbols.begin(), symbols.end());
  std::vector<std::string> merges;
  for (int i = c.below(20); i > 0; --i) {
    const std::string left =
        symbols[static_cast<std::size_t>(c.below(static_cast<int>(symbols.size())))];
    const std::string right =
        symbols[static_cast<std::size_t>(c.below(static_cast<int>(symbols.size())))];
    if (!known.insert(left + right).second) continue;
    merges.push_back(left + " " + right);
    symbols.push_back(left + right);
  }
  auto vocabulary = kvarn_test::byte_vocabulary(merges);
  for (const auto& [name, type] : {std::pair("<a", 3), std::pair("<ab", 3), std::pair("b1", 4)}) {
    vocabulary.tokens.emplace_back(name);
    vocabulary.types.push_back(type);
  }
  const auto tokenizer = kvarn_test::tokenizer_of(vocabulary.writer(pre));

  const std::string text(reinterpret_cast<const char*>(data) + chosen, size - chosen);
  for (const bool parse_special : {false, true}) {
    const auto ids = tokenizer.encode(text, parse_special).value();
    if (tokenizer.decode(ids) != text) std::abort();
    kvarn_engine::text_stream stream(tokenizer, true);
    std::string streamed;
    for (const auto id : ids) streamed += stream.push(id);
    if (streamed + stream.finish() != text) std::abort();
  }
  return 0;
}
