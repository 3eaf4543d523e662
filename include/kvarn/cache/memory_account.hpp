// Memory of a cache: counted to the byte, and bounded where the engine asks for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory_resource>
#include <utility>

#include "../config.hpp"

namespace kvarn {

// Bytes that a cache holds now.
struct memory_use {
  std::size_t pages = 0;       // of sealed tiles, taken or free
  std::size_t exact = 0;       // sinks and tails
  std::size_t statistics = 0;  // second moments of queries
  std::size_t tables = 0;      // bookkeeping

  KVARN_INLINE constexpr std::size_t total() const { return pages + exact + statistics + tables; }
};

inline namespace KVARN_ISA_NAMESPACE {

// Forwards to another resource and counts. Safe for threads if the other is.
class memory_account final : public std::pmr::memory_resource {
 public:
  // `limit`: most bytes that try_allocate lets the account reach; 0: any.
  explicit memory_account(std::pmr::memory_resource* upstream, std::size_t limit = 0)
      : upstream_(upstream), limit_(limit) {}

  std::size_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }

  // Null where the limit forbids it.
  void* try_allocate(std::size_t bytes, std::size_t alignment) {
    // Counted before they are there: of two threads at once one gets what fits.
    const std::size_t limit = limit_ != 0 ? limit_ : ~std::size_t{0};
    std::size_t now = this->bytes();
    do {
      if (bytes > limit || now > limit - bytes) return nullptr;
    } while (!bytes_.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
    uncount_on_failure counted{this, bytes};
    void* const memory = upstream_->allocate(bytes, alignment);
    counted.account = nullptr;
    return memory;
  }

  // Counts memory that comes from elsewhere.
  void add(std::size_t bytes) noexcept { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void subtract(std::size_t bytes) noexcept { bytes_.fetch_sub(bytes, std::memory_order_relaxed); }

 private:
  struct uncount_on_failure {
    memory_account* account;
    std::size_t bytes;
    ~uncount_on_failure() {
      if (account != nullptr) account->subtract(bytes);
    }
  };

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    void* const memory = upstream_->allocate(bytes, alignment);
    add(bytes);
    return memory;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    upstream_->deallocate(memory, bytes, alignment);
    subtract(bytes);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  std::pmr::memory_resource* upstream_;
  std::size_t limit_;
  std::atomic<std::size_t> bytes_{0};
};

// The accounts of one cache.
struct memory_accounts {
  memory_account pages, exact, statistics, tables;

  memory_accounts(std::pmr::memory_resource* upstream, std::size_t exact_limit)
      : memory_accounts(upstream, exact_limit, upstream) {}
  // Pages from elsewhere.
  memory_accounts(std::pmr::memory_resource* upstream, std::size_t exact_limit,
                  std::pmr::memory_resource* of_pages)
      : pages(of_pages), exact(upstream, exact_limit), statistics(upstream), tables(upstream) {}

  memory_use use() const noexcept {
    return {pages.bytes(), exact.bytes(), statistics.bytes(), tables.bytes()};
  }
};

// A reference to a node that several sequences may share: it is written to by a sole owner only.
// `Node` has an atomic member `owners`, 1 at first, and a static function destroy(Node*).
template <class Node>
class shared_node {
 public:
  shared_node() = default;
  explicit shared_node(Node* node) noexcept : node_(node) {}
  shared_node(const shared_node& other) noexcept : node_(other.node_) {
    if (node_ != nullptr) node_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  shared_node(shared_node&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
  shared_node& operator=(shared_node other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~shared_node() {
    if (node_ != nullptr && node_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1)
      Node::destroy(node_);
  }

  Node* get() const noexcept { return node_; }
  Node* operator->() const noexcept { return node_; }
  explicit operator bool() const noexcept { return node_ != nullptr; }
  bool is_sole() const noexcept {
    return node_ != nullptr && node_->owners.load(std::memory_order_acquire) == 1;
  }

 private:
  Node* node_ = nullptr;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
