// Memories for attention with everything that a memory can have, queries for them, and one call on
// a chosen target.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kvarn/attention/attend.hpp"
#include "support/layouts.hpp"
#include "support/profiles.hpp"

namespace kvarn_test {

// A stand-in for a record: any codes, steps and scales near 1, zeros near 0. The bytes end where
// the allocation ends, and start at an odd address.
struct made_record {
  std::vector<std::byte> bytes;

  made_record(const kvarn::tile_layout& layout, std::uint64_t seed)
      : bytes(layout.record_bytes() + 1) {
    gaussian_source random(seed);
    std::byte* const out = bytes.data() + 1;
    for (std::size_t i = 0; i < layout.zero_offset(); ++i)
      out[i] = static_cast<std::byte>(random.index(256));
    for (int c = 0; c < layout.cols(); ++c) {
      const kvarn::float16 zero(static_cast<float>(random.normal()));
      std::memcpy(out + layout.zero_offset() + 2 * static_cast<std::size_t>(c), &zero,
                  sizeof(zero));
    }
    for (std::size_t i = layout.step_offset(); i < layout.record_bytes(); ++i) {
      // Now and then a subnormal.
      const float value = random.index(16) == 0
                              ? 0x1p-8f
                              : static_cast<float>(0.1 + 0.5 * std::fabs(random.normal()));
      out[i] =
          layout.scale == kvarn::scale_type::ue5m3
              ? static_cast<std::byte>(kvarn::ue5m3(random.index(16) == 0 ? 0x1p-16f : value).bits)
              : static_cast<std::byte>(kvarn::e4m3(value).bits);
    }
  }
  const std::byte* data() const { return bytes.data() + 1; }
};

template <class T>
std::vector<T> numbers(std::size_t count, std::uint64_t seed, float size = 1.0f) {
  gaussian_source random(seed);
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i)
    values.push_back(static_cast<T>(size * static_cast<float>(random.normal())));
  return values;
}

struct shape {
  kvarn::cache_format format;
  int groups = 10;  // two chunks
  int sink = 5;
  int tail = 37;
  int tokens = 1;
  int heads = 4;
  int ahead = 0;  // how far the queries stand before the end of the memory
  bool strided = false;
};

inline std::string describe(const shape& s) {
  const kvarn::cache_format& f = s.format;
  return name_of(f.key_layout()) + ", " + name_of(f.value_layout()) + ", " +
         std::to_string(s.groups) + " groups, sink " + std::to_string(s.sink) + ", tail " +
         std::to_string(s.tail) + ", " + std::to_string(s.tokens) + " x " +
         std::to_string(s.heads) + " queries";
}

// A memory with everything that a memory can have, and queries for it.
template <class T>
class scene {
 public:
  explicit scene(const shape& s, std::uint64_t seed = 1, float query_size = 2.0f) : shape_(s) {
    const kvarn::cache_format& f = s.format;
    std::int64_t position = s.sink;
    for (int g = 0; g < s.groups; ++g) {
      const auto at = seed + 2 * static_cast<std::uint64_t>(g);
      records_.emplace_back(f.key_layout(), at);
      records_.emplace_back(f.value_layout(), at + 1);
    }
    for (int g = 0; g < s.groups; ++g) {
      // Some groups are cut, one is empty.
      const int count = g == 2 ? f.group / 2 + 3 : g == 5 ? 1 : g == 6 ? 0 : f.group;
      const auto i = 2 * static_cast<std::size_t>(g);
      groups_.push_back({records_[i].data(), records_[i + 1].data(), position, count});
      position += count;
    }
    const int stride = s.strided ? 3 : 1;
    const auto exact = [&](int count, int dim, std::uint64_t salt) {
      return numbers<T>(static_cast<std::size_t>(count * dim * stride), seed + salt);
    };
    sink_keys_ = exact(s.sink, f.key_head_dim, 100);
    sink_values_ = exact(s.sink, f.value_head_dim, 101);
    tail_keys_ = exact(s.tail, f.key_head_dim, 102);
    tail_values_ = exact(s.tail, f.value_head_dim, 103);
    const auto view = [&](const std::vector<T>& tokens, int dim) {
      return kvarn::tokens_view<const T>{tokens.data(), std::ptrdiff_t{dim} * stride, stride};
    };
    memory_ = {
        f,
        {view(sink_keys_, f.key_head_dim), view(sink_values_, f.value_head_dim), 0, s.sink},
        groups_,
        {view(tail_keys_, f.key_head_dim), view(tail_values_, f.value_head_dim), position, s.tail}};
    queries_ =
        numbers<float>(static_cast<std::size_t>(rows() * f.key_head_dim), seed + 104, query_size);
    position_ = position + s.tail - s.tokens - s.ahead;
    sink_logits_ = numbers<float>(static_cast<std::size_t>(s.heads), seed + 105);
    plain_.softmax_scale = kvarn::hadamard_norm(f.key_head_dim);
  }

  scene(scene&&) = default;  // the views stay valid
  scene(const scene&) = delete;

  int rows() const { return shape_.tokens * shape_.heads; }
  const shape& dims() const { return shape_; }
  const kvarn::attention_options& plain() const { return plain_; }
  const float* sink_logits() const { return sink_logits_.data(); }
  std::vector<float>& queries() { return queries_; }

  using task = kvarn::attention_task<float, T, float>;
  task make_task(const kvarn::attention_options& options, float* out, float* lse) const {
    const int key_dim = shape_.format.key_head_dim;
    return {{{queries_.data(), key_dim}, shape_.tokens, shape_.heads, position_},
            memory_,
            options,
            {out, shape_.format.value_head_dim},
            lse};
  }

 private:
  shape shape_;
  std::vector<made_record> records_;
  std::vector<kvarn::sealed_group> groups_;
  std::vector<T> sink_keys_, sink_values_, tail_keys_, tail_values_;
  std::vector<float> queries_;
  std::vector<float> sink_logits_;
  std::int64_t position_ = 0;
  kvarn::attention_memory<T> memory_;
  kvarn::attention_options plain_;
};

inline constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
inline constexpr std::size_t canaries = 16;

// Outputs and logarithms of the sums, with canaries behind both.
struct outputs {
  std::vector<float> out;
  std::vector<float> lse;

  outputs(int rows, int dim)
      : out(static_cast<std::size_t>(rows * dim) + canaries, -77.0f),
        lse(static_cast<std::size_t>(rows) + canaries, -77.0f) {}

  void check_canaries() const {
    for (std::size_t i = 1; i <= canaries; ++i) {
      EXPECT_EQ(out[out.size() - i], -77.0f);
      EXPECT_EQ(lse[lse.size() - i], -77.0f);
    }
  }
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class T>
outputs run(const scene<T>& s, const kvarn::attention_options& options, kvarn::target on) {
  outputs result(s.rows(), s.dims().format.value_head_dim);
  std::vector<float> workspace(kvarn::attention_workspace(s.dims().format), kPoison);
  kvarn::attend(s.make_task(options, result.out.data(), result.lse.data()), workspace.data(), on);
  result.check_canaries();
  return result;
}

// Every combination of options, walked through by `index`.
template <class T>
kvarn::attention_options options_of(const scene<T>& s, int index) {
  kvarn::attention_options options = s.plain();
  options.precision =
      index % 2 == 0 ? kvarn::operand_precision::int16 : kvarn::operand_precision::int8;
  if (index / 2 % 2 == 1) options.logit_soft_cap = 2.5f;
  if (index / 4 % 2 == 1) options.window = s.dims().tail + 5 * s.dims().format.group / 2;
  if (index / 8 % 2 == 1) options.sink_logits = s.sink_logits();
  options.queries_rotated = index / 16 % 2 == 1;
  options.rotate_output = index / 32 % 2 == 0;
  return options;
}
inline constexpr int option_sets = 64;

}  // namespace kvarn_test
