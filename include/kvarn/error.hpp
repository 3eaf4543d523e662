// How the library reports what it cannot accept: a status or a result, with a
// message for a person.
#pragma once

#include <concepts>
#include <cstdlib>
#include <initializer_list>
#include <new>
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
  out_of_memory,     // an allocation failed
  invalid_data,      // bytes that no encoder of this library writes
  device_failure,    // a call of a GPU's runtime failed
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

inline namespace KVARN_ISA_NAMESPACE {

// What status::or_throw does unless ok.
[[noreturn]] KVARN_COLD void raise([[maybe_unused]] error_code code,
                                   [[maybe_unused]] const std::string& message) {
#if KVARN_EXCEPTIONS
  throw error(code, message);
#else
  std::abort();
#endif
}

}  // namespace KVARN_ISA_NAMESPACE

// Success, or what was wrong: the message names the value and what is allowed.
class [[nodiscard]] status {
 public:
  status() = default;
  status(error_code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const noexcept { return code_ == error_code::ok; }
  error_code code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

  // Throws kvarn::error unless ok. Built without exceptions it aborts instead.
  KVARN_ALWAYS_INLINE void or_throw() const {
    if (!ok()) raise(code_, message_);
  }

 private:
  error_code code_ = error_code::ok;
  std::string message_;
};

// A piece of a message: a text, which must outlive it, or an integer.
struct message_part {
  const char* text = nullptr;
  bool negative = false;
  unsigned long long magnitude = 0;

  // NOLINTNEXTLINE(google-explicit-constructor)
  KVARN_INLINE constexpr message_part(const char* words) : text(words) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  KVARN_ALWAYS_INLINE message_part(const std::string& words) : text(words.c_str()) {}
  template <std::integral T>
  KVARN_INLINE constexpr message_part(T number)  // NOLINT(google-explicit-constructor)
      : magnitude(static_cast<unsigned long long>(number)) {
    if constexpr (std::signed_integral<T>) negative = number < 0;
    if (negative) magnitude = 0 - magnitude;
  }
};

inline namespace KVARN_ISA_NAMESPACE {

// Out of line, as all that only failures need.
KVARN_COLD void append_parts(std::string& message, std::initializer_list<message_part> parts) {
  for (const message_part& part : parts) {
    char digits[24];
    char* first = digits + sizeof(digits) - 1;
    *first = '\0';
    const char* text = part.text;
    if (text == nullptr) {
      unsigned long long left = part.magnitude;
      do *--first = static_cast<char>('0' + left % 10);
      while ((left /= 10) != 0);
      if (part.negative) *--first = '-';
      text = first;
    }
    message.append(text);
  }
}

KVARN_COLD std::string message_of(std::initializer_list<message_part> parts) {
  std::string message;
  append_parts(message, parts);
  return message;
}

KVARN_COLD status failure(error_code code, std::initializer_list<message_part> parts) {
  return {code, message_of(parts)};
}

}  // namespace KVARN_ISA_NAMESPACE

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
  // By value, so that a loop over f().value() holds what it runs over.
  T value() && {
    status_.or_throw();
    return *std::move(value_);
  }

 private:
  std::optional<T> value_;
  status status_;
};

inline namespace KVARN_ISA_NAMESPACE {

// What f() returns, or out_of_memory where an allocation in it fails.
template <class F>
auto or_out_of_memory(const F& f) -> decltype(f()) {
#if KVARN_EXCEPTIONS
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return status{error_code::out_of_memory, "out of memory"};  // short: allocates nothing itself
  }
#else
  return f();
#endif
}

}  // namespace KVARN_ISA_NAMESPACE

}  // namespace kvarn
