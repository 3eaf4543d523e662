#include "progress_bar.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace kvarn_eval {

progress_bar::progress_bar(int parts) : is_terminal_(isatty(2) != 0), parts_(parts) {}

progress_bar::~progress_bar() {
  if (is_terminal_) std::fputs("\r\033[K", stderr);
}

void progress_bar::start(const std::string& part) {
  part_ = part;
  draw(0);
}

void progress_bar::update(double done) { draw(done); }

void progress_bar::finish(const std::string& message) {
  ++finished_;
  if (is_terminal_) std::fputs("\r\033[K", stderr);
  if (!message.empty()) std::fprintf(stderr, "%s: %s\n", part_.c_str(), message.c_str());
}

void progress_bar::draw(double done) {
  if (!is_terminal_) return;
  const double all = (std::min)(1.0, (finished_ + done) / (std::max)(1, parts_));
  constexpr int width = 30;
  const auto filled = static_cast<int>(width * all);
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began_;
  const int left = all > 0 ? static_cast<int>(spent.count() * (1 - all) / all) : 0;
  std::fprintf(stderr, "\r\033[K[%s%s] %3.0f %%  %d:%02d left  %s",
               std::string(static_cast<std::size_t>(filled), '#').c_str(),
               std::string(static_cast<std::size_t>(width - filled), '.').c_str(), 100 * all,
               left / 60, left % 60, part_.c_str());
  std::fflush(stderr);
}

}  // namespace kvarn_eval
