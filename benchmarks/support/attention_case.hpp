// What an attention benchmark computes, and how it is called.
#pragma once

#include <string>

#include "kvarn/kvarn.hpp"

namespace kvarn_bench {

struct attention_case {
  int head_dim = 128;
  int key_bits = 2;
  int value_bits = 2;
  int heads = 4;  // query heads that share the KV head
  int tokens = 16384;
  bool cold = true;
  int query_tokens = 1;
  kvarn::operand_precision precision = kvarn::operand_precision::int16;
  bool exact_ends = false;  // a sink of 128 and a tail of 64 tokens in binary16 beside the packed
  int threads = 0;          // 0: one KV head in the calling thread; else 8 KV heads as a batch

  kvarn::cache_format format() const {
    return {.key_head_dim = head_dim,
            .value_head_dim = head_dim,
            .key_bits = key_bits,
            .value_bits = value_bits};
  }
  int kv_heads() const { return threads == 0 ? 1 : 8; }
  int rows() const { return query_tokens * heads; }

  // d128/k2v2/t16384/cold/threads2: the bytes, whoever reads them.
  std::string memory_name(const std::string& bits) const { return memory_name(bits, ""); }
  std::string memory_name() const { return memory_name(own_bits()); }

  // d128/k2v2/gqa4/t16384/cold/q8/int8/exact/threads2: `bits` as a baseline has them.
  std::string name(const std::string& bits) const {
    return memory_name(bits, "/gqa" + std::to_string(heads)) + suffix();
  }
  std::string name() const {
    return name(own_bits()) + (precision == kvarn::operand_precision::int8 ? "/int8" : "") +
           (exact_ends ? "/exact" : "");
  }

 private:
  std::string own_bits() const {
    return "k" + std::to_string(key_bits) + "v" + std::to_string(value_bits);
  }
  std::string suffix() const { return query_tokens > 1 ? "/q" + std::to_string(query_tokens) : ""; }
  std::string memory_name(const std::string& bits, const std::string& ratio) const {
    return "d" + std::to_string(head_dim) + "/" + bits + ratio + "/t" + std::to_string(tokens) +
           (cold ? "/cold" : "/warm") + (threads > 0 ? "/threads" + std::to_string(threads) : "");
  }
};

}  // namespace kvarn_bench
