// A line on a terminal that says how far a long computation is.
#pragma once

#include <chrono>
#include <string>

namespace kvarn_eval {

// On a terminal one line that is drawn again and again; into a file one line per finished part.
class progress_bar {
 public:
  // `parts` parts of about the same length.
  explicit progress_bar(int parts);
  ~progress_bar();
  progress_bar(const progress_bar&) = delete;
  progress_bar& operator=(const progress_bar&) = delete;

  void start(const std::string& part);
  void update(double done);                 // of the part, 0 to 1
  void finish(const std::string& message);  // ends the part; the message may be empty

 private:
  void draw(double done);

  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  bool is_terminal_;
  int parts_;
  int finished_ = 0;
  std::string part_;
};

}  // namespace kvarn_eval
