// Exact tokens of one layer of one sequence: rows of keys and values, rotated, in memory that forks
// share until one of them writes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "memory_account.hpp"

namespace kvarn {

// Rows of one run. Two such numbers, and what a run grows to, still fit an int.
inline constexpr int max_exact_rows = std::numeric_limits<int>::max() / 2;

// What one token has in one layer.
struct row_shape {
  int kv_heads = 0;
  int key_head_dim = 0;
  int value_head_dim = 0;

  KVARN_INLINE constexpr std::size_t elements() const {
    return static_cast<std::size_t>(kv_heads) *
           static_cast<std::size_t>(key_head_dim + value_head_dim);
  }
};

inline namespace KVARN_ISA_NAMESPACE {

// Where the rows of an exact_run stand and how they are moved: here the program's own memory.
struct host_space {
  using account = memory_account;
  // Whether the heads of a token are next to one another, or the tokens of a head.
  static constexpr bool token_major = false;
  // Whether rows can be moved down in their memory.
  static constexpr bool moves_down = true;

  // A header with `bytes` of memory for elements, or null where the account's limit forbids it.
  template <class Header>
  static Header* make(account& memory, int capacity, std::size_t bytes) {
    void* const place = memory.try_allocate(sizeof(Header) + bytes, alignof(Header));
    if (place == nullptr) return nullptr;
    auto* const header = new (place) Header(capacity, &memory, bytes);
    header->elements = reinterpret_cast<decltype(header->elements)>(header + 1);
    return header;
  }
  template <class Header>
  static void destroy(Header* header) {
    account* const memory = header->memory;
    const std::size_t bytes = sizeof(Header) + header->bytes;
    header->~Header();
    memory->deallocate(header, bytes, alignof(Header));
  }
  static void copy(account&, void* to, const void* from, std::size_t bytes) {
    std::memmove(to, from, bytes);
  }
};

// A growing array of rows. Memory: the keys as [kv_heads][capacity][key_head_dim], or as
// [capacity][kv_heads][key_head_dim] where the space is token_major, then the values alike. Copies
// share the memory; reserve makes the rows that follow it writable by this copy alone.
template <class T, class Space = host_space>
class exact_run {
 public:
  using account = typename Space::account;

  exact_run() = default;
  exact_run(exact_run&& other) noexcept
      : rows_(std::move(other.rows_)),
        begin_(std::exchange(other.begin_, 0)),
        count_(std::exchange(other.count_, 0)) {}
  exact_run(const exact_run&) = default;
  exact_run& operator=(exact_run other) noexcept {
    std::swap(rows_, other.rows_);
    begin_ = other.begin_;
    count_ = other.count_;
    return *this;
  }

  int count() const noexcept { return count_; }

  // Row i of a head, i in [0, count()), and those behind it. Of one that is not yet counted only
  // after reserve.
  tokens_view<T> keys(const row_shape& shape, int head, int i) const {
    return view(shape, shape.key_head_dim, std::ptrdiff_t{head}, i, 0);
  }
  tokens_view<T> values(const row_shape& shape, int head, int i) const {
    const std::ptrdiff_t keys = std::ptrdiff_t{shape.kv_heads} * shape.key_head_dim;
    return view(shape, shape.value_head_dim, std::ptrdiff_t{head}, i, keys);
  }

  // Room for `more` rows behind those there are, in memory of this copy alone. False where the
  // account's limit forbids it; then nothing has changed. `tight`: no room beyond; else new memory
  // has room for `least` rows if it can be had. Precondition: at most max_exact_rows in all.
  bool reserve(const row_shape& shape, account& memory, int more, bool tight = false,
               int least = 0) {
    if (more == 0) return true;
    KVARN_ASSERT(more <= max_exact_rows - count_);
    const int need = count_ + more;
    if (rows_.is_sole()) {
      if (need <= rows_->capacity - begin_) return true;
      // Moving rows down is cheap where it frees many.
      if (Space::moves_down && need <= rows_->capacity && begin_ >= count_ / 4) {
        copy_rows(shape, *rows_.get(), *rows_.get());
        begin_ = 0;
        return true;
      }
    }
    const int growth = (std::max)(least, rows_.is_sole() ? count_ + count_ / 2 : 0);
    return (!tight && reallocate(shape, memory, rounded_up((std::max)(need, growth)))) ||
           reallocate(shape, memory, need);
  }

  // Counts `more` rows that were written behind the others.
  void extend(int more) {
    KVARN_ASSERT(begin_ + count_ + more <= (rows_ ? rows_->capacity : 0));
    count_ += more;
  }

  void drop_front(int n) {
    KVARN_ASSERT(n >= 0 && n <= count_);
    begin_ += n;
    keep(count_ - n);
  }

  // Keeps the first `n` rows only.
  void keep(int n) {
    KVARN_ASSERT(n >= 0 && n <= count_);
    count_ = n;
    if (n == 0) *this = exact_run();
  }

  // Gives back memory where more than half, and more than `slack` rows, are unused, if the smaller
  // memory can be had.
  void shrink(const row_shape& shape, account& memory, int slack) {
    if (!rows_.is_sole() || rows_->capacity - count_ <= count_ + slack) return;
#if KVARN_EXCEPTIONS
    try {
      reallocate(shape, memory, rounded_up(count_));
    } catch (const std::bad_alloc&) {
    }
#else
    reallocate(shape, memory, rounded_up(count_));
#endif
  }

 private:
  static constexpr std::size_t alignment = 64;

  static constexpr int rounded_up(int rows) { return (rows + 15) / 16 * 16; }

  struct alignas(alignment) header {
    std::atomic<int> owners{1};
    int capacity;  // rows
    account* memory;
    std::size_t bytes;  // of the elements
    T* elements = nullptr;

    header(int rows, account* from, std::size_t size) : capacity(rows), memory(from), bytes(size) {}

    static void destroy(header* rows) { Space::destroy(rows); }
  };

  // Elements from a row to the next one of the same head.
  static constexpr std::ptrdiff_t row_stride(const row_shape& shape, int dim) {
    return Space::token_major ? std::ptrdiff_t{shape.kv_heads} * dim : dim;
  }

  tokens_view<T> view(const row_shape& shape, int dim, std::ptrdiff_t head, int i,
                      std::ptrdiff_t elements_per_row) const {
    const std::ptrdiff_t stride = row_stride(shape, dim);
    if (!rows_) return {nullptr, stride};
    T* const block = rows_->elements + elements_per_row * rows_->capacity;
    const std::ptrdiff_t to_head = head * dim * (Space::token_major ? 1 : rows_->capacity);
    return {block + to_head + (begin_ + i) * stride, stride};
  }

  // The counted rows to the start of `to`.
  void copy_rows(const row_shape& shape, header& from, header& to) const {
    const auto copy = [&](std::ptrdiff_t source_block, std::ptrdiff_t target_block, int dim) {
      const std::ptrdiff_t stride = row_stride(shape, dim);
      const int pieces = Space::token_major ? 1 : shape.kv_heads;
      for (std::ptrdiff_t piece = 0; piece < pieces; ++piece)
        Space::copy(*to.memory, to.elements + target_block + piece * to.capacity * stride,
                    from.elements + source_block + (piece * from.capacity + begin_) * stride,
                    static_cast<std::size_t>(count_ * stride) * sizeof(T));
    };
    copy(0, 0, shape.key_head_dim);
    const std::ptrdiff_t keys = std::ptrdiff_t{shape.kv_heads} * shape.key_head_dim;
    copy(keys * from.capacity, keys * to.capacity, shape.value_head_dim);
  }

  bool reallocate(const row_shape& shape, account& memory, int capacity) {
    shared_node<header> rows(Space::template make<header>(
        memory, capacity, static_cast<std::size_t>(capacity) * shape.elements() * sizeof(T)));
    if (!rows) return false;
    if (count_ > 0) copy_rows(shape, *rows_.get(), *rows.get());
    rows_ = std::move(rows);
    begin_ = 0;
    return true;
  }

  shared_node<header> rows_;
  int begin_ = 0;
  int count_ = 0;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
