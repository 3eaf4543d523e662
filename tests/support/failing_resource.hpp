// Memory that runs out: for tests of what a failed allocation leaves.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <new>

namespace kvarn_test {

// Fails every allocation from a given one on.
class failing_resource final : public std::pmr::memory_resource {
 public:
  int left = 1 << 30;

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (left-- <= 0) throw std::bad_alloc();
    return std::pmr::new_delete_resource()->allocate(bytes, alignment);
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }
};

}  // namespace kvarn_test
