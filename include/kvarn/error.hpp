// How the library reports what it cannot accept: a status or a result, with a message for a person.
#pragma once

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "config.hpp"

namespace kvarn {

enum class error_code {
  ok,
  invalid_format,    // a size, bit width or combination that no record has
  invalid_argument,  // a value that contradicts another or is out of its range
  short_buffer,      // fewer bytes than the record, workspace or output needs
  invalid_data,      // bytes that no encoder of this library writes
};

#if KVARN_EXCEPTIONS
// What status::or_throw and result::value throw.
class error : public std::runtime_error {
 public:
  error(error_code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  error_code code() const noexcept { return code_; }

 private:
  error_code code_;
};
#endif

// Success, or what was wrong: the message names the value and what is allowed.
class [[nodiscard]] status {
 public:
  status() = default;
  status(error_code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == error_code::ok; }
  error_code code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

  // Throws kvarn::error unless ok. Built without exceptions it aborts instead.
  void or_throw() const {
    if (ok()) return;
#if KVARN_EXCEPTIONS
    throw error(code_, message_);
#else
    std::abort();
#endif
  }

 private:
  error_code code_ = error_code::ok;
  std::string message_;
};

// A value, or the status that says why there is none.
template <class T>
class [[nodiscard]] result {
 public:
  result(T value) : value_(std::move(value)) {}            // NOLINT(google-explicit-constructor)
  result(status failure) : status_(std::move(failure)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const noexcept { return status_.ok(); }
  explicit operator bool() const noexcept { return ok(); }
  const status& why() const noexcept { return status_; }

  // The value; without one it throws or aborts as status::or_throw does.
  T& value() & {
    status_.or_throw();
    return *value_;
  }
  const T& value() const& {
    status_.or_throw();
    return *value_;
  }
  T&& value() && {
    status_.or_throw();
    return *std::move(value_);
  }

 private:
  std::optional<T> value_;
  status status_;
};

}  // namespace kvarn
