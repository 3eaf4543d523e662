// Maps files with POSIX calls.
#include "file_bytes.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvarn_engine {

file_bytes::file_bytes(std::vector<std::byte> bytes) {
  auto owner = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  bytes_ = *owner;
  owner_ = std::move(owner);
}

kvarn::result<file_bytes> file_bytes::map(const std::string& path) {
  const auto failure = [&path](const std::string& what) {
    return kvarn::status(kvarn::error_code::invalid_argument, path + ": " + what);
  };
  struct descriptor {
    int number;
    ~descriptor() {
      if (number >= 0) close(number);
    }
  };
  // Not to wait for a writer where the path is a pipe.
  const descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) return failure(std::string("cannot be opened: ") + std::strerror(errno));
  struct stat facts {};
  if (fstat(file.number, &facts) != 0)
    return failure(std::string("cannot be examined: ") + std::strerror(errno));
  if (!S_ISREG(facts.st_mode)) return failure("is not a regular file");
  file_bytes mapped;
  const auto size = static_cast<std::size_t>(facts.st_size);
  if (size == 0) return mapped;  // nothing to map
  void* const start = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (start == MAP_FAILED) return failure(std::string("cannot be mapped: ") + std::strerror(errno));
  mapped.owner_ = std::shared_ptr<const void>(
      start, [size](const void* bytes) { munmap(const_cast<void*>(bytes), size); });
  mapped.bytes_ = {static_cast<const std::byte*>(start), size};
  return mapped;
}

kvarn::result<std::string> read_text(const std::string& path) {
  return kvarn::or_out_of_memory([&]() -> kvarn::result<std::string> {
    const auto file = file_bytes::map(path);
    if (!file) return file.why();
    const std::span<const std::byte> bytes = file.value().bytes();
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
}

}  // namespace kvarn_engine
