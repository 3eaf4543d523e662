// Memory that no cache holds: arenas larger than the last-level cache, filled with copies of one
// pattern and read in rotation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <new>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace kvarn_bench {

// Bytes of all arenas together, at most.
inline constexpr std::size_t memory_limit = std::size_t{4} << 30;

inline std::size_t last_level_cache() {
  constexpr std::size_t fallback = std::size_t{64} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long size = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (size > 0) return static_cast<std::size_t>(size);
#endif
  return fallback;
}

// Twice the last-level cache, so that a byte is gone when its turn comes again; three arenas fit
// into the limit whatever the cache.
inline std::size_t arena_bytes() {
  const std::size_t wanted = 2 * last_level_cache();
  constexpr std::size_t least = std::size_t{256} << 20;
  constexpr std::size_t most = memory_limit / 3;
  return wanted < least ? least : wanted > most ? most : wanted;
}

// Pages of 2 MB where the system has them: half the time of a cold read goes into page walks
// otherwise.
class huge_block {
 public:
  explicit huge_block(std::size_t size) : size_(size) {
    constexpr std::size_t page = std::size_t{2} << 20;
#if defined(__linux__)
    mapped_ =
        mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
    data_ = static_cast<std::byte*>(mapped_) + (page - address % page) % page;
    madvise(data_, size, MADV_HUGEPAGE);
#else
    mapped_ = ::operator new (size, std::align_val_t{page});
    data_ = static_cast<std::byte*>(mapped_);
#endif
  }
  ~huge_block() {
    constexpr std::size_t page = std::size_t{2} << 20;
#if defined(__linux__)
    munmap(mapped_, size_ + page);
#else
    ::operator delete (mapped_, std::align_val_t{page});
#endif
  }
  huge_block(const huge_block&) = delete;
  huge_block& operator=(const huge_block&) = delete;

  std::byte* data() { return data_; }

 private:
  std::size_t size_;
  void* mapped_;
  std::byte* data_;
};

// An arena full of copies of a pattern.
class arena {
 public:
  explicit arena(std::size_t size) : block_(size), size_(size) {}

  // Bytes behind the last full copy are not used.
  void fill(const std::vector<std::byte>& pattern) {
    used_ = size_ / pattern.size() * pattern.size();
    for (std::size_t at = 0; at < used_; at += pattern.size())
      std::memcpy(block_.data() + at, pattern.data(), pattern.size());
    cursor_ = 0;
  }

  const std::byte* data() { return block_.data(); }

  // How many pieces of `bytes` bytes, whole units of the pattern, it holds.
  std::size_t pieces(std::size_t bytes) const { return used_ / bytes; }

  // The index of the piece whose turn it is. Goes on where the last user of the arena left off.
  std::size_t next_piece(std::size_t bytes) {
    std::size_t piece = (cursor_ + bytes - 1) / bytes;
    if (piece >= pieces(bytes)) piece = 0;
    cursor_ = (piece + 1) * bytes;
    return piece;
  }

 private:
  huge_block block_;
  std::size_t size_;
  std::size_t used_ = 0;
  std::size_t cursor_ = 0;
};

// The arenas by what is in them; the one unused for longest gives its memory to a new one.
class arena_pool {
 public:
  // `make_pattern` returns std::vector<std::byte>, at most arena_bytes(); called at most once per
  // name.
  template <class F>
  arena& get(const std::string& name, const F& make_pattern) {
    for (auto at = arenas_.begin(); at != arenas_.end(); ++at)
      if (at->name == name) {
        arenas_.splice(arenas_.begin(), arenas_, at);
        return at->memory;
      }
    const std::vector<std::byte>* found = nullptr;
    for (const auto& p : patterns_)
      if (p.name == name) found = &p.bytes;
    if (found == nullptr) found = &patterns_.emplace_back(pattern{name, make_pattern()}).bytes;
    if ((arenas_.size() + 1) * arena_bytes() > memory_limit) {
      arenas_.splice(arenas_.begin(), arenas_, std::prev(arenas_.end()));
      arenas_.front().name = name;
    } else {
      arenas_.emplace_front(name);
    }
    arenas_.front().memory.fill(*found);
    return arenas_.front().memory;
  }

 private:
  struct entry {
    explicit entry(std::string n) : name(std::move(n)), memory(arena_bytes()) {}
    std::string name;
    arena memory;
  };
  struct pattern {
    std::string name;
    std::vector<std::byte> bytes;
  };
  std::list<entry> arenas_;
  std::list<pattern> patterns_;
};

inline arena_pool& arenas() {
  static arena_pool pool;
  return pool;
}

}  // namespace kvarn_bench
