// kvarn-tokenize MODEL.gguf TEXT: prints the ids of the tokens of a file, one on a line. Names of
// control tokens in the text become these tokens.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

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
    std::ifstream input(arguments[2], std::ios::binary);
    if (!input) throw std::runtime_error(std::string(arguments[2]) + ": cannot be opened");
    const std::string text(std::istreambuf_iterator<char>(input), {});
    for (const auto id : tokens.encode(text, true).value()) std::printf("%d\n", id);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", arguments[0], error.what());
    return 1;
  }
  return 0;
}
