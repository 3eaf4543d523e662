// Second moments of the queries of all layers and KV heads, for encoder::query_aware: gathered per
// sequence, or gathered once, saved, and frozen for all sequences.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

#include "../codec/query_moment.hpp"
#include "../codec/tokens.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "../simd/target.hpp"
#include "heads_view.hpp"
#include "memory_account.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// One query_moment per layer and KV head. To calibrate, feed it the queries of a text, or merge
// what sequences have gathered; save_moments and load_moments (moments_file.hpp) keep it.
class query_moments {
 public:
  // Precondition: head_dim is a supported head dimension; all counts are positive.
  query_moments(int layers, int kv_heads, int head_dim)
      : layers_(layers),
        kv_heads_(kv_heads),
        moments_(static_cast<std::size_t>(layers) * static_cast<std::size_t>(kv_heads),
                 query_moment(head_dim)) {}

  int layers() const noexcept { return layers_; }
  int kv_heads() const noexcept { return kv_heads_; }
  int head_dim() const noexcept { return moments_.front().head_dim(); }

  const query_moment& at(int layer, int kv_head) const { return moments_[index(layer, kv_head)]; }
  void set(int layer, int kv_head, query_moment moment) {
    KVARN_ASSERT(moment.head_dim() == head_dim());
    moments_[index(layer, kv_head)] = std::move(moment);
  }

  // Adds the queries of `tokens` tokens: [tokens][query_heads][head_dim], each KV head's query
  // heads next to one another.
  template <class Q>
  replaced_values add(int layer, heads_view<Q> queries, int tokens, int query_heads,
                      bool rotate = true, target on = default_target()) {
    replaced_values replaced;
    const int shared = query_heads / kv_heads_;
    for (int t = 0; t < tokens; ++t)
      for (int head = 0; head < kv_heads_; ++head) {
        const replaced_values now =
            moments_[index(layer, head)].add(queries.token(t, head * shared), shared, rotate, on);
        replaced.nan += now.nan;
        replaced.saturated += now.saturated;
      }
    return replaced;
  }

  // Adds the queries of another. Precondition: the same shape.
  void merge(const query_moments& other) {
    KVARN_ASSERT(layers_ == other.layers_ && kv_heads_ == other.kv_heads_);
    for (std::size_t i = 0; i < moments_.size(); ++i) moments_[i].merge(other.moments_[i]);
  }

  // What it has allocated.
  std::size_t allocated_bytes() const {
    const auto dim = static_cast<std::size_t>(head_dim());
    return moments_.size() * (sizeof(query_moment) + dim * dim * sizeof(float));
  }

 private:
  std::size_t index(int layer, int kv_head) const {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(kv_heads_) +
           static_cast<std::size_t>(kv_head);
  }

  int layers_;
  int kv_heads_;
  std::vector<query_moment> moments_;
};

// The factors of frozen moments, computed once and read by any number of caches and threads.
class query_factors {
 public:
  explicit query_factors(const query_moments& moments,
                         float damping = query_factor::default_damping)
      : layers_(moments.layers()), kv_heads_(moments.kv_heads()), head_dim_(moments.head_dim()) {
    factors_.reserve(static_cast<std::size_t>(layers_) * static_cast<std::size_t>(kv_heads_));
    for (int layer = 0; layer < layers_; ++layer)
      for (int head = 0; head < kv_heads_; ++head)
        factors_.emplace_back(moments.at(layer, head), damping);
  }

  int layers() const noexcept { return layers_; }
  int kv_heads() const noexcept { return kv_heads_; }
  int head_dim() const noexcept { return head_dim_; }
  const query_factor& at(int layer, int kv_head) const {
    return factors_[static_cast<std::size_t>(layer) * static_cast<std::size_t>(kv_heads_) +
                    static_cast<std::size_t>(kv_head)];
  }

 private:
  int layers_;
  int kv_heads_;
  int head_dim_;
  std::vector<query_factor> factors_;
};

// The moments of one sequence, shared by its forks until one of them adds queries. Nothing is
// allocated before.
class sequence_moments {
 public:
  const query_moments* get() const noexcept { return node_ ? &node_->moments : nullptr; }

  // To write to.
  query_moments& own(int layers, int kv_heads, int head_dim, memory_account& memory) {
    if (!node_.is_sole())
      set(node_ ? node_->moments : query_moments(layers, kv_heads, head_dim), memory);
    return node_->moments;
  }

  void set(query_moments moments, memory_account& memory) {
    void* const place = memory.allocate(sizeof(node), alignof(node));
    node_ = shared_node<node>(new (place) node(std::move(moments), memory));
  }

 private:
  struct node {
    std::atomic<int> owners{1};
    query_moments moments;
    memory_account* memory;

    node(query_moments&& m, memory_account& account) : moments(std::move(m)), memory(&account) {
      memory->add(moments.allocated_bytes());
    }
    static void destroy(node* n) {
      memory_account* const memory = n->memory;
      memory->subtract(n->moments.allocated_bytes());
      n->~node();
      memory->deallocate(n, sizeof(node), alignof(node));
    }
  };

  shared_node<node> node_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
