// Device memory of a cache: pages, a pool for exact rows, and arrays that the host fills and sends.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <memory_resource>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../cache/memory_account.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "arguments.hpp"

namespace kvarn::cuda {
inline namespace KVARN_ISA_NAMESPACE {

// Ok, or device_failure with what was tried and the runtime's words. An error is reported here and
// forgotten: the launch behind it does not take it for its own.
inline status status_of(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return {};
  cudaGetLastError();
  return {error_code::device_failure, std::string(what) + ": " + cudaGetErrorString(code)};
}
inline status status_of(const launch_status& launched, const char* what) {
  if (launched.ok()) return {};
  return {launched.code == cudaErrorInvalidValue ? error_code::invalid_argument
                                                 : error_code::device_failure,
          std::string(what) + ": " + launched.message};
}

// cudaMalloc and cudaFree.
inline std::pmr::memory_resource* device_resource() {
  class resource final : public std::pmr::memory_resource {
    void* do_allocate(std::size_t bytes, std::size_t) override {
      void* memory = nullptr;
      if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
      cudaGetLastError();  // it was reported
#if KVARN_EXCEPTIONS
      throw std::bad_alloc();
#else
      std::abort();
#endif
    }
    void do_deallocate(void* memory, std::size_t, std::size_t) override { cudaFree(memory); }
    bool do_is_equal(const memory_resource& other) const noexcept override {
      return this == &other;
    }
  };
  static resource the_resource;
  return &the_resource;
}

// Hands out pieces of one device allocation, first fit. Its lists are in host memory; a piece that
// is given back moves from one list to another, so that this allocates nothing.
class device_pool {
 public:
  device_pool(std::size_t bytes, std::pmr::memory_resource* tables)
      : bytes_(rounded(bytes)), free_(tables), used_(tables), retired_(tables) {
    if (bytes_ == 0) return;
    free_.emplace(0, bytes_);
    start_ = static_cast<std::byte*>(device_resource()->allocate(bytes_));
  }
  device_pool(const device_pool&) = delete;
  device_pool& operator=(const device_pool&) = delete;
  ~device_pool() {
    if (start_ != nullptr) device_resource()->deallocate(start_, bytes_);
  }

  // Null where no piece is large enough. std::bad_alloc, of the lists, changes nothing.
  void* try_allocate(std::size_t bytes) {
    const std::size_t size = rounded(bytes);
    for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
      if (piece->second < size) continue;
      const std::size_t offset = piece->first;
      if (piece->second == size) {
        used_.insert(free_.extract(piece));
      } else {
        used_.emplace(offset, size);
        auto rest = free_.extract(piece);
        rest.key() += size;
        rest.mapped() -= size;
        free_.insert(std::move(rest));
      }
      return start_ + offset;
    }
    return nullptr;
  }
  // Nobody will use the piece again, but kernels may still; collect gives back all such pieces.
  void retire(void* memory) {
    retired_.insert(
        used_.extract(static_cast<std::size_t>(static_cast<std::byte*>(memory) - start_)));
  }
  void collect() {
    while (!retired_.empty()) give_back(retired_.extract(retired_.begin()));
  }

 private:
  using pieces = std::pmr::map<std::size_t, std::size_t>;  // size by offset

  static constexpr std::size_t alignment = 256;
  static constexpr std::size_t rounded(std::size_t bytes) {
    return (bytes + alignment - 1) / alignment * alignment;
  }

  // Joins it with those beside it.
  void give_back(pieces::node_type given) {
    const auto piece = free_.insert(std::move(given)).position;
    if (const auto next = std::next(piece);
        next != free_.end() && piece->first + piece->second == next->first) {
      piece->second += next->second;
      free_.erase(next);
    }
    if (piece == free_.begin()) return;
    const auto before = std::prev(piece);
    if (before->first + before->second != piece->first) return;
    before->second += piece->second;
    free_.erase(piece);
  }

  std::size_t bytes_;
  std::byte* start_ = nullptr;
  pieces free_;
  pieces used_;
  pieces retired_;
};

// Memory of exact rows on a device. Moving rows is put off until the next launch, and until then
// (or while someone holds) nothing that was freed is handed out again.
class row_memory {
 public:
  row_memory(std::size_t bytes, memory_account& exact, memory_account& tables)
      : pool_(bytes, &tables), exact_(&exact), tables_(&tables), copies_(&tables) {}

  void* try_allocate(std::size_t bytes) {
    void* const memory = pool_.try_allocate(bytes);
    if (memory != nullptr) exact_->add(bytes);
    return memory;
  }
  void deallocate(void* memory, std::size_t bytes) {
    exact_->subtract(bytes);
    pool_.retire(memory);
    collect();
  }
  std::pmr::memory_resource* tables() const noexcept { return tables_; }

  void copy_later(const row_copy& copy) { copies_.push_back(copy); }
  std::span<const row_copy> copies() const noexcept { return copies_; }
  // The copies are on their way.
  void copied() {
    copies_.clear();
    collect();
  }
  void hold() { held_ = true; }
  void end_hold() {
    held_ = false;
    collect();
  }

 private:
  void collect() {
    if (!held_ && copies_.empty()) pool_.collect();
  }

  device_pool pool_;
  memory_account* exact_;
  memory_account* tables_;
  std::pmr::vector<row_copy> copies_;
  bool held_ = false;
};

// For exact_run: rows on a device.
struct device_space {
  using account = row_memory;
  static constexpr bool token_major = true;
  static constexpr bool moves_down = false;  // copies of one launch are in no order

  template <class Header>
  static Header* make(account& memory, int capacity, std::size_t bytes) {
    const auto give_back = [&memory](void* place) {
      memory.tables()->deallocate(place, sizeof(Header), alignof(Header));
    };
    std::unique_ptr<void, decltype(give_back)> place(
        memory.tables()->allocate(sizeof(Header), alignof(Header)), give_back);
    void* const elements = memory.try_allocate(bytes);
    if (elements == nullptr) return nullptr;
    auto* const header = new (place.release()) Header(capacity, &memory, bytes);
    header->elements = static_cast<decltype(header->elements)>(elements);
    return header;
  }
  template <class Header>
  static void destroy(Header* header) {
    account* const memory = header->memory;
    memory->deallocate(header->elements, header->bytes);
    header->~Header();
    memory->tables()->deallocate(header, sizeof(Header), alignof(Header));
  }
  static void copy(account& memory, void* to, const void* from, std::size_t bytes) {
    memory.copy_later({to, from, bytes});
  }
};

// The accounts of a cache on a device. `exact_bytes`: of the pool of exact rows.
struct device_accounts : memory_accounts {
  row_memory rows;

  device_accounts(std::pmr::memory_resource* upstream, std::size_t exact_bytes)
      : memory_accounts(upstream, 0, device_resource()), rows(exact_bytes, exact, tables) {}
};

// An array in device memory, filled through pinned host memory of which there are two, so that the
// host can write the next while the last is on its way.
template <class V>
class staged_array {
 public:
  staged_array() = default;
  staged_array(const staged_array&) = delete;
  staged_array& operator=(const staged_array&) = delete;
  ~staged_array() {
    cudaFree(device_);
    cudaFreeHost(host_);
    for (cudaEvent_t event : {sent_[0], sent_[1], used_})
      if (event != nullptr) cudaEventDestroy(event);
  }

  status make(std::size_t capacity) {
    capacity_ = capacity;
    const std::size_t bytes = (std::max)(capacity, std::size_t{1}) * sizeof(V);
    cudaError_t code = cudaMalloc(&device_, bytes);
    if (code == cudaSuccess) code = cudaMallocHost(&host_, 2 * bytes);
    for (cudaEvent_t* event : {&sent_[0], &sent_[1], &used_})
      if (code == cudaSuccess) code = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    return status_of(code, "memory for arguments");
  }
  std::size_t capacity() const noexcept { return capacity_; }
  V* device() const noexcept { return static_cast<V*>(device_); }

  // Host memory for `capacity` elements; waits while it is still being sent.
  V* write() {
    cudaEventSynchronize(sent_[turn_]);
    return static_cast<V*>(host_) + turn_ * capacity_;
  }
  // Sends the first `count` elements, behind what used the array before.
  status send(std::size_t count, cudaStream_t stream) {
    cudaError_t code = cudaStreamWaitEvent(stream, used_);
    if (code == cudaSuccess)
      code = cudaMemcpyAsync(device_, static_cast<V*>(host_) + turn_ * capacity_, count * sizeof(V),
                             cudaMemcpyHostToDevice, stream);
    if (code == cudaSuccess) code = cudaEventRecord(sent_[turn_], stream);
    turn_ = 1 - turn_;
    return status_of(code, "sending arguments");
  }
  // What was launched so far on this stream uses the array.
  status used(cudaStream_t stream) {
    return status_of(cudaEventRecord(used_, stream), "recording an event");
  }

 private:
  std::size_t capacity_ = 0;
  std::size_t turn_ = 0;
  void* device_ = nullptr;
  void* host_ = nullptr;
  cudaEvent_t sent_[2] = {};
  cudaEvent_t used_ = nullptr;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn::cuda
