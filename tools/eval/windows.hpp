// The parts of a text that are evaluated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../examples/engine/tokenizer.hpp"

namespace kvarn_eval {

struct window {
  std::string name;  // where it starts: "c100000" characters or "t4096" tokens into the text
  std::vector<int> tokens;
};

// `count` windows of `tokens` tokens each at equal distances, the first at the start. Throws
// std::runtime_error where the text is shorter than that without overlap.
std::vector<window> spread_windows(const kvarn_engine::tokenizer& vocabulary,
                                   const std::string& text, int count, int tokens);

// Windows that start at characters (code points) of the text. Throws std::runtime_error where one
// ends beyond it, or two are the same: its scores would count twice.
std::vector<window> windows_at(const kvarn_engine::tokenizer& vocabulary, const std::string& text,
                               const std::vector<std::int64_t>& offsets, int tokens);

}  // namespace kvarn_eval
