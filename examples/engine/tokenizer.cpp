// The tokenizer: what a GGUF file says about it, special tokens, and the way through the text.
#include "tokenizer.hpp"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "byte_alphabet.hpp"
#include "utf8.hpp"

namespace kvarn_engine {

// Throws kvarn::error; from_gguf makes a status of it.
class tokenizer_builder {
 public:
  explicit tokenizer_builder(const gguf_file& file) : file_(file) {}

  tokenizer build() {
    const auto model = file_.get<std::string_view>(key("model")).value();
    if (model != "gpt2")
      fail("model", "is " + detail::quoted(model) + "; gpt2 (byte-level BPE) is read");
    auto words = pre_tokenizer::make(file_.get<std::string_view>(key("pre")).value());
    if (!words) fail("pre", words.why().message());
    made_.words_ = std::move(words).value();
    read_tokens();
    read_merges();
    read_ids();
    return std::move(made_);
  }

 private:
  using kind = tokenizer::kind;

  static std::string key(const char* name) { return std::string("tokenizer.ggml.") + name; }
  [[noreturn]] void fail(const char* name, const std::string& what) const {
    throw kvarn::error(kvarn::error_code::invalid_data,
                       file_.name() + ": " + key(name) + " " + what);
  }

  void read_tokens() {
    const auto texts = file_.get<std::vector<std::string_view>>(key("tokens")).value();
    if (texts.empty() || texts.size() > std::numeric_limits<token_id>::max())
      fail("tokens",
           "has " + std::to_string(texts.size()) + " elements; 1 to 2^31 - 1 are allowed");
    const auto kinds = file_.find<std::vector<std::int32_t>>(key("token_type")).value();
    if (kinds && kinds->size() != texts.size())
      fail("token_type", "has " + std::to_string(kinds->size()) + " elements, tokens has " +
                             std::to_string(texts.size()));
    made_.byte_tokens_.fill(-1);
    ids_.reserve(texts.size());
    for (std::size_t i = 0; i < texts.size(); ++i)
      add_token(static_cast<token_id>(i), texts[i], kinds ? (*kinds)[i] : 1);
    std::ranges::stable_sort(made_.specials_, {}, &tokenizer::special_token::name);
  }

  void add_token(token_id id, std::string_view text, std::int32_t number) {
    if (number < static_cast<int>(kind::normal) || number > static_cast<int>(kind::byte))
      fail("token_type", "of token " + std::to_string(id) + " is " + std::to_string(number) +
                             "; 1 to 6 are allowed");
    const auto type = static_cast<kind>(number);
    made_.kinds_.push_back(type);
    // What is not written in the alphabet of bytes stands for itself.
    std::optional<std::string> bytes;
    if (type == kind::normal) bytes = bytes_of_symbols(text);
    if (bytes) {
      // Of two with the same text, the first: both mean the same bytes.
      ids_.emplace(text, id);
      if (bytes->size() == 1)
        made_.byte_tokens_[static_cast<unsigned char>((*bytes)[0])] = ids_.at(text);
    }
    made_.bytes_ += bytes ? std::string_view(*bytes) : text;
    made_.ends_.push_back(made_.bytes_.size());
    const bool special =
        type == kind::control || type == kind::unknown || type == kind::user_defined;
    if (special && !text.empty()) made_.specials_.push_back({std::string(text), id});
  }

  void read_merges() {
    const auto lines = file_.get<std::vector<std::string_view>>(key("merges")).value();
    if (lines.size() > std::numeric_limits<std::uint32_t>::max())
      fail("merges", "has more than 2^32 - 1 elements");
    std::vector<pair_merge> merges;
    merges.reserve(lines.size());
    for (const std::string_view line : lines) {
      // The alphabet has no space.
      const std::size_t space = line.find(' ');
      if (space == std::string_view::npos)
        fail("merges",
             "has " + detail::quoted(line) + "; two tokens with a space between are wanted");
      const std::string_view left = line.substr(0, space);
      const std::string_view right = line.substr(space + 1);
      merges.push_back({token_of(left, line), token_of(right, line),
                        token_of(std::string(left) + std::string(right), line)});
    }
    made_.merges_ = byte_pair_encoder(std::move(merges), made_.kinds_.size());
  }

  token_id token_of(std::string_view symbols, std::string_view line) const {
    const auto found = ids_.find(symbols);
    if (found == ids_.end())
      fail("merges", "has " + detail::quoted(line) + ", but " + detail::quoted(symbols) +
                         " is no token of bytes");
    return found->second;
  }

  std::optional<token_id> read_id(const char* name) {
    const auto id = file_.find<token_id>(key(name)).value();
    if (id && !made_.contains(*id))
      fail(name,
           "is " + std::to_string(*id) + "; there are " + std::to_string(made_.size()) + " tokens");
    return id;
  }

  void read_ids() {
    made_.bos_ = read_id("bos_token_id");
    made_.eos_ = read_id("eos_token_id");
    made_.adds_bos_ = file_.find<bool>(key("add_bos_token")).value().value_or(false);
    if (made_.adds_bos_ && !made_.bos_)
      fail("add_bos_token", "is true, but there is no " + key("bos_token_id"));
    // Files name one end only; chat models stop at others, too, known by their names.
    const std::optional<token_id> ends[] = {made_.eos_, read_id("eot_token_id"),
                                            made_.find_special("<|im_end|>"),
                                            made_.find_special("<|endoftext|>")};
    for (const auto& end : ends)
      if (end) made_.ends_of_generation_.push_back(*end);
  }

  const gguf_file& file_;
  tokenizer made_;
  std::unordered_map<std::string_view, token_id> ids_;  // of tokens of bytes, by their symbols
};

kvarn::result<tokenizer> tokenizer::from_gguf(const gguf_file& file) {
  return kvarn::or_out_of_memory([&]() -> kvarn::result<tokenizer> {
    try {
      return tokenizer_builder(file).build();
    } catch (const kvarn::error& error) {
      return kvarn::status(error.code(), error.what());
    }
  });
}

const tokenizer::special_token* tokenizer::longest_special(std::string_view text,
                                                           bool parse_special) const {
  const special_token* longest = nullptr;
  const std::string_view start = text.substr(0, 1);
  for (auto at = std::ranges::lower_bound(specials_, start, {}, &special_token::name);
       at != specials_.end() && at->name.starts_with(start); ++at) {
    const special_token& special = *at;
    if (!parse_special && kinds_[static_cast<std::size_t>(special.id)] != kind::user_defined)
      continue;
    if (text.starts_with(special.name) &&
        (longest == nullptr || special.name.size() > longest->name.size()))
      longest = &special;
  }
  return longest;
}

kvarn::result<std::vector<token_id>> tokenizer::encode(std::string_view text,
                                                       bool parse_special) const {
  return kvarn::or_out_of_memory([&]() -> kvarn::result<std::vector<token_id>> {
    constexpr std::size_t most = std::numeric_limits<std::uint32_t>::max() - 1;
    if (text.size() > most)
      return kvarn::status(kvarn::error_code::invalid_argument,
                           "a text of " + std::to_string(text.size()) + " bytes; at most " +
                               std::to_string(most) + " are allowed");
    std::vector<token_id> ids;
    std::size_t start = 0;  // of text that is not encoded yet
    for (std::size_t at = 0; at < text.size();) {
      const special_token* const special = longest_special(text.substr(at), parse_special);
      if (special == nullptr) {
        ++at;
        continue;
      }
      auto status = encode_plain(text.substr(start, at - start), start, ids);
      if (!status.ok()) return status;
      ids.push_back(special->id);
      at += special->name.size();
      start = at;
    }
    auto status = encode_plain(text.substr(start), start, ids);
    if (!status.ok()) return status;
    return ids;
  });
}

kvarn::status tokenizer::encode_plain(std::string_view text, std::size_t offset,
                                      std::vector<token_id>& out) const {
  const auto token_of = [this](char byte) {
    return byte_tokens_[static_cast<unsigned char>(byte)];
  };
  for (std::size_t i = 0; i < text.size(); ++i)
    if (token_of(text[i]) < 0)
      return {kvarn::error_code::invalid_argument,
              "byte " + std::to_string(static_cast<unsigned char>(text[i])) + " at place " +
                  std::to_string(offset + i) + " of the text has no token in this vocabulary"};
  std::vector<token_id> word_bytes;
  byte_pair_encoder::workspace space;
  return words_.split(text, [&](std::string_view word) {
    word_bytes.clear();
    for (const char byte : word) word_bytes.push_back(token_of(byte));
    merges_.encode(word_bytes, out, space);
  });
}

std::string_view tokenizer::piece(token_id id) const {
  if (!contains(id)) return {};
  const auto i = static_cast<std::size_t>(id);
  const std::size_t start = i == 0 ? 0 : ends_[i - 1];
  return std::string_view(bytes_).substr(start, ends_[i] - start);
}

std::string tokenizer::decode(std::span<const token_id> ids, bool show_control) const {
  std::string text;
  for (const token_id id : ids)
    if (show_control || !is_control(id)) text += piece(id);
  return text;
}

std::optional<token_id> tokenizer::find_special(std::string_view name) const {
  const auto at = std::ranges::lower_bound(specials_, name, {}, &special_token::name);
  if (at == specials_.end() || at->name != name) return std::nullopt;
  return at->id;
}

bool tokenizer::is_control(token_id id) const {
  if (!contains(id)) return false;
  const kind type = kinds_[static_cast<std::size_t>(id)];
  return type == kind::control || type == kind::unknown;
}

bool tokenizer::ends_generation(token_id id) const {
  return std::ranges::find(ends_of_generation_, id) != ends_of_generation_.end();
}

std::string text_stream::push(token_id id) {
  if (show_control_ || !vocabulary_->is_control(id)) pending_ += vocabulary_->piece(id);
  std::string whole = pending_.substr(0, pending_.size() - incomplete_suffix(pending_));
  pending_.erase(0, whole.size());
  return whole;
}

}  // namespace kvarn_engine
