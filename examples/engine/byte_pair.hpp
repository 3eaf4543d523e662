// Byte-pair encoding of one word: merges neighbouring tokens, the pair of the lowest rank first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace kvarn_engine {

using token_id = std::int32_t;

struct pair_merge {
  token_id left;
  token_id right;
  token_id merged;
};

class byte_pair_encoder {
 public:
  // merges[rank], fewer than 2^32; ids are in [0, tokens). Of a pair that stands there twice the
  // first counts.
  byte_pair_encoder(std::vector<pair_merge> merges, std::size_t tokens);

  // Memory that calls share.
  struct workspace {
    struct symbol {
      token_id id;
      std::uint32_t before;
      std::uint32_t after;
    };
    std::vector<symbol> symbols;
    std::vector<std::uint64_t> heap;
  };

  // Appends the tokens of a word, given as the tokens of its bytes, to `out`. As long as two
  // neighbours have a merge, the one of the lowest rank is applied, the leftmost of equals. Takes
  // n log n steps. Precondition: fewer than 2^32 - 1 tokens.
  void encode(std::span<const token_id> word, std::vector<token_id>& out, workspace& space) const;

 private:
  struct candidate {
    token_id right;
    std::uint32_t rank;
  };

  // Of the merge of two tokens, where there is one.
  std::optional<std::uint32_t> rank_of(token_id left, token_id right) const;

  std::vector<pair_merge> merges_;
  // The merges of a left token, sorted by the right one: candidates_[starts_[left]] up to
  // candidates_[starts_[left + 1]]. Sorted, not hashed: no file can make searching slow.
  std::vector<std::uint32_t> starts_;
  std::vector<candidate> candidates_;
};

}  // namespace kvarn_engine
