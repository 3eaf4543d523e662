// Byte-pair encoding with a heap of candidate merges.
#include "byte_pair.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace kvarn_engine {

byte_pair_encoder::byte_pair_encoder(std::vector<pair_merge> merges, std::size_t tokens)
    : merges_(std::move(merges)), starts_(tokens + 1), candidates_(merges_.size()) {
  // Counting sort by the left token.
  for (const pair_merge& merge : merges_) ++starts_[static_cast<std::size_t>(merge.left) + 1];
  for (std::size_t i = 0; i < tokens; ++i) starts_[i + 1] += starts_[i];
  std::vector<std::uint32_t> next(starts_.begin(), starts_.end() - 1);
  for (std::size_t rank = 0; rank < merges_.size(); ++rank)
    candidates_[next[static_cast<std::size_t>(merges_[rank].left)]++] = {
        merges_[rank].right, static_cast<std::uint32_t>(rank)};
  for (std::size_t left = 0; left < tokens; ++left)
    std::sort(candidates_.begin() + starts_[left], candidates_.begin() + starts_[left + 1],
              [](const candidate& a, const candidate& b) {
                return std::pair(a.right, a.rank) < std::pair(b.right, b.rank);
              });
}

std::optional<std::uint32_t> byte_pair_encoder::rank_of(token_id left, token_id right) const {
  const auto first = candidates_.begin() + starts_[static_cast<std::size_t>(left)];
  const auto last = candidates_.begin() + starts_[static_cast<std::size_t>(left) + 1];
  const auto at = std::ranges::lower_bound(first, last, right, {}, &candidate::right);
  if (at == last || at->right != right) return std::nullopt;
  return at->rank;
}

void byte_pair_encoder::encode(std::span<const token_id> word, std::vector<token_id>& out,
                               workspace& space) const {
  // A list of symbols; an id of -1 has been merged into the one before. The heap's entries are rank
  // and place of the left symbol, in one number, whose order is the order of merging.
  constexpr token_id gone = -1;
  constexpr std::uint32_t none = 0xffffffff;
  auto& symbols = space.symbols;
  auto& heap = space.heap;
  symbols.clear();
  heap.clear();
  const auto push = [&](std::uint32_t left) {
    const std::uint32_t right = symbols[left].after;
    if (right == none) return;
    const auto rank = rank_of(symbols[left].id, symbols[right].id);
    if (!rank) return;
    heap.push_back(std::uint64_t{*rank} << 32 | left);
    std::ranges::push_heap(heap, std::greater<>());
  };

  for (std::uint32_t i = 0; i < word.size(); ++i)
    symbols.push_back({word[i], i == 0 ? none : i - 1, i + 1 == word.size() ? none : i + 1});
  for (std::uint32_t i = 0; i < symbols.size(); ++i) push(i);

  while (!heap.empty()) {
    std::ranges::pop_heap(heap, std::greater<>());
    const auto left = static_cast<std::uint32_t>(heap.back());
    const pair_merge& merge = merges_[heap.back() >> 32];
    heap.pop_back();
    // Has either side been merged since?
    auto& symbol = symbols[left];
    if (symbol.id != merge.left || symbol.after == none) continue;
    auto& right = symbols[symbol.after];
    if (right.id != merge.right) continue;

    symbol.id = merge.merged;
    right.id = gone;
    symbol.after = right.after;
    if (symbol.after != none) symbols[symbol.after].before = left;
    if (symbol.before != none) push(symbol.before);
    push(left);
  }
  for (const auto& symbol : symbols)
    if (symbol.id != gone) out.push_back(symbol.id);
}

}  // namespace kvarn_engine
