#include "windows.hpp"

#include <algorithm>
#include <stdexcept>
#include <string_view>

namespace kvarn_eval {

namespace {

// The byte at which code point `index` starts; the size where there are fewer.
std::size_t byte_of(std::string_view text, std::int64_t index) {
  std::size_t at = 0;
  for (; at < text.size(); ++at)
    if ((static_cast<unsigned char>(text[at]) & 0xc0) != 0x80 && index-- == 0) break;
  return at;
}

// `where`: the text, or a part of it.
[[noreturn]] void too_short(const std::string& where, std::size_t found, int count, int tokens) {
  throw std::runtime_error(where + " has " + std::to_string(found) + " tokens; needed are " +
                           std::to_string(count) + " x " + std::to_string(tokens));
}

}  // namespace

std::vector<window> spread_windows(const kvarn_engine::tokenizer& vocabulary,
                                   const std::string& text, int count, int tokens) {
  const std::vector<int> all = vocabulary.encode(text, false).value();
  const auto size = static_cast<std::size_t>(tokens);
  const auto wanted = static_cast<std::size_t>(count) * size;
  if (all.size() < wanted) too_short("the text", all.size(), count, tokens);
  std::vector<window> windows;
  for (int i = 0; i < count; ++i) {
    const std::size_t first =
        all.size() * static_cast<std::size_t>(i) / static_cast<std::size_t>(count);
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(first);
    windows.push_back({"t" + std::to_string(first), {from, from + tokens}});
  }
  return windows;
}

std::vector<window> windows_at(const kvarn_engine::tokenizer& vocabulary, const std::string& text,
                               const std::vector<std::int64_t>& offsets, int tokens) {
  // No token is longer than some dozens of bytes; text beyond them changes none of the first.
  constexpr std::size_t bytes_per_token = 64;
  const auto size = static_cast<std::size_t>(tokens);
  std::vector<window> windows;
  for (const std::int64_t offset : offsets) {
    if (std::ranges::count(offsets, offset) > 1)
      throw std::runtime_error("two windows start at character " + std::to_string(offset) +
                               "; each may be given once");
    const std::string name = "c" + std::to_string(offset);
    const std::string_view rest = std::string_view(text).substr(byte_of(text, offset));
    std::vector<int> all = vocabulary.encode(rest.substr(0, size * bytes_per_token), false).value();
    if (all.size() < size)
      too_short("the text from character " + std::to_string(offset) + " on", all.size(), 1, tokens);
    all.resize(size);
    windows.push_back({name, std::move(all)});
  }
  return windows;
}

}  // namespace kvarn_eval
