// Which token of which sequence is where: lengths, positions, block tables, reference counts.
//
// Nothing here knows how tokens are stored. All layers of a sequence share one list of pages. Per
// sequence and layer, by position:
//
//   [0, sink)                 exact, as far as the layer has tokens
//   [sink, first)             nothing: dropped by a context shift
//   [first, sealed_end)       sealed pages, one after another without gaps; of an exact layer: rows
//   [sealed_end, appended)    the exact tail
//
// A page belongs to every sequence that lists it, and each says how many of its tokens count.
// Sequences may be used from different threads, one thread a sequence at a time; fork counts as use
// of both. What they share (free lists, reference counts) is behind a mutex. Any id may be asked
// about at any time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../config.hpp"
#include "../error.hpp"
#include "cache_config.hpp"
#include "fixed_array.hpp"

namespace kvarn {

// Names a sequence until it is freed; a later sequence in the same slot has another generation.
struct sequence_id {
  std::uint32_t slot = 0xffffffffu;
  std::uint32_t generation = 0;

  friend constexpr bool operator==(const sequence_id&, const sequence_id&) = default;
};

inline namespace KVARN_ISA_NAMESPACE {

// Here, as all that lists hold: the linker never hands functions of a std::vector of them that were
// compiled for a newer CPU to a file compiled for an older one.

// One sealed group of tokens in a sequence's list.
struct sealed_page {
  std::int64_t position = 0;  // of its first token
  std::int32_t page = 0;
  std::int32_t count = 0;  // tokens that count, from the first on; below the group where it was cut

  friend constexpr bool operator==(const sealed_page&, const sealed_page&) = default;
};

// Where the tokens of one sequence are in one layer.
struct sequence_extent {
  std::int64_t length = 0;         // one past the last token's position, uncommitted ones included
  std::int64_t tail_position = 0;  // of the first token of the tail
  std::int32_t sink_count = 0;
  std::int32_t tail_count = 0;
  std::int32_t first_page = 0;  // in the array of pages of a batch
  std::int32_t page_count = 0;  // 0 in exact layers

  friend constexpr bool operator==(const sequence_extent&, const sequence_extent&) = default;
};

// The numbers 0 .. size - 1 that are not in use; taken in ascending order at first.
class free_list {
 public:
  free_list(std::size_t size, std::pmr::memory_resource* memory)
      : numbers_(size, memory), count_(size) {
    for (std::size_t i = 0; i < size; ++i) numbers_[i] = static_cast<std::int32_t>(size - 1 - i);
  }
  std::size_t count() const noexcept { return count_; }
  // Precondition: count() > 0.
  std::int32_t take() { return numbers_[--count_]; }
  void give(std::int32_t number) { numbers_[count_++] = number; }

 private:
  fixed_array<std::int32_t> numbers_;
  std::size_t count_;
};

class page_table {
 public:
  // Precondition: validate(config) is ok.
  page_table(const cache_config& config, std::pmr::memory_resource* memory)
      : sink_(config.sink),
        group_(config.format.group),
        tail_(config.tail),
        exact_(static_cast<std::size_t>(config.layers), memory, false),
        slots_(static_cast<std::size_t>(config.max_sequences), memory, memory),
        appended_(exact_.size() * slots_.size(), memory, 0),
        references_(static_cast<std::size_t>(page_count_of(config)), memory, 0),
        free_slots_(slots_.size(), memory),
        free_pages_(references_.size(), memory) {
    for (int layer = 0; layer < config.layers; ++layer)
      exact_[index(layer)] = is_exact(config, layer);
  }
  page_table(const page_table&) = delete;
  page_table& operator=(const page_table&) = delete;

  int layers() const noexcept { return static_cast<int>(exact_.size()); }
  int sink() const noexcept { return sink_; }
  int group() const noexcept { return group_; }
  int tail() const noexcept { return tail_; }
  bool is_exact_layer(int layer) const { return exact_[index(layer)]; }

  std::int64_t page_count() const noexcept { return static_cast<std::int64_t>(references_.size()); }
  std::int64_t free_page_count() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::int64_t>(free_pages_.count());
  }
  int free_sequence_count() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(free_slots_.count());
  }
  // Sequences that list the page.
  int references(std::int32_t page) const {
    const std::lock_guard lock(mutex_);
    return references_[static_cast<std::size_t>(page)];
  }

  bool is_live(sequence_id id) const {
    return id.slot < slots_.size() && slots_[id.slot].generation == id.generation &&
           slots_[id.slot].live;
  }

  // All that follow take live sequences.

  std::int64_t committed(sequence_id id) const { return at(id).committed; }
  std::int64_t appended(sequence_id id, int layer) const { return lengths(id)[index(layer)]; }
  // The tokens that every layer has.
  std::int64_t appended(sequence_id id) const {
    std::int64_t least = lengths(id)[0];
    for (const std::int64_t length : lengths(id)) least = (std::min)(least, length);
    return least;
  }
  std::span<const sealed_page> pages(sequence_id id) const { return at(id).pages; }
  // Position of the first token behind the sink, now or to come.
  std::int64_t first(sequence_id id) const { return at(id).first; }
  std::int64_t sealed_end(sequence_id id) const { return sealed_end(at(id)); }

  sequence_extent extent(sequence_id id, int layer) const {
    const sequence& s = at(id);
    sequence_extent e;
    e.length = appended(id, layer);
    e.tail_position = is_exact_layer(layer) ? s.first : sealed_end(s);
    e.sink_count = static_cast<std::int32_t>((std::min)(e.length, std::int64_t{sink_}));
    e.tail_count =
        static_cast<std::int32_t>((std::max)(e.length - e.tail_position, std::int64_t{0}));
    e.page_count = is_exact_layer(layer) ? 0 : static_cast<std::int32_t>(s.pages.size());
    return e;
  }

  // The extents of a batch in one layer, and all its pages in one array: what a kernel for many
  // sequences reads.
  void flatten(std::span<const sequence_id> ids, int layer, std::vector<sequence_extent>& extents,
               std::vector<sealed_page>& pages) const {
    extents.clear();
    pages.clear();
    for (const sequence_id id : ids) {
      sequence_extent e = extent(id, layer);
      e.first_page = static_cast<std::int32_t>(pages.size());
      const auto list = this->pages(id).first(static_cast<std::size_t>(e.page_count));
      pages.insert(pages.end(), list.begin(), list.end());
      extents.push_back(e);
    }
  }

  // A new, empty sequence, unless all slots are taken.
  result<sequence_id> create() {
    const std::lock_guard lock(mutex_);
    if (free_slots_.count() == 0)
      return failure(
          error_code::short_buffer,
          {"all ", slots_.size(), " sequences exist already; max_sequences sets the limit"});
    const auto slot = static_cast<std::uint32_t>(free_slots_.take());
    sequence& s = slots_[slot];
    s.live = true;
    s.committed = 0;
    s.first = sink_;
    const sequence_id id{slot, s.generation};
    for (std::int64_t& length : lengths(id)) length = 0;
    return id;
  }

  void free(sequence_id id) {
    sequence& s = at(id);
    release(s.pages);
    s.pages = std::pmr::vector<sealed_page>(s.pages.get_allocator());  // memory too
    s.live = false;
    ++s.generation;
    const std::lock_guard lock(mutex_);
    free_slots_.give(static_cast<std::int32_t>(id.slot));
  }

  // `count` tokens more in one layer, not committed.
  void append(sequence_id id, int layer, int count) { lengths(id)[index(layer)] += count; }

  // Precondition: every layer has them.
  void commit(sequence_id id, std::int64_t count) {
    KVARN_ASSERT(at(id).committed + count <= appended(id));
    at(id).committed += count;
  }

  // Tiles that could be sealed if `more` tokens were committed: the tail keeps its least length.
  std::int64_t sealable(sequence_id id, std::int64_t more = 0) const {
    const sequence& s = at(id);
    return (std::max)(s.committed - sealed_end(s) - tail_ + more, std::int64_t{0}) / group_;
  }

  // Takes `count` free pages, each with one reference, or none of them. Nothing is allocated.
  bool claim(std::span<std::int32_t> pages) {
    const std::lock_guard lock(mutex_);
    if (free_pages_.count() < pages.size()) return false;
    for (std::int32_t& page : pages) {
      page = free_pages_.take();
      references_[static_cast<std::size_t>(page)] = 1;
    }
    return true;
  }

  // Gives up one reference of each.
  void release(std::span<const std::int32_t> pages) {
    const std::lock_guard lock(mutex_);
    for (const std::int32_t page : pages) drop_reference(page);
  }

  // Room in the sequence's list, so that publish cannot fail.
  void reserve(sequence_id id, std::size_t more) {
    auto& pages = at(id).pages;
    if (pages.capacity() - pages.size() < more)
      pages.reserve((std::max)(pages.size() + more, pages.size() + pages.size() / 2));
  }

  // The next group of the tail now stands in a claimed page. Precondition: reserve.
  void publish(sequence_id id, std::int32_t page) {
    sequence& s = at(id);
    KVARN_ASSERT(s.pages.size() < s.pages.capacity() && sealed_end(s) + group_ <= s.committed);
    s.pages.push_back({sealed_end(s), page, group_});
  }

  // Forgets the tokens from `position` on. Precondition: 0 <= position <= appended(id).
  void truncate(sequence_id id, std::int64_t position) {
    sequence& s = at(id);
    KVARN_ASSERT(position >= 0 && position <= appended(id));
    std::size_t keep = s.pages.size();
    while (keep > 0 && s.pages[keep - 1].position >= position) --keep;
    release(std::span(s.pages).subspan(keep));
    s.pages.resize(keep);
    if (keep > 0) {
      sealed_page& last = s.pages.back();
      last.count =
          static_cast<std::int32_t>((std::min)(std::int64_t{last.count}, position - last.position));
    }
    // In front of what there is behind the sink, the next token comes right where it is cut.
    s.first = (std::min)(s.first, (std::max)(position, std::int64_t{sink_}));
    s.committed = (std::min)(s.committed, position);
    for (std::int64_t& length : lengths(id)) length = (std::min)(length, position);
  }

  // A sequence with the tokens of `id` before `position`, on the same pages.
  // Precondition: 0 <= position <= appended(id).
  result<sequence_id> fork(sequence_id id, std::int64_t position) {
    const sequence& parent = at(id);
    std::pmr::vector<sealed_page> pages(parent.pages, parent.pages.get_allocator());
    result<sequence_id> made = create();
    if (!made.ok()) return made;
    sequence& child = at(made.value());
    child.pages = std::move(pages);
    child.committed = parent.committed;
    child.first = parent.first;
    const std::span<const std::int64_t> from = lengths(id);
    std::copy(from.begin(), from.end(), lengths(made.value()).begin());
    share(child.pages);
    truncate(made.value(), position);
    return made;
  }

  // Forgets the `count` oldest pages and returns how many tokens they were.
  // Precondition: 0 <= count <= pages(id).size().
  std::int64_t drop_oldest(sequence_id id, std::size_t count) {
    sequence& s = at(id);
    KVARN_ASSERT(count <= s.pages.size());
    const auto end = s.pages.begin() + static_cast<std::ptrdiff_t>(count);
    std::int64_t tokens = 0;
    for (auto page = s.pages.begin(); page != end; ++page) tokens += page->count;
    release(std::span(s.pages).first(count));
    s.pages.erase(s.pages.begin(), end);
    s.first += tokens;
    return tokens;
  }

  // Gives an empty sequence the state of a saved one; takes over a reference of each page.
  // Precondition: reserve(id, pages.size()).
  void adopt(sequence_id id, std::int64_t length, std::int64_t first,
             std::span<const sealed_page> pages) {
    sequence& s = at(id);
    KVARN_ASSERT(s.pages.empty() && s.pages.capacity() >= pages.size());
    s.pages.insert(s.pages.end(), pages.begin(), pages.end());
    s.committed = length;
    s.first = first;
    for (std::int64_t& appended : lengths(id)) appended = length;
  }

  // One reference more of each page.
  void share(std::span<const sealed_page> pages) {
    const std::lock_guard lock(mutex_);
    for (const sealed_page& p : pages) ++references_[static_cast<std::size_t>(p.page)];
  }

 private:
  struct sequence {
    // Atomic: who asks about a sequence that is gone may meet the one that has its slot now.
    std::atomic<std::uint32_t> generation{0};
    std::atomic<bool> live{false};
    std::int64_t committed = 0;
    std::int64_t first = 0;
    std::pmr::vector<sealed_page> pages;

    explicit sequence(std::pmr::memory_resource* memory) : pages(memory) {}
  };

  static std::size_t index(int layer) { return static_cast<std::size_t>(layer); }

  sequence& at(sequence_id id) {
    KVARN_ASSERT(is_live(id));
    return slots_[id.slot];
  }
  const sequence& at(sequence_id id) const {
    KVARN_ASSERT(is_live(id));
    return slots_[id.slot];
  }

  // Tokens that are appended, one number per layer.
  std::span<std::int64_t> lengths(sequence_id id) {
    return {appended_.begin() + std::size_t{id.slot} * exact_.size(), exact_.size()};
  }
  std::span<const std::int64_t> lengths(sequence_id id) const {
    return {appended_.begin() + std::size_t{id.slot} * exact_.size(), exact_.size()};
  }

  static std::int64_t sealed_end(const sequence& s) {
    return s.pages.empty() ? s.first : s.pages.back().position + s.pages.back().count;
  }

  void release(std::span<const sealed_page> pages) {
    if (pages.empty()) return;
    const std::lock_guard lock(mutex_);
    for (const sealed_page& p : pages) drop_reference(p.page);
  }

  void drop_reference(std::int32_t page) {
    if (--references_[static_cast<std::size_t>(page)] == 0) free_pages_.give(page);
  }

  const int sink_;
  const int group_;
  const int tail_;
  fixed_array<bool> exact_;  // by layer
  fixed_array<sequence> slots_;
  fixed_array<std::int64_t> appended_;    // [slots][layers]
  mutable std::mutex mutex_;              // of what is below
  fixed_array<std::int32_t> references_;  // by page
  free_list free_slots_;
  free_list free_pages_;
};

// Pages that are taken and belong to no sequence yet; given back unless they are handed over.
class claimed_pages {
 public:
  claimed_pages(page_table& table, std::size_t count) : table_(table), numbers_(count) {}
  claimed_pages(const claimed_pages&) = delete;
  claimed_pages& operator=(const claimed_pages&) = delete;
  ~claimed_pages() {
    if (holds_) table_.release(numbers_);
  }

  // Takes them all, or none and returns false.
  bool claim() { return holds_ = table_.claim(numbers_); }
  std::span<const std::int32_t> numbers() const noexcept { return numbers_; }
  // The caller now answers for the reference that each has.
  std::span<const std::int32_t> hand_over() noexcept {
    holds_ = false;
    return numbers_;
  }

 private:
  page_table& table_;
  std::vector<std::int32_t> numbers_;
  bool holds_ = false;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
