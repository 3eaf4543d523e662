#include "folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace kvarn_eval {

folder_lock::folder_lock(const std::filesystem::path& folder)
    : file_(open((folder / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  if (file_ >= 0 && flock(file_, LOCK_EX | LOCK_NB) == 0) return;
  const int reason = errno;
  if (file_ >= 0) close(file_);
  if (reason == EWOULDBLOCK)
    throw std::runtime_error(folder.string() +
                             ": another kvarn-eval is writing its results there; wait until it has "
                             "ended, or take another folder (--out)");
  throw std::runtime_error(folder.string() +
                           ": cannot be locked: " + std::generic_category().message(reason));
}

folder_lock::~folder_lock() { close(file_); }

}  // namespace kvarn_eval
