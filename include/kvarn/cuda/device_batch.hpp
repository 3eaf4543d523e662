// What the kernels of a step read of a batch of sequences, in arrays that stay where they are: a
// captured graph runs on whatever device_cache::begin has put there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "../cache/exact_run.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "arguments.hpp"
#include "device_memory.hpp"

namespace kvarn::cuda {

// The most that a batch takes in one step; what is captured of it is launched for as much.
struct batch_bounds {
  int sequences = 1;
  int tokens = 1;         // new tokens (and queries) of one sequence
  int pages = 0;          // sealed pages of one sequence
  std::int64_t list = 0;  // sealed pages of all sequences; 0: sequences * pages
  int tail = 128;         // exact tokens of one sequence and layer behind those sealed
  element_type query_type = element_type::float16;
  element_type out_type = element_type::float16;
  token_strides query_strides = {};  // 0: [tokens][query_heads][head_dim] without gaps
  token_strides out_strides = {};
};

// Queries and results of the tokens of a batch, those of its second sequence behind those of its
// first; by the strides of batch_bounds.
struct batch_tensors {
  const void* queries = nullptr;  // [tokens][query_heads][key_head_dim]
  void* out = nullptr;            // [tokens][query_heads][value_head_dim]
  float* lse = nullptr;           // [tokens][query_heads], or null
};

inline namespace KVARN_ISA_NAMESPACE {

class device_batch {
 public:
  // `layers`: of the cache.
  static result<device_batch> make(int layers, const batch_bounds& bounds) {
    if (bounds.sequences < 1 || bounds.sequences > max_grid || bounds.tokens < 1 ||
        bounds.pages < 0 || bounds.list < 0 || bounds.tail < 0 || bounds.tail > max_exact_rows ||
        layers < 1)
      return status{error_code::invalid_argument,
                    "bounds are " + std::to_string(bounds.sequences) + " sequences (1 to " +
                        std::to_string(max_grid) + "), " + std::to_string(bounds.tokens) +
                        " tokens (at least 1), " + std::to_string(bounds.pages) +
                        " pages, a list of " + std::to_string(bounds.list) + ", a tail of " +
                        std::to_string(bounds.tail) + " (0 to " + std::to_string(max_exact_rows) +
                        ", the others not negative)"};
    return or_out_of_memory([&]() -> result<device_batch> {
      device_batch batch(bounds);
      if (batch.bounds_.list == 0)
        batch.bounds_.list = std::int64_t{bounds.sequences} * bounds.pages;
      const auto items =
          static_cast<std::size_t>(bounds.sequences) * static_cast<std::size_t>(layers);
      arrays& a = *batch.arrays_;
      for (const status& made : {a.pages.make(static_cast<std::size_t>(batch.bounds_.list)),
                                 a.appends.make(items), a.sequences.make(items)})
        if (!made.ok()) return made;
      return batch;
    });
  }

  const batch_bounds& bounds() const noexcept { return bounds_; }

 private:
  template <class>
  friend class device_cache;

  struct arrays {
    staged_array<page_entry> pages;
    staged_array<append_sequence> appends;       // [layers][sequences]
    staged_array<attention_sequence> sequences;  // the same
  };

  explicit device_batch(const batch_bounds& bounds)
      : bounds_(bounds), arrays_(std::make_unique<arrays>()) {}

  batch_bounds bounds_;
  std::unique_ptr<arrays> arrays_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn::cuda
