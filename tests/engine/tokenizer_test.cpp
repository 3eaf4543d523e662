// The tokenizer against the Python package tokenizers, against the definition of BPE, and on bytes
// that are no text.
#include "../examples/engine/tokenizer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../examples/engine/utf8.hpp"
#include "engine/tokenizer_files.hpp"

namespace {

using kvarn_engine::gguf_file;
using kvarn_engine::pre_tokenizer;
using kvarn_engine::token_id;
using kvarn_engine::tokenizer;
using kvarn_test::byte_vocabulary;
using kvarn_test::gguf_writer;
using kvarn_test::tokenizer_of;
using ids = std::vector<token_id>;

constexpr const char* pre_names[] = {"gpt-2", "smollm", "qwen2"};

TEST(PreTokenizer, WordsAreThoseOfThePythonPackage) {
  const auto samples = kvarn_test::tokenizer_samples();
  const auto texts = samples["samples"].get<std::vector<std::string>>();
  ASSERT_GE(texts.size(), 10u);
  for (const char* const pre : pre_names) {
    const auto words = pre_tokenizer::make(pre).value();
    for (std::size_t i = 0; i < texts.size(); ++i) {
      std::vector<std::size_t> lengths;
      std::string joined;
      ASSERT_TRUE(words
                      .split(texts[i],
                             [&](std::string_view word) {
                               lengths.push_back(word.size());
                               joined += word;
                             })
                      .ok());
      EXPECT_EQ(joined, texts[i]);
      EXPECT_EQ(lengths, samples["word_bytes"][pre][i].get<std::vector<std::size_t>>())
          << pre << ": " << texts[i];
    }
  }
}

TEST(PreTokenizer, OtherNamesAreErrors) {
  const auto why = pre_tokenizer::make("llama-bpe").why();
  EXPECT_EQ(why.code(), kvarn::error_code::invalid_data);
  EXPECT_EQ(why.message(), "is 'llama-bpe'; these are read: gpt-2, smollm, qwen2");
}

TEST(Tokenizer, IdsAreThoseOfThePythonPackage) {
  const auto samples = kvarn_test::tokenizer_samples();
  const auto texts = samples["samples"].get<std::vector<std::string>>();
  for (const char* const pre : pre_names) {
    const auto t = tokenizer_of(kvarn_test::sample_vocabulary(samples).writer(pre));
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const auto got = t.encode(texts[i], true).value();
      EXPECT_EQ(got, samples["ids"][pre][i].get<ids>()) << pre << ": " << texts[i];
      EXPECT_EQ(t.decode(got), texts[i]);
      const auto plain = t.encode(texts[i], false).value();
      EXPECT_EQ(plain, samples["ids_without_special"][pre][i].get<ids>())
          << pre << ": " << texts[i];
      EXPECT_EQ(t.decode(plain), texts[i]);
    }
  }
}

// On the model of tools/fetch-model.sh.
TEST(Tokenizer, IdsOfTheModelAreThoseOfThePythonPackage) {
  const auto path = std::filesystem::path(KVARN_MODEL_DIR) / "SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path))
    GTEST_SKIP() << path << " is not there; tools/fetch-model.sh fetches it";
  const auto samples = kvarn_test::tokenizer_samples();
  const auto texts = samples["samples"].get<std::vector<std::string>>();
  const auto file = gguf_file::open(path.string()).value();
  const auto t = tokenizer::from_gguf(file).value();
  EXPECT_EQ(t.size(), 49152);
  EXPECT_EQ(t.bos(), 1);
  EXPECT_EQ(t.eos(), 2);
  EXPECT_FALSE(t.adds_bos());
  EXPECT_EQ(t.find_special("<|im_start|>"), 1);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto got = t.encode(texts[i], true).value();
    EXPECT_EQ(got, samples["model_ids"][i].get<ids>()) << texts[i];
    EXPECT_EQ(t.decode(got), texts[i]);
  }
}

// The definition of BPE: the neighbours of the lowest rank become one, the leftmost first.
ids merge_slowly(ids word, const std::map<std::pair<token_id, token_id>, token_id>& merges) {
  for (;;) {
    // Results are numbered by rank.
    std::size_t best = word.size();
    token_id merged = 1 << 30;
    for (std::size_t i = 0; i + 1 < word.size(); ++i) {
      const auto found = merges.find({word[i], word[i + 1]});
      if (found != merges.end() && found->second < merged) {
        best = i;
        merged = found->second;
      }
    }
    if (best == word.size()) return word;
    word[best] = merged;
    word.erase(word.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Tokenizer, MergesFollowTheDefinition) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    // Random merges of four letters and of what has been merged before.
    std::vector<std::string> symbols = {"a", "b", "c", "d"};
    ids numbers = {'a', 'b', 'c', 'd'};
    std::vector<std::string> merges;
    std::map<std::pair<token_id, token_id>, token_id> table;
    while (merges.size() < 25) {
      const std::size_t left = random() % symbols.size();
      const std::size_t right = random() % symbols.size();
      const std::string merged = symbols[left] + symbols[right];
      if (std::ranges::find(symbols, merged) != symbols.end() || merged.size() > 12) continue;
      const auto number = static_cast<token_id>(256 + merges.size());
      merges.push_back(symbols[left] + " " + symbols[right]);
      table[{numbers[left], numbers[right]}] = number;
      symbols.push_back(merged);
      numbers.push_back(number);
    }
    const auto t = tokenizer_of(byte_vocabulary(merges).writer("gpt-2"));
    for (int word = 0; word < 60; ++word) {
      std::string text;
      for (auto length = random() % 40; length > 0; --length)
        text += static_cast<char>('a' + random() % 4);
      EXPECT_EQ(t.encode(text, false).value(), merge_slowly(ids(text.begin(), text.end()), table))
          << text;
    }
  }
}

TEST(Tokenizer, BytesThatAreNoTextComeBack) {
  const auto t =
      tokenizer_of(byte_vocabulary({"a b", "\u0120 a", "\u00c3 \u00a9"}).writer("qwen2"));
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  EXPECT_EQ(t.decode(t.encode(all, true).value()), all);
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    const std::string_view parts[] = {
        "ab",       " a",   "\xc3\xa9", "\xc3", "\xf0\x9f\x98\x80", "\xf0\x9f\x98", "\xed\xa0\x80",
        "\xc0\x80", "\xff", "1",        "\n"};
    for (auto length = random() % 12; length > 0; --length)
      text += random() % 4 == 0 ? std::string(1, static_cast<char>(random()))
                                : std::string(parts[random() % std::size(parts)]);
    EXPECT_EQ(t.decode(t.encode(text, true).value()), text);
  }
}

// Quadratic steps would run into the time limit of the test.
TEST(Tokenizer, LongWordsTakeLittleTime) {
  const auto vocabulary =
      byte_vocabulary({"a a", "aa aa", "aaaa aaaa", "\u0120 \u0120", "\u0120\u0120 \u0120\u0120"});
  constexpr std::size_t length = 1 << 18;
  for (const char* const pre : pre_names) {
    const auto t = tokenizer_of(vocabulary.writer(pre));
    EXPECT_EQ(t.encode(std::string(length, 'a'), false).value().size(), length / 8);
    for (const char* const unit :
         {" ", "\n", "\r\n", "=", "7", "\xc3\xa9", "\xff", "'", "<", "a "}) {
      std::string text;
      while (text.size() < length) text += unit;
      EXPECT_EQ(t.decode(t.encode(text + "x", true).value()), text + "x") << pre << " " << unit;
    }
  }
}

class SpecialTokens : public testing::Test {
 protected:
  SpecialTokens() {
    const auto add = [this](const std::string& token, int type) {
      words.tokens.push_back(token);
      words.types.push_back(type);
    };
    add("<s>", 3);                  // 256, control
    add("<s>s>", 3);                // 257, longer
    add("\u00e9t\u00e9 <end>", 4);  // 258, user-defined: raw text
    add("<unk>", 2);                // 259
    add("[unused]", 5);             // 260
    add("<|im_end|>", 3);           // 261
  }
  kvarn_test::vocabulary words = byte_vocabulary({});
};

ids with(const std::string& before, token_id id, const std::string& after) {
  ids all(before.begin(), before.end());
  all.push_back(id);
  all.insert(all.end(), after.begin(), after.end());
  return all;
}

TEST_F(SpecialTokens, AreFoundWhereAsked) {
  const auto t = tokenizer_of(words.writer("smollm"));
  EXPECT_EQ(t.encode("a<s>b", true).value(), with("a", 256, "b"));
  EXPECT_EQ(t.encode("a<s>s>b", true).value(), with("a", 257, "b"));
  EXPECT_EQ(t.encode("<s><unk>", true).value(), (ids{256, 259}));
  const std::string plain = "a<s>b<unk><|im_end|>[unused]";
  EXPECT_EQ(t.encode(plain, false).value(), ids(plain.begin(), plain.end()));
  for (const bool parse : {false, true})
    EXPECT_EQ(t.encode("x\u00e9t\u00e9 <end>y", parse).value(), with("x", 258, "y"));
  EXPECT_EQ(t.encode("[unused]", true).value().size(), 8u);
  EXPECT_EQ(t.encode("<s", true).value(), (ids{'<', 's'}));
}

TEST_F(SpecialTokens, AreShownOrNot) {
  const auto t = tokenizer_of(words.writer("smollm"));
  const ids some = {'a', 256, 258, 259, 'b', -1, 100000};
  EXPECT_EQ(t.decode(some), "a<s>\u00e9t\u00e9 <end><unk>b");
  EXPECT_EQ(t.decode(some, false), "a\u00e9t\u00e9 <end>b");
  EXPECT_EQ(t.piece(257), "<s>s>");
  EXPECT_EQ(t.piece(-1), "");
  EXPECT_EQ(t.piece(t.size()), "");
  EXPECT_TRUE(t.is_control(256));
  EXPECT_FALSE(t.is_control(258));
  EXPECT_FALSE(t.is_control(-1));
  EXPECT_EQ(t.find_special("<s>s>"), 257);
  EXPECT_FALSE(t.find_special("a").has_value());
}

TEST_F(SpecialTokens, BeginningAndEnd) {
  auto writer = words.writer("smollm");
  EXPECT_FALSE(tokenizer_of(writer).bos().has_value());
  EXPECT_TRUE(tokenizer_of(writer).ends_generation(261));  // by its name
  EXPECT_FALSE(tokenizer_of(writer).ends_generation(257));
  writer.add("tokenizer.ggml.bos_token_id", 256)
      .add("tokenizer.ggml.eos_token_id", 257)
      .add("tokenizer.ggml.add_bos_token", true);
  const auto t = tokenizer_of(writer);
  EXPECT_EQ(t.bos(), 256);
  EXPECT_EQ(t.eos(), 257);
  EXPECT_TRUE(t.adds_bos());
  EXPECT_TRUE(t.ends_generation(257));
  EXPECT_TRUE(t.ends_generation(261));
  EXPECT_FALSE(t.ends_generation(256));
}

TEST(TextStream, GivesWholeCharacters) {
  const auto t = tokenizer_of(byte_vocabulary({}).writer("gpt-2"));
  kvarn_engine::text_stream stream(t);
  const auto push = [&](int byte) { return stream.push(byte); };
  EXPECT_EQ(push('a'), "a");
  EXPECT_EQ(push(0xc3), "");
  EXPECT_EQ(push(0xa9), "\u00e9");
  EXPECT_EQ(push(0xf0), "");
  EXPECT_EQ(push(0x9f), "");
  EXPECT_EQ(push(0x98), "");
  EXPECT_EQ(push(0x80), "\xf0\x9f\x98\x80");
  EXPECT_EQ(push(0xff), "\xff");  // can never be completed
  EXPECT_EQ(push(0xe2), "");
  EXPECT_EQ(push('b'),
            "\xe2"
            "b");
  EXPECT_EQ(push(0xe2), "");
  EXPECT_EQ(stream.finish(), "\xe2");
  EXPECT_EQ(stream.finish(), "");

  std::mt19937 random(13);
  std::string all;
  ids pushed;
  for (int i = 0; i < 20000; ++i) {
    pushed.push_back(
        static_cast<token_id>(random() % 2 == 0 ? 0x80 + random() % 128 : random() % 256));
    all += stream.push(pushed.back());
  }
  EXPECT_EQ(all + stream.finish(), t.decode(pushed));
}

std::string error_of(const gguf_writer& writer) {
  const auto file = gguf_file::from_bytes(writer.bytes(), "m").value();
  const auto made = tokenizer::from_gguf(file);
  if (made.ok()) return "read";
  EXPECT_EQ(made.why().code(), kvarn::error_code::invalid_data);
  return made.why().message();
}

TEST(Tokenizer, BadFilesAreErrors) {
  const auto good = byte_vocabulary({"a b"});
  EXPECT_EQ(error_of(good.writer("gpt-2")), "read");
  EXPECT_EQ(error_of(gguf_writer()), "m: no metadata 'tokenizer.ggml.model'; wanted: string");
  EXPECT_EQ(error_of(gguf_writer().add("tokenizer.ggml.model", "llama")),
            "m: tokenizer.ggml.model is 'llama'; gpt2 (byte-level BPE) is read");
  EXPECT_EQ(error_of(good.writer("x")),
            "m: tokenizer.ggml.pre is 'x'; these are read: gpt-2, smollm, qwen2");
  const auto changed = [&](auto change) {
    auto bad = good;
    change(bad);
    return error_of(bad.writer("gpt-2"));
  };
  EXPECT_EQ(changed([](auto& v) { v.types.pop_back(); }),
            "m: tokenizer.ggml.token_type has 256 elements, tokens has 257");
  EXPECT_EQ(changed([](auto& v) { v.types[3] = 9; }),
            "m: tokenizer.ggml.token_type of token 3 is 9; 1 to 6 are allowed");
  EXPECT_EQ(changed([](auto& v) { v.merges = {"ab"}; }),
            "m: tokenizer.ggml.merges has 'ab'; two tokens with a space between are wanted");
  EXPECT_EQ(changed([](auto& v) { v.merges = {"a c"}; }),
            "m: tokenizer.ggml.merges has 'a c', but 'ac' is no token of bytes");
  EXPECT_EQ(changed([](auto& v) { v.merges = {"xy c"}; }),
            "m: tokenizer.ggml.merges has 'xy c', but 'xy' is no token of bytes");
  EXPECT_EQ(changed([](auto& v) { v.tokens.clear(), v.types.clear(), v.merges.clear(); }),
            "m: tokenizer.ggml.tokens has 0 elements; 1 to 2^31 - 1 are allowed");
  EXPECT_EQ(error_of(good.writer("gpt-2").add("tokenizer.ggml.eos_token_id", 257)),
            "m: tokenizer.ggml.eos_token_id is 257; there are 257 tokens");
  EXPECT_EQ(error_of(good.writer("gpt-2").add("tokenizer.ggml.bos_token_id", -1)),
            "m: tokenizer.ggml.bos_token_id is -1; there are 257 tokens");
  EXPECT_EQ(error_of(good.writer("gpt-2").add("tokenizer.ggml.add_bos_token", true)),
            "m: tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id");
}

TEST(Tokenizer, BytesWithoutATokenAreNamed) {
  auto vocabulary = byte_vocabulary({});
  vocabulary.tokens[0xff] = "ab";
  const auto why = tokenizer_of(vocabulary.writer("gpt-2")).encode("xy\xff", true).why();
  EXPECT_EQ(why.code(), kvarn::error_code::invalid_argument);
  EXPECT_EQ(why.message(), "byte 255 at place 2 of the text has no token in this vocabulary");
}

}  // namespace
