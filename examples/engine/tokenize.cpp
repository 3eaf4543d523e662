// kvarn-tokenize MODEL.gguf TEXT: prints the ids of the tokens of a file, one on a line. Names of
// control tokens in the text become these tokens.
#include <cstdio>
#include <exception>
#include <string>

#include "file_bytes.hpp"
#include "gguf.hpp"
#include "tokenizer.hpp"

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s MODEL.gguf TEXT\n", arguments[0]);
    return 2;
  }
  try {
    const auto file = kvarn_engine::gguf_file::open(arguments[1]).value();
    const auto tokens = kvarn_engine::tokenizer::from_gguf(file).value();
    const std::string text = kvarn_engine::read_text(arguments[2]).value();
    for (const auto id : tokens.encode(text, true).value()) std::printf("%d\n", id);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", arguments[0], error.what());
    return 1;
  }
  return 0;
}
