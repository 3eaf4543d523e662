// The bytes of a file, mapped read-only, or handed over in memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvarn/error.hpp"

namespace kvarn_engine {

// Copies share the bytes, which live until the last copy is gone.
class file_bytes {
 public:
  file_bytes() = default;
  explicit file_bytes(std::vector<std::byte> bytes);

  // Maps a regular file. Precondition: nobody shortens it meanwhile; reading what is gone kills
  // the process (SIGBUS). Errors (invalid_argument) name the path and the system's reason.
  static kvarn::result<file_bytes> map(const std::string& path);

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::shared_ptr<const void> owner_;
  std::span<const std::byte> bytes_;
};

// The whole of a file, a copy. Errors as of file_bytes::map; out_of_memory.
kvarn::result<std::string> read_text(const std::string& path);

}  // namespace kvarn_engine
