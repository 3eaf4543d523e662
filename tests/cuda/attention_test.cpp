// Attention on the device against a softmax in double precision over the decoded tokens, and the
// independence of its bits from how the work is cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention_formats.hpp"
#include "kvarn/codec/hadamard.hpp"
#include "kvarn/format/tile_view.hpp"
#include "support/attention_scenes.hpp"
#include "support/layouts.hpp"

namespace {

using kvarn::cache_format;
using kvarn_test::check;
using kvarn_test::device_array;
using kvarn_test::relative_error;
namespace cuda = kvarn::cuda;

constexpr int kv_heads = 2;

kvarn_test::attention_functions attention_of(int index) {
  constexpr kvarn_test::attention_functions (*all[])() = {
      &kvarn_test::attention_of<0>, &kvarn_test::attention_of<1>, &kvarn_test::attention_of<2>,
      &kvarn_test::attention_of<3>, &kvarn_test::attention_of<4>, &kvarn_test::attention_of<5>,
      &kvarn_test::attention_of<6>, &kvarn_test::attention_of<7>, &kvarn_test::attention_of<8>};
  static_assert(std::size(all) == std::size(kvarn_test::attention_formats));
  return all[index]();
}

// One sequence: tokens of each sealed group, and those around them.
struct sequence_shape {
  int sink = 0;
  std::vector<int> groups = {};
  int tail = 0;
  int tokens = 1;  // queries, the last of them behind the last token unless ahead
  int ahead = 0;
};

struct options {
  int heads = 4;
  float cap = 0.0f;
  std::int64_t window = 0;
  bool sink_logits = false;
  bool queries_rotated = false;
  bool rotate_output = true;
  float query_size = 2.0f;
  int splits = 0;
  int bounds = 1;         // how many times what there is the call's bounds are
  bool by_fours = false;  // blocks of four rows, however many there are
};

// What one sequence has: exact rows as FP32, records, queries.
struct sequence_data {
  sequence_shape shape;
  std::vector<kvarn_test::made_record> records;                       // [group][head][key, value]
  std::vector<float> sink_keys, sink_values, tail_keys, tail_values;  // [head][token][dim]
  std::vector<float> queries;                                         // [token][head][dim]
  std::int64_t tail_position = 0;
  std::int64_t query_position = 0;

  sequence_data(const cache_format& format, const sequence_shape& s, const options& o,
                std::uint64_t seed)
      : shape(s) {
    for (std::size_t g = 0; g < s.groups.size(); ++g)
      for (int h = 0; h < kv_heads; ++h) {
        const std::uint64_t at = seed * 1000 + g * 8 + static_cast<std::uint64_t>(h) * 2;
        records.emplace_back(format.key_layout(), at);
        records.emplace_back(format.value_layout(), at + 1);
      }
    const auto exact = [&](int count, int dim, std::uint64_t salt) {
      return kvarn_test::numbers<float>(static_cast<std::size_t>(kv_heads * count * dim),
                                        seed * 7 + salt);
    };
    sink_keys = exact(s.sink, format.key_head_dim, 1);
    sink_values = exact(s.sink, format.value_head_dim, 2);
    tail_keys = exact(s.tail, format.key_head_dim, 3);
    tail_values = exact(s.tail, format.value_head_dim, 4);
    queries = kvarn_test::numbers<float>(
        static_cast<std::size_t>(s.tokens * kv_heads * o.heads * format.key_head_dim), seed * 7 + 5,
        o.query_size);
    tail_position = s.sink;
    for (const int count : s.groups) tail_position += count;
    query_position = tail_position + s.tail - s.tokens - s.ahead;
  }
};

struct result {
  std::vector<float> out;  // [token][head][value dim]
  std::vector<float> lse;  // [token][head]
};

std::vector<float> sink_logits_of(const options& o) {
  return kvarn_test::numbers<float>(static_cast<std::size_t>(kv_heads * o.heads), 77);
}

// A token as the format and the exact rows define it, rotated.
struct plain_token {
  std::int64_t position;
  std::vector<double> key;
  std::vector<double> value;
};

std::vector<plain_token> tokens_of(const cache_format& format, const sequence_data& s, int kv) {
  std::vector<plain_token> tokens;
  const auto take_exact = [&](const std::vector<float>& keys, const std::vector<float>& values,
                              int count, std::int64_t position) {
    for (int i = 0; i < count; ++i) {
      const auto row = [&](const std::vector<float>& from, int dim) {
        const auto start = from.begin() + (kv * count + i) * dim;
        return std::vector<double>(start, start + dim);
      };
      tokens.push_back(
          {position + i, row(keys, format.key_head_dim), row(values, format.value_head_dim)});
    }
  };
  take_exact(s.sink_keys, s.sink_values, s.shape.sink, 0);
  std::int64_t position = s.shape.sink;
  for (std::size_t g = 0; g < s.shape.groups.size(); ++g) {
    const std::size_t at = (g * kv_heads + static_cast<std::size_t>(kv)) * 2;
    const kvarn::const_tile_view keys{s.records[at].data(), format.key_layout()};
    const kvarn::const_tile_view values{s.records[at + 1].data(), format.value_layout()};
    const auto number = [](const kvarn::const_tile_view& tile, int row, int col) {
      return (static_cast<double>(tile.code(row, col)) * static_cast<double>(tile.step(col)) +
              static_cast<double>(static_cast<float>(tile.zero(col)))) *
             static_cast<double>(tile.scale(row));
    };
    for (int i = 0; i < s.shape.groups[g]; ++i) {
      plain_token token{position + i, {}, {}};
      for (int d = 0; d < format.key_head_dim; ++d) token.key.push_back(number(keys, i, d));
      for (int d = 0; d < format.value_head_dim; ++d) token.value.push_back(number(values, d, i));
      tokens.push_back(std::move(token));
    }
    position += s.shape.groups[g];
  }
  take_exact(s.tail_keys, s.tail_values, s.shape.tail, s.tail_position);
  return tokens;
}

// In double, from the definition of the format.
result reference(const cache_format& format, const sequence_data& s, const options& o) {
  const int key_dim = format.key_head_dim;
  const int value_dim = format.value_head_dim;
  const int heads = kv_heads * o.heads;
  const double scale = 1.0 / std::sqrt(static_cast<double>(key_dim));
  const auto logits = sink_logits_of(o);
  std::vector<std::vector<plain_token>> memory;
  for (int kv = 0; kv < kv_heads; ++kv) memory.push_back(tokens_of(format, s, kv));
  result r;
  for (int t = 0; t < s.shape.tokens; ++t)
    for (int h = 0; h < heads; ++h) {
      std::vector<float> q(s.queries.begin() + (t * heads + h) * key_dim,
                           s.queries.begin() + (t * heads + h + 1) * key_dim);
      if (!o.queries_rotated) kvarn::hadamard(q.data(), key_dim);
      const std::int64_t end = s.query_position + t + 1;
      const std::int64_t first = o.window == 0 ? 0 : end - o.window;
      double maximum = -std::numeric_limits<double>::infinity();
      if (o.sink_logits) maximum = logits[static_cast<std::size_t>(h)];
      std::vector<std::pair<double, const plain_token*>> scores;
      for (const plain_token& token : memory[static_cast<std::size_t>(h / o.heads)]) {
        if (token.position < first || token.position >= end) continue;
        double score = 0;
        for (std::size_t d = 0; d < q.size(); ++d)
          score += static_cast<double>(q[d]) * token.key[d];
        score *= scale;
        if (o.cap != 0.0f) score = o.cap * std::tanh(score / o.cap);
        scores.emplace_back(score, &token);
        maximum = std::max(maximum, score);
      }
      double sum = o.sink_logits ? std::exp(logits[static_cast<std::size_t>(h)] - maximum) : 0.0;
      std::vector<double> out(static_cast<std::size_t>(value_dim));
      for (const auto& [score, token] : scores) {
        const double weight = std::exp(score - maximum);
        sum += weight;
        for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * token->value[d];
      }
      std::vector<float> rounded;
      for (const double x : out) rounded.push_back(sum > 0 ? static_cast<float>(x / sum) : 0.0f);
      if (o.rotate_output) kvarn::hadamard(rounded.data(), value_dim);
      r.out.insert(r.out.end(), rounded.begin(), rounded.end());
      r.lse.push_back(sum > 0 ? static_cast<float>(maximum + std::log(sum))
                              : -std::numeric_limits<float>::infinity());
    }
  return r;
}

template <class T>
std::vector<T> converted(const std::vector<float>& values) {
  std::vector<T> out;
  for (const float x : values) out.push_back(static_cast<T>(x));
  return out;
}

// Runs all sequences in one call. `T`: type of queries, exact rows and the output.
template <class T>
std::vector<result> on_device(int format_index, const std::vector<sequence_data>& sequences,
                              const options& o) {
  const cache_format format = kvarn_test::attention_formats[format_index];
  const int key_dim = format.key_head_dim;
  const int value_dim = format.value_head_dim;
  const std::size_t page_bytes = format.page_bytes(kv_heads);

  std::size_t groups = 0;
  for (const auto& s : sequences) groups += s.shape.groups.size();
  std::vector<std::byte> pages((groups + 1) * page_bytes, std::byte{0xff});
  std::vector<std::unique_ptr<device_array<T>>> arrays;
  std::vector<std::unique_ptr<device_array<float>>> lses;
  std::vector<std::unique_ptr<device_array<cuda::page_entry>>> tables;
  std::vector<cuda::attention_sequence> list;
  const auto upload = [&](const std::vector<T>& values) {
    arrays.push_back(std::make_unique<device_array<T>>(values));
    return arrays.back()->data();
  };
  cuda::attention_arguments a;
  a.kv_heads = kv_heads;
  a.heads = o.heads;
  std::size_t next_page = groups;  // from the back, so that no page is where its number says
  std::vector<T*> outs;
  // Rows of a head are `capacity` apart, the same for all sequences.
  int capacity = 1;
  for (const auto& s : sequences) capacity = std::max({capacity, s.shape.sink, s.shape.tail});
  a.key_strides = {key_dim, std::int64_t{capacity} * key_dim, 1};
  a.value_strides = {value_dim, std::int64_t{capacity} * value_dim, 1};
  const auto upload_rows = [&](const std::vector<float>& rows, int count, int dim) {
    std::vector<T> padded(static_cast<std::size_t>(kv_heads * capacity * dim),
                          static_cast<T>(std::numeric_limits<float>::quiet_NaN()));
    for (int h = 0; h < kv_heads; ++h)
      for (int i = 0; i < count * dim; ++i)
        padded[static_cast<std::size_t>(h * capacity * dim + i)] =
            static_cast<T>(rows[static_cast<std::size_t>(h * count * dim + i)]);
    return upload(padded);
  };
  for (const auto& s : sequences) {
    cuda::attention_sequence entry;
    std::vector<cuda::page_entry> table;
    std::int64_t position = s.shape.sink;
    for (std::size_t g = 0; g < s.shape.groups.size(); ++g) {
      --next_page;
      for (int h = 0; h < kv_heads; ++h) {
        std::byte* const page = pages.data() + next_page * page_bytes;
        const std::size_t at = (g * kv_heads + static_cast<std::size_t>(h)) * 2;
        std::memcpy(page + format.key_offset(h), s.records[at].data(),
                    format.key_layout().record_bytes());
        std::memcpy(page + format.value_offset(h), s.records[at + 1].data(),
                    format.value_layout().record_bytes());
      }
      table.push_back({position, static_cast<std::int32_t>(next_page), s.shape.groups[g]});
      position += s.shape.groups[g];
    }
    tables.push_back(std::make_unique<device_array<cuda::page_entry>>(table));
    const std::size_t rows = static_cast<std::size_t>(s.shape.tokens * kv_heads * o.heads);
    arrays.push_back(
        std::make_unique<device_array<T>>(rows * static_cast<std::size_t>(value_dim), 0xff));
    outs.push_back(arrays.back()->data());
    entry.out = outs.back();
    lses.push_back(std::make_unique<device_array<float>>(rows, 0xff));
    entry.lse = lses.back()->data();
    entry.queries = upload(converted<T>(s.queries));
    entry.position = s.query_position;
    entry.tokens = s.shape.tokens;
    entry.page_count = static_cast<std::int32_t>(table.size());
    entry.pages = tables.back()->data();
    entry.sink = {upload_rows(s.sink_keys, s.shape.sink, key_dim),
                  upload_rows(s.sink_values, s.shape.sink, value_dim), 0, s.shape.sink};
    entry.tail = {upload_rows(s.tail_keys, s.shape.tail, key_dim),
                  upload_rows(s.tail_values, s.shape.tail, value_dim), s.tail_position,
                  s.shape.tail};
    list.push_back(entry);
    a.max_tokens = std::max(a.max_tokens, s.shape.tokens);
    a.max_pages = std::max(a.max_pages, entry.page_count);
    a.max_sink = std::max(a.max_sink, s.shape.sink);
    a.max_tail = std::max(a.max_tail, s.shape.tail);
  }
  a.max_pages *= o.bounds;
  a.max_sink *= o.bounds;
  a.max_tail *= o.bounds;
  const device_array<std::byte> device_pages(pages);
  const device_array<cuda::attention_sequence> device_list(list);
  const device_array<float> logits(sink_logits_of(o));
  a.query_type = a.out_type = a.exact_type = cuda::element_type_of<T>;
  a.query_strides = {std::int64_t{kv_heads} * o.heads * key_dim, key_dim, 1};
  a.out_strides = {std::int64_t{kv_heads} * o.heads * value_dim, value_dim, 1};
  a.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(key_dim)));
  a.logit_soft_cap = o.cap;
  a.window = o.window;
  a.sink_logits = o.sink_logits ? logits.data() : nullptr;
  a.queries_rotated = o.queries_rotated;
  a.rotate_output = o.rotate_output;
  a.pages = device_pages.data();
  a.sequences = device_list.data();
  a.count = static_cast<int>(list.size());
  a.splits = o.splits;
  const auto functions = attention_of(format_index);
  const auto workspace_bytes =
      o.by_fours ? functions.workspace_bytes_by_fours : functions.workspace_bytes;
  const device_array<std::byte> workspace(workspace_bytes(a), 0xff);
  a.workspace = workspace.data();
  check((o.by_fours ? functions.launch_by_fours : functions.launch)(a, nullptr));
  kvarn_test::synchronize();

  std::vector<result> results;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    result r;
    const std::size_t rows =
        static_cast<std::size_t>(sequences[i].shape.tokens * kv_heads * o.heads);
    std::vector<T> out(rows * static_cast<std::size_t>(value_dim));
    check(cudaMemcpy(out.data(), outs[i], out.size() * sizeof(T), cudaMemcpyDeviceToHost));
    for (const T x : out) r.out.push_back(static_cast<float>(x));
    r.lse = lses[i]->to_host();
    results.push_back(std::move(r));
  }
  return results;
}

const std::vector<sequence_shape> shapes = {
    {.sink = 5, .groups = {128, 128, 67, 128, 128, 1, 0, 128, 128, 30}, .tail = 37},
    {.sink = 128, .groups = std::vector<int>(40, 64), .tail = 200},
    {.sink = 0, .groups = {64}, .tail = 0},
    {.sink = 0, .groups = {}, .tail = 1},
    {.sink = 130, .groups = {}, .tail = 0},
    {.sink = 1, .groups = {64, 64}, .tail = 3, .ahead = 40},
};

std::vector<sequence_data> make(const cache_format& format, const options& o, int tokens,
                                std::uint64_t seed) {
  std::vector<sequence_data> all;
  for (sequence_shape s : shapes) {
    for (int& count : s.groups) count = std::min(count, format.group);
    int length = s.sink + s.tail;
    for (const int count : s.groups) length += count;
    s.tokens = std::min(tokens, std::max(1, length - s.ahead));
    all.emplace_back(format, s, o, ++seed);
  }
  return all;
}

bool same_bits(const result& a, const result& b) {
  return a.out.size() == b.out.size() &&
         std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

// The stated error of attention with FP32 input and output: relative to the outputs of a sequence.
constexpr double largest_error = 1e-3;
constexpr double smallest_error = 1e-7;

template <class T>
void expect_close(int f, const options& o, int tokens, double extra, const std::string& what) {
  const cache_format format = kvarn_test::attention_formats[f];
  SCOPED_TRACE(kvarn_test::name_of(format.key_layout()) + " / " +
               kvarn_test::name_of(format.value_layout()) + ", " + what);
  auto sequences = make(format, o, tokens, static_cast<std::uint64_t>(100 * f + tokens));
  // What the device gets, in its type.
  for (auto& s : sequences)
    for (auto* v : {&s.sink_keys, &s.sink_values, &s.tail_keys, &s.tail_values, &s.queries})
      for (float& x : *v) x = static_cast<float>(static_cast<T>(x));
  const auto results = on_device<T>(f, sequences, o);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const result exact = reference(format, sequences[i], o);
    const double error = relative_error(results[i].out, exact.out);
    EXPECT_LE(error, largest_error + extra) << "sequence " << i;
    if (!sequences[i].shape.groups.empty()) {
      EXPECT_GE(error, smallest_error) << "sequence " << i;
    }
    for (std::size_t k = 0; k < exact.lse.size(); ++k)
      EXPECT_NEAR(results[i].lse[k], exact.lse[k], 3e-4 * (10 + std::fabs(exact.lse[k])))
          << "sequence " << i << " row " << k;
  }
}

TEST(CudaAttention, EveryFormat) {
  for (int f = 0; f < kvarn_test::attention_format_count; ++f) {
    expect_close<float>(f, {}, 1, 0, "float32");
    expect_close<kvarn::float16>(f, {}, 1, 1e-3, "float16");
    expect_close<kvarn::bfloat16>(f, {}, 1, 8e-3, "bfloat16");
  }
}

TEST(CudaAttention, EveryOption) {
  for (const int f : {0, 3})
    for (int index = 0; index < 32; ++index) {
      options o;
      o.cap = index & 1 ? 2.5f : 0.0f;
      o.window = index & 2 ? 170 : 0;
      o.sink_logits = (index & 4) != 0;
      o.queries_rotated = (index & 8) != 0;
      o.rotate_output = (index & 16) == 0;
      expect_close<float>(f, o, 1 + index % 3, 0, "options " + std::to_string(index));
    }
}

TEST(CudaAttention, HeadsAndQueryTokens) {
  for (const int f : {0, 4})
    for (const int heads : {1, 2, 3, 4, 6, 8, 16, 32})
      for (const int tokens : {1, 5, 16}) {
        if (heads > 4 && tokens == 16) continue;  // more rows than 64 are no other case
        options o;
        o.heads = heads;
        expect_close<float>(
            f, o, tokens, 0,
            std::to_string(heads) + " heads, " + std::to_string(tokens) + " query tokens");
      }
}

TEST(CudaAttention, LargeScores) {
  options o;
  o.query_size = 60.0f;
  for (const int f : {0, 6}) {
    const cache_format format = kvarn_test::attention_formats[f];
    const auto sequences = make(format, o, 2, 5);
    const auto results = on_device<float>(f, sequences, o);
    for (std::size_t i = 0; i < sequences.size(); ++i)
      EXPECT_LE(relative_error(results[i].out, reference(format, sequences[i], o).out), 2e-2);
  }
}

TEST(CudaAttention, BitsDoNotDependOnSplitsOrBatch) {
  for (const int f : {0, 2, 3, 7, 8})
    for (const int tokens : {1, 6}) {
      SCOPED_TRACE(f);
      const cache_format format = kvarn_test::attention_formats[f];
      options o;
      auto sequences = make(format, o, tokens, 11);
      sequences.emplace_back(format,
                             sequence_shape{.sink = 128,
                                            .groups = std::vector<int>(150, format.group),
                                            .tail = 300,
                                            .tokens = tokens},
                             o, 99);
      o.splits = 1;
      const auto whole = on_device<float>(f, sequences, o);
      for (const int splits : {0, 2, 3, 5, 9, 1000}) {
        o.splits = splits;
        const auto cut = on_device<float>(f, sequences, o);
        for (std::size_t i = 0; i < sequences.size(); ++i)
          EXPECT_TRUE(same_bits(whole[i], cut[i])) << splits << " splits, sequence " << i;
      }
      o.splits = 0;
      o.bounds = 20;
      const auto loose = on_device<float>(f, sequences, o);
      for (std::size_t i = 0; i < sequences.size(); ++i)
        EXPECT_TRUE(same_bits(whole[i], loose[i])) << "loose bounds, sequence " << i;
      o.bounds = 1;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        std::vector<sequence_data> alone;
        alone.push_back(sequences[i]);
        EXPECT_TRUE(same_bits(whole[i], on_device<float>(f, alone, o)[0])) << "alone " << i;
      }
    }
}

// A row's bits do not depend on the rows it shares a block with: blocks of four rows instead of
// eight, and one query token alone instead of several, give the same.
TEST(CudaAttention, BitsDoNotDependOnOtherRows) {
  for (const int f : {0, 3, 4})
    for (const int index : {0, 1, 2, 3}) {
      options o;
      o.heads = index & 1 ? 3 : 1;
      o.window = index & 2 ? 167 : 0;  // some rows of a block see all of a group, others do not
      const int tokens = index & 1 ? 8 : 33;
      SCOPED_TRACE("format " + std::to_string(f) + ", options " + std::to_string(index));
      const cache_format format = kvarn_test::attention_formats[f];
      const auto sequences = make(format, o, tokens, static_cast<std::uint64_t>(index));
      const auto together = on_device<float>(f, sequences, o);
      o.by_fours = true;
      const auto fours = on_device<float>(f, sequences, o);
      o.by_fours = false;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        EXPECT_TRUE(same_bits(together[i], fours[i])) << "sequence " << i;
        const std::size_t rows = static_cast<std::size_t>(kv_heads * o.heads);
        const auto key_row = rows * static_cast<std::size_t>(format.key_head_dim);
        const auto value_row = rows * static_cast<std::size_t>(format.value_head_dim);
        for (int t = 0; t < sequences[i].shape.tokens; t += 7) {
          const auto token = static_cast<std::size_t>(t);
          std::vector<sequence_data> alone{sequences[i]};
          alone[0].shape.tokens = 1;
          alone[0].query_position += t;
          const auto query =
              sequences[i].queries.begin() + static_cast<std::ptrdiff_t>(token * key_row);
          alone[0].queries.assign(query, query + static_cast<std::ptrdiff_t>(key_row));
          const auto result = on_device<float>(f, alone, o)[0];
          EXPECT_EQ(std::memcmp(result.out.data(), together[i].out.data() + token * value_row,
                                value_row * sizeof(float)),
                    0)
              << "sequence " << i << ", token " << t << " alone";
        }
      }
    }
}

// One keeps four registers in memory (compiled for 9.0).
TEST(CudaAttention, KernelsKeepTheirRegisters) {
  for (int f = 0; f < kvarn_test::attention_format_count; ++f) {
    SCOPED_TRACE(f);
    EXPECT_LE(attention_of(f).local_bytes(false), 16);
    EXPECT_LE(attention_of(f).local_bytes(true), 16);
  }
}

TEST(CudaAttention, RefusesWhatNoKernelTakes) {
  const auto functions = attention_of(0);
  cuda::attention_arguments a;
  a.count = 1;
  EXPECT_EQ(functions.launch(a, nullptr).code, cudaErrorInvalidValue);
  EXPECT_NE(functions.launch(a, nullptr).message.find("softmax_scale"), std::string::npos);
  a.softmax_scale = 1.0f;
  EXPECT_NE(functions.launch(a, nullptr).message.find("sequences"), std::string::npos);
}

}  // namespace
