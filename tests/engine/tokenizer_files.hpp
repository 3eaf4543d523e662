// Vocabularies for tests of the tokenizer, as GGUF files in memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../examples/engine/byte_alphabet.hpp"
#include "../examples/engine/gguf.hpp"
#include "../examples/engine/tokenizer.hpp"
#include "support/gguf_writer.hpp"

namespace kvarn_test {

struct vocabulary {
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;
  std::vector<std::string> merges;

  gguf_writer writer(const std::string& pre) const {
    gguf_writer made;
    made.add("tokenizer.ggml.model", "gpt2")
        .add("tokenizer.ggml.pre", pre)
        .add_array("tokenizer.ggml.tokens", tokens)
        .add_array("tokenizer.ggml.token_type", types)
        .add_array("tokenizer.ggml.merges", merges);
    return made;
  }
};

inline kvarn_engine::tokenizer tokenizer_of(const gguf_writer& writer) {
  const auto file = kvarn_engine::gguf_file::from_bytes(writer.bytes()).value();
  return kvarn_engine::tokenizer::from_gguf(file).value();
}

// All bytes as tokens 0 to 255 (token 7 is byte 7), then `merges` of symbols with a space between,
// whose results are the next tokens.
inline vocabulary byte_vocabulary(const std::vector<std::string>& merges) {
  vocabulary made;
  for (int byte = 0; byte < 256; ++byte)
    made.tokens.push_back(kvarn_engine::symbol_of_byte(static_cast<unsigned char>(byte)));
  for (const std::string& merge : merges) {
    const std::size_t space = merge.find(' ');
    made.tokens.push_back(merge.substr(0, space) + merge.substr(space + 1));
  }
  made.merges = merges;
  made.types.assign(made.tokens.size(), 1);
  return made;
}

// tests/data/tokenizer.json.
inline nlohmann::json tokenizer_samples() {
  std::ifstream input(std::filesystem::path(KVARN_TEST_DATA_DIR) / "tokenizer.json");
  return nlohmann::json::parse(input);
}

inline vocabulary sample_vocabulary(const nlohmann::json& samples) {
  return {samples["tokens"].get<std::vector<std::string>>(),
          samples["token_type"].get<std::vector<std::int32_t>>(),
          samples["merges"].get<std::vector<std::string>>()};
}

}  // namespace kvarn_test
