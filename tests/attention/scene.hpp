// What attention tests share: random memories of one KV head with their decoded tokens, the softmax
// over those tokens in double precision, and one call of the library with hostile surroundings.
#pragma once

#include <gtest/gtest.h>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kvarn/attention/attend.hpp"
#include "support/oracle.hpp"
#include "support/oracle_numbers.hpp"
#include "support/profiles.hpp"

namespace kvarn_test {

// ---- Memories ----

// A record of random fields whose numbers have a variance near 1. Fields of tokens from `count` on
// are garbage, as large as they can be.
std::vector<std::byte> random_record(const kvarn::tile_layout& layout, int count,
                                     gaussian_source& random);

// Exact tokens in memory with gaps of NaN between channels and between tokens.
template <class T>
class strided_tokens {
 public:
  strided_tokens(int count, int head_dim)
      : head_dim_(head_dim),
        data_(static_cast<std::size_t>(count) * stride() + 1,
              static_cast<T>(std::numeric_limits<float>::quiet_NaN())) {}

  T& at(int token, int channel) {
    return data_[static_cast<std::size_t>(token) * stride() +
                 2 * static_cast<std::size_t>(channel)];
  }
  kvarn::tokens_view<T> view() { return {data_.data(), static_cast<std::ptrdiff_t>(stride()), 2}; }
  kvarn::tokens_view<const T> view() const {
    return {data_.data(), static_cast<std::ptrdiff_t>(stride()), 2};
  }
  const std::vector<T>& all() const { return data_; }

 private:
  std::size_t stride() const { return 2 * static_cast<std::size_t>(head_dim_) + 3; }

  int head_dim_;
  std::vector<T> data_;
};

struct scene_shape {
  kvarn::cache_format format;
  int sink = 0;
  std::vector<int> groups;  // valid tokens of each sealed group
  int tail = 0;

  int sealed() const { return std::accumulate(groups.begin(), groups.end(), 0); }
  int tokens() const { return sink + sealed() + tail; }
};

// `tokens` tokens: a sink, full groups, at most one group less one token in the tail.
inline scene_shape shape_of_length(const kvarn::cache_format& format, int tokens, int sink) {
  scene_shape shape{format, (std::min)(tokens, sink), {}, 0};
  const int rest = tokens - shape.sink;
  shape.groups.assign(static_cast<std::size_t>(rest / format.group), format.group);
  shape.tail = rest % format.group;
  return shape;
}

// The memory of one KV head, and the numbers that it stands for, by position.
template <class T>
class scene {
 public:
  scene(scene_shape what, std::uint64_t seed)
      : shape(std::move(what)),
        keys(shape.tokens(), shape.format.key_head_dim),
        values(shape.tokens(), shape.format.value_head_dim),
        sink_keys(shape.sink, shape.format.key_head_dim),
        sink_values(shape.sink, shape.format.value_head_dim),
        tail_keys(shape.tail, shape.format.key_head_dim),
        tail_values(shape.tail, shape.format.value_head_dim) {
    gaussian_source random(seed);
    fill(sink_keys, keys, 0, shape.sink, random);
    fill(sink_values, values, 0, shape.sink, random);
    const int tail = shape.tokens() - shape.tail;
    fill(tail_keys, keys, tail, shape.tail, random);
    fill(tail_values, values, tail, shape.tail, random);

    // One byte in front of every record, so that all are unaligned.
    const kvarn::cache_format& format = shape.format;
    int position = shape.sink;
    for (const int count : shape.groups) {
      const std::size_t start = bytes.size();
      for (const auto& layout : {format.key_layout(), format.value_layout()}) {
        bytes.push_back(std::byte{0xa5});
        const auto record = random_record(layout, count, random);
        bytes.insert(bytes.end(), record.begin(), record.end());
        auto& numbers = layout.kind == kvarn::tile_kind::key ? keys : values;
        const auto tile = oracle::decode(oracle::read_record(record.data(), layout), layout);
        numbers.middleRows(position, count) = oracle::tokens_of(tile, layout, false).topRows(count);
      }
      starts_.push_back({start + 1, start + 2 + format.key_layout().record_bytes()});
      position += count;
    }
  }

  std::vector<kvarn::sealed_group> sealed_groups() const {
    std::vector<kvarn::sealed_group> groups;
    std::int64_t position = shape.sink;
    for (std::size_t i = 0; i < starts_.size(); ++i) {
      groups.push_back({bytes.data() + starts_[i].keys, bytes.data() + starts_[i].values, position,
                        shape.groups[i]});
      position += shape.groups[i];
    }
    return groups;
  }

  // Views of this object; `groups` holds what they point to.
  kvarn::attention_memory<T> memory(std::vector<kvarn::sealed_group>& groups) const {
    groups = sealed_groups();
    return {shape.format,
            {sink_keys.view(), sink_values.view(), 0, shape.sink},
            groups,
            {tail_keys.view(), tail_values.view(), shape.sink + shape.sealed(), shape.tail}};
  }

  scene_shape shape;
  oracle::matrix keys, values;  // tokens x head_dim, rotated
  strided_tokens<T> sink_keys, sink_values, tail_keys, tail_values;
  std::vector<std::byte> bytes;

 private:
  struct start {
    std::size_t keys, values;
  };

  static void fill(strided_tokens<T>& tokens, oracle::matrix& numbers, int first, int count,
                   gaussian_source& random) {
    for (int t = 0; t < count; ++t)
      for (int d = 0; d < numbers.cols(); ++d) {
        tokens.at(t, d) = static_cast<T>(static_cast<float>(random.normal()));
        numbers(first + t, d) = static_cast<double>(static_cast<float>(tokens.at(t, d)));
      }
  }

  std::vector<start> starts_;
};

// ---- Queries and results ----

// [tokens][heads] query vectors, of a size that gives scores a standard deviation of about
// 1.5 nats with softmax scale 1 / sqrt(head_dim).
oracle::matrix random_queries(int count, int head_dim, std::uint64_t seed);

struct query_shape {
  int tokens = 1;
  int heads = 1;
  std::int64_t position = 0;  // of the first query token
};

struct attended {
  oracle::matrix out;  // [tokens * heads][value head_dim]
  oracle::vector lse;
};

inline kvarn::attention_options options_for(const kvarn::cache_format& format) {
  return {.softmax_scale =
              static_cast<float>(1.0 / std::sqrt(static_cast<double>(format.key_head_dim)))};
}

// The softmax over decoded keys and values, from its formula.
attended expected_attention(const oracle::matrix& keys, const oracle::matrix& values,
                            const oracle::matrix& queries, const query_shape& shape,
                            const kvarn::attention_options& options);

template <class O>
struct attention_output {
  std::vector<O> out;      // [rows][value head_dim]
  std::vector<float> lse;  // [rows]

  bool operator==(const attention_output& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() &&
             std::memcmp(a.data(), b.data(), a.size() * sizeof(a.front())) == 0;
    };
    return same(out, other.out) && same(lse, other.lse);
  }
};

// Runs the library: strided queries and outputs, a dirty workspace, and canaries behind all of it.
template <class O = float, class Q = float, class T>
attention_output<O> run_attention(const kvarn::attention_memory<T>& memory,
                                  const oracle::matrix& queries, const query_shape& shape,
                                  const kvarn::attention_options& options,
                                  float dirt = std::numeric_limits<float>::quiet_NaN()) {
  const int rows = shape.tokens * shape.heads;
  const int dim = memory.format.value_head_dim;
  EXPECT_EQ(queries.rows(), rows);
  strided_tokens<Q> q(rows, memory.format.key_head_dim);
  for (int i = 0; i < rows; ++i)
    for (int d = 0; d < memory.format.key_head_dim; ++d)
      q.at(i, d) = static_cast<Q>(static_cast<float>(queries(i, d)));

  constexpr float canary = -12345.5f;
  const std::size_t floats = kvarn::attention_workspace(memory.format);
  std::vector<float> workspace(floats + 1, dirt);
  workspace.back() = canary;
  strided_tokens<O> out(rows, dim);
  std::vector<float> lse(static_cast<std::size_t>(rows) + 1, canary);
  kvarn::attend(kvarn::attention_queries<Q>{std::as_const(q).view(), shape.tokens, shape.heads,
                                            shape.position},
                memory, options, out.view(), lse.data(), workspace.data(), kvarn::target::scalar);
  EXPECT_EQ(workspace.back(), canary);
  EXPECT_EQ(lse.back(), canary);

  attention_output<O> result;
  std::size_t numbers = 0;
  for (const O x : out.all()) numbers += std::isnan(static_cast<float>(x)) ? 0 : 1;
  for (int i = 0; i < rows; ++i)
    for (int d = 0; d < dim; ++d) result.out.push_back(out.at(i, d));
  EXPECT_EQ(numbers, result.out.size());  // every output is written, no gap, none is NaN
  result.lse.assign(lse.begin(), lse.end() - 1);
  for (const float x : result.lse) EXPECT_FALSE(std::isnan(x));
  return result;
}

template <class O = float, class Q = float, class T>
attention_output<O> run_attention(const scene<T>& s, const oracle::matrix& queries,
                                  const query_shape& shape,
                                  const kvarn::attention_options& options) {
  std::vector<kvarn::sealed_group> groups;
  return run_attention<O, Q>(s.memory(groups), queries, shape, options);
}

// ---- Comparison ----

struct attention_deviation {
  double out = 0;  // largest over the queries of |error| / |output|
  double lse = 0;  // largest |error|, nats
};

template <class O>
attention_deviation deviation(const attention_output<O>& got, const attended& want) {
  attention_deviation worst;
  for (Eigen::Index i = 0; i < want.out.rows(); ++i) {
    oracle::vector row(want.out.cols());
    for (Eigen::Index d = 0; d < row.size(); ++d)
      row[d] = static_cast<double>(
          static_cast<float>(got.out[static_cast<std::size_t>(i * row.size() + d)]));
    const double norm = want.out.row(i).norm();
    const double error = (row.transpose() - want.out.row(i)).norm();
    worst.out = (std::max)(worst.out, norm > 0 ? error / norm : error);
    const auto lse = static_cast<double>(got.lse[static_cast<std::size_t>(i)]);
    if (lse != want.lse[i]) worst.lse = (std::max)(worst.lse, std::abs(lse - want.lse[i]));
  }
  return worst;
}

}  // namespace kvarn_test
