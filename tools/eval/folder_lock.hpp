// A lock on a folder of results, so that two programs do not write into one another's.
#pragma once

#include <filesystem>

namespace kvarn_eval {

// Held until it is destroyed, or the process ends in any way: the system's lock (flock) on
// FOLDER/lock, a file that stays.
class folder_lock {
 public:
  // Throws std::runtime_error that names the folder where another holds it, in this process too, or
  // where the system gives no lock. Precondition: the folder is there.
  explicit folder_lock(const std::filesystem::path& folder);
  ~folder_lock();
  folder_lock(const folder_lock&) = delete;
  folder_lock& operator=(const folder_lock&) = delete;

 private:
  int file_;
};

}  // namespace kvarn_eval
