// An array whose size is set when it is made, in memory of a resource: what tables of a cache are.
#pragma once

#include <cstddef>
#include <memory_resource>
#include <new>

#include "../config.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

template <class V>
class fixed_array {
 public:
  // `size` elements V(arguments...). The resource must outlive the array.
  template <class... Arguments>
  fixed_array(std::size_t size, std::pmr::memory_resource* memory, const Arguments&... arguments)
      : fixed_array(memory, size) {
    for (; size_ < capacity_; ++size_) new (data_ + size_) V(arguments...);
  }
  fixed_array(const fixed_array&) = delete;
  fixed_array& operator=(const fixed_array&) = delete;
  ~fixed_array() {
    for (std::size_t i = size_; i > 0; --i) data_[i - 1].~V();
    memory_->deallocate(data_, capacity_ * sizeof(V), alignof(V));
  }

  std::size_t size() const noexcept { return size_; }
  V& operator[](std::size_t i) {
    KVARN_ASSERT(i < size_);
    return data_[i];
  }
  const V& operator[](std::size_t i) const {
    KVARN_ASSERT(i < size_);
    return data_[i];
  }
  V* begin() noexcept { return data_; }
  V* end() noexcept { return data_ + size_; }
  const V* begin() const noexcept { return data_; }
  const V* end() const noexcept { return data_ + size_; }

 private:
  // Without elements as yet: the constructor that makes them may fail half way.
  fixed_array(std::pmr::memory_resource* memory, std::size_t capacity)
      : memory_(memory),
        data_(static_cast<V*>(memory->allocate(capacity * sizeof(V), alignof(V)))),
        capacity_(capacity) {}

  std::pmr::memory_resource* memory_;
  V* data_;
  std::size_t capacity_;
  std::size_t size_ = 0;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
