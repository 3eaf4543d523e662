// Decode attention on a GPU: time of one call in a graph, beside a plain read of the same bytes.
//
// Pages hold tiles that the library encoded, in random order, and every call of a graph reads other
// pages. KVARN_BENCH_FORMAT is the format's id; more than one format takes more than one build.
// KVARN_BENCH_BLOCKS, where defined, takes the place of attention_policy::blocks_per_sm.
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "kvarn/cuda/attention.cuh"
#include "kvarn/cuda/encode.cuh"
#include "support.cuh"

#ifndef KVARN_BENCH_FORMAT
#define KVARN_BENCH_FORMAT kvarn::cache_format{}.id()
#endif

namespace {

using kvarn_bench::check;
using kvarn_bench::device_array;
namespace cuda = kvarn::cuda;

constexpr kvarn::cache_format format = kvarn::format_of_id(KVARN_BENCH_FORMAT);
constexpr int kv_heads = 8;
constexpr int group = format.group;

struct call_shape {
  const char* name;
  int batch;
  int context;
  int heads = 4;   // per KV head
  int tokens = 1;  // query tokens
  int exact = 0;   // tokens of the sink, and of the tail
};

class pool {
 public:
  // As many pages as the largest call takes.
  pool(int count, int rows)
      : page_count(count),
        pages(format.page_bytes(kv_heads) * static_cast<std::size_t>(count)),
        numbers(std::size_t{64} * kv_heads * group * 256),
        exact(std::size_t{2} * kv_heads * 256 * 256),
        out(static_cast<std::size_t>(rows) * format.value_head_dim),
        order(static_cast<std::size_t>(count)),
        random_(1) {
    kvarn_bench::normal_kernel<<<1024, 256>>>(numbers.data(), numbers.size(), 1);
    kvarn_bench::normal_kernel<<<1024, 256>>>(exact.data(), exact.size(), 7);
    for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value}) {
      const int dim = kind == kvarn::tile_kind::key ? format.key_head_dim : format.value_head_dim;
      std::vector<cuda::encode_group> groups;
      for (int i = 0; i < count; ++i)
        groups.push_back({numbers.data() + std::size_t(i % 64) * kv_heads * group * dim,
                          pages.data() + format.page_bytes(kv_heads) * std::size_t(i)});
      const device_array<cuda::encode_group> table(groups);
      const device_array<std::byte> workspace(
          cuda::encode_workspace_bytes(format, kind, kvarn::encoder::tuned));
      check(cuda::encode({.format = format,
                          .kind = kind,
                          .strides = {kv_heads * dim, dim, 1},
                          .kv_heads = kv_heads,
                          .groups = table.data(),
                          .count = count,
                          .workspace = workspace.data()},
                         nullptr));
      check(cudaDeviceSynchronize());
    }
    for (int i = 0; i < count; ++i) order[static_cast<std::size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), random_);
  }

  int page_count;
  device_array<std::byte> pages;
  device_array<std::uint16_t> numbers;
  device_array<std::uint16_t> exact;
  device_array<std::uint16_t> out;
  std::vector<int> order;

 private:
  std::mt19937 random_;
};

struct timing {
  double bytes;
  double call;
  double read;
};

template <cuda::attention_policy Policy>
double time_call(const pool& memory, const call_shape& s, int splits, bool in_graph = true) {
  const int groups = s.context / group;
  const int pages = s.batch * groups;
  const int variants = std::max(1, memory.page_count / pages);
  const double bytes = static_cast<double>(pages) * format.page_bytes(kv_heads);
  const int calls = std::max(2, std::min(variants, static_cast<int>(std::ceil(200e6 / bytes))));
  std::vector<cuda::page_entry> entries;
  for (int i = 0; i < calls * pages; ++i)
    entries.push_back({s.exact + std::int64_t{i % groups} * group,
                       memory.order[static_cast<std::size_t>(i % (variants * pages))], group});
  const device_array<cuda::page_entry> table(entries);
  std::vector<cuda::attention_sequence> list;
  const int rows = s.heads * kv_heads * s.tokens;
  for (int i = 0; i < calls * s.batch; ++i) {
    cuda::attention_sequence q;
    q.queries = memory.numbers.data() + std::size_t(i % s.batch) * rows * format.key_head_dim;
    q.out = memory.out.data() + std::size_t(i % s.batch) * rows * format.value_head_dim;
    q.position = 2 * s.exact + s.context - s.tokens;
    q.tokens = s.tokens;
    q.page_count = groups;
    q.pages = table.data() + std::size_t(i) * groups;
    q.sink = {memory.exact.data(), memory.exact.data(), 0, s.exact};
    q.tail = {memory.exact.data(), memory.exact.data(), s.exact + s.context, s.exact};
    list.push_back(q);
  }
  const device_array<cuda::attention_sequence> sequences(list);
  cuda::attention_arguments a;
  a.kv_heads = kv_heads;
  a.heads = s.heads;
  a.query_strides = {kv_heads * s.heads * format.key_head_dim, format.key_head_dim, 1};
  a.out_strides = {kv_heads * s.heads * format.value_head_dim, format.value_head_dim, 1};
  a.key_strides = {format.key_head_dim, 256 * format.key_head_dim, 1};
  a.value_strides = {format.value_head_dim, 256 * format.value_head_dim, 1};
  a.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(format.key_head_dim)));
  a.pages = memory.pages.data();
  a.sequences = sequences.data();
  a.count = s.batch;
  a.max_tokens = s.tokens;
  a.max_pages = groups;
  a.max_sink = a.max_tail = s.exact;
  a.splits = splits;
  const device_array<std::byte> workspace(cuda::attention_workspace_bytes<format, Policy>(a));
  a.workspace = workspace.data();
  if (!in_graph) {
    check(cuda::attend<format, Policy>(a, nullptr));
    check(cudaDeviceSynchronize());
    return 0;
  }
  return kvarn_bench::graph_time(calls, [&](int i, cudaStream_t stream) {
    cuda::attention_arguments mine = a;
    mine.sequences = sequences.data() + std::size_t(i) * s.batch;
    check(cuda::attend<format, Policy>(mine, stream));
  });
}

double time_read(const pool& memory, const call_shape& s) {
  const std::size_t bytes =
      std::size_t(s.batch * (s.context / group)) * format.page_bytes(kv_heads);
  const int variants = std::max<int>(1, static_cast<int>(memory.pages.size() / bytes));
  const int calls =
      std::max(2, std::min(variants, static_cast<int>(std::ceil(200e6 / double(bytes)))));
  double best = 1e30;
  for (const unsigned blocks : {264u, 528u, 1056u})
    best = std::min(best, kvarn_bench::graph_time(calls, [&](int i, cudaStream_t stream) {
                      kvarn_bench::read_kernel<<<blocks, 512, 0, stream>>>(
                          reinterpret_cast<const uint4*>(memory.pages.data() +
                                                         std::size_t(i % variants) * bytes),
                          bytes / 16, reinterpret_cast<unsigned*>(memory.out.data()));
                    }));
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_sweep = argc > 1 && std::strcmp(argv[1], "sweep") == 0;
  const bool is_profile = argc > 1 && std::strcmp(argv[1], "profile") == 0;
  const bool is_short = argc > 1 && std::strcmp(argv[1], "short") == 0;
  constexpr cuda::attention_policy policy = [] {
    cuda::attention_policy p = cuda::default_policy(format);
#ifdef KVARN_BENCH_BLOCKS
    p.blocks_per_sm = KVARN_BENCH_BLOCKS;
#endif
    return p;
  }();
  const pool memory(32 * 32768 / group, 32 * 32 * 16);
  std::printf("K%dV%d, D %d / %d, G %d, %d KV heads; microseconds per call\n", format.key_bits,
              format.value_bits, format.key_head_dim, format.value_head_dim, group, kv_heads);
  std::printf("%-34s %9s %9s %7s\n", "", "call", "read", "percent");
  std::vector<call_shape> shapes = {
      {"B1 4k", 1, 4096},   {"B1 32k", 1, 32768}, {"B1 128k", 1, 131072}, {"B8 4k", 8, 4096},
      {"B8 32k", 8, 32768}, {"B32 4k", 32, 4096}, {"B32 32k", 32, 32768}};
  if (is_short) shapes = {{"B1 32k", 1, 32768}, {"B32 32k", 32, 32768}};
  if (is_profile) {  // one call of each shape, for a profiler
    shapes.push_back({"B32 32k, 8 heads per KV head", 32, 32768, 8});
    for (const call_shape& s : shapes) time_call<policy>(memory, s, 0, false);
    return 0;
  }
  for (const call_shape& s : shapes) {
    const double read = time_read(memory, s);
    const auto print = [&](const std::string& name, double time) {
      std::printf("%-34s %9.2f %9.2f %6.1f%%\n", name.c_str(), time, read, 100 * read / time);
      std::fflush(stdout);
    };
    print(s.name, time_call<policy>(memory, s, 0));
    if (is_sweep)
      for (const int splits : {1, 2, 3, 4, 8, 16, 32, 64, 128}) {
        if (splits * s.batch * kv_heads > 1100 || splits > s.context / group / 8) continue;
        print(std::string(s.name) + ", " + std::to_string(splits) + " splits",
              time_call<policy>(memory, s, splits));
      }
  }
  if (is_short) return 0;
  const call_shape last{"B32 32k", 32, 32768};
  const double last_read = time_read(memory, last);
  const auto print = [&](const char* name, const call_shape& s) {
    const bool is_last = s.batch == last.batch && s.context == last.context;
    const double read = is_last ? last_read : time_read(memory, s);
    const double time = time_call<policy>(memory, s, 0);
    std::printf("%-34s %9.2f %9.2f %6.1f%%\n", name, time, read, 100 * read / time);
    std::fflush(stdout);
  };
  for (const int heads : {1, 2, 6, 8, 16}) {
    call_shape s = last;
    s.heads = heads;
    print(("B32 32k, " + std::to_string(heads) + " heads per KV head").c_str(), s);
  }
  for (const int tokens : {2, 4, 8}) {
    call_shape s = last;
    s.tokens = tokens;
    print(("B32 32k, " + std::to_string(tokens) + " query tokens").c_str(), s);
  }
  call_shape s = last;
  s.exact = 128;
  print("B32 32k, sink and tail of 128", s);
  s = {"B1 4k", 1, 4096, 4, 1, 128};
  print("B1 4k, sink and tail of 128", s);
  s = {"B8 4k", 8, 4096, 4, 1, 128};
  print("B8 4k, sink and tail of 128", s);
}
