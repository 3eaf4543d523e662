// Stands in for a model: the recorded keys, values and queries of some heads, by position.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/npy.hpp"
#include "kvarn/cache/heads_view.hpp"

namespace kvarn_serving {

// Each layer is one recorded head with the query heads that share it. All have the same shape.
class recorded_model {
 public:
  // Throws std::runtime_error where a file cannot be read or has another shape.
  recorded_model(const std::string& folder, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const auto read = [&](const char* what) {
        return kvarn_examples::read_npy(folder + "/" + name + "." + what + ".npy");
      };
      layers_.push_back({read("k"), read("v"), read("q")});
      const layer& l = layers_.back();
      const layer& first = layers_.front();
      const auto& k = first.keys.shape;
      const auto& q = first.queries.shape;
      if (k.size() != 2 || q.size() != 3 || q[0] != k[0] || q[2] != k[1])
        throw std::runtime_error(
            name + ": keys must be [tokens][head_dim], queries [tokens][query heads][head_dim]");
      if (l.keys.shape != first.keys.shape || l.values.shape != first.keys.shape ||
          l.queries.shape != first.queries.shape)
        throw std::runtime_error(name + ": another shape than " + names.front());
    }
  }

  int layers() const { return static_cast<int>(layers_.size()); }
  int tokens() const { return static_cast<int>(layers_.front().keys.shape[0]); }
  int query_heads() const { return static_cast<int>(layers_.front().queries.shape[1]); }
  int head_dim() const { return static_cast<int>(layers_.front().keys.shape[1]); }

  // From a position on.
  kvarn::heads_view<const float> keys(int layer, int position) const {
    return from(layers_[static_cast<std::size_t>(layer)].keys, 1, position);
  }
  kvarn::heads_view<const float> values(int layer, int position) const {
    return from(layers_[static_cast<std::size_t>(layer)].values, 1, position);
  }
  kvarn::heads_view<const float> queries(int layer, int position) const {
    return from(layers_[static_cast<std::size_t>(layer)].queries, query_heads(), position);
  }

 private:
  struct layer {
    kvarn_examples::npy_array keys, values, queries;
  };

  kvarn::heads_view<const float> from(const kvarn_examples::npy_array& all, int heads,
                                      int position) const {
    return kvarn::token_major(all.values.data(), heads, head_dim()).from(position);
  }

  std::vector<layer> layers_;
};

}  // namespace kvarn_serving
