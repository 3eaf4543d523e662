// Encoding, decoding and query moments on a GPU: time of one call in a graph, beside a copy that
// reads and writes the same bytes.
#include <cmath>
#include <cstring>

#include "kvarn/cuda/decode.cuh"
#include "kvarn/cuda/encode.cuh"
#include "kvarn/cuda/query_moments.cuh"
#include "support.cuh"

namespace {

using kvarn_bench::check;
using kvarn_bench::device_array;
namespace cuda = kvarn::cuda;

constexpr kvarn::cache_format format{};
constexpr int heads = 8;
constexpr int dim = 128;
constexpr int group = 128;
constexpr int pool_groups = 2048;  // 16384 tiles

void print(const char* name, const double (&times)[3]) {
  std::printf("%-36s %9.2f %9.2f %9.2f\n", name, times[0], times[1], times[2]);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_profile = argc > 1 && std::strcmp(argv[1], "profile") == 0;  // each call once
  const std::size_t group_numbers = std::size_t{heads} * group * dim;
  const device_array<std::uint16_t> tokens(pool_groups * group_numbers);
  kvarn_bench::normal_kernel<<<1024, 256>>>(tokens.data(), tokens.size(), 1);
  const std::size_t page_bytes = format.page_bytes(heads);
  const device_array<std::byte> pages(pool_groups * page_bytes);
  const device_array<float> sums(std::size_t{256} * dim * dim);
  const device_array<float> factors(std::size_t{256} * dim * dim);
  check(cudaMemset(sums.data(), 0, sums.size() * sizeof(float)));

  std::vector<cuda::encode_group> sources;
  std::vector<cuda::decode_group> targets;
  for (std::size_t i = 0; i < pool_groups; ++i) {
    sources.push_back(
        {tokens.data() + i * group_numbers, pages.data() + i * page_bytes, factors.data()});
    targets.push_back({pages.data() + i * page_bytes, tokens.data() + i * group_numbers, group});
  }
  const device_array<cuda::encode_group> source_table(sources);
  const device_array<cuda::decode_group> target_table(targets);
  const int tile_counts[3] = {16, 256, 4096};
  const auto over_counts = [&](const auto& call, double(&times)[3]) {
    for (int k = 0; k < 3; ++k) {
      const int groups = tile_counts[k] / heads;
      if (is_profile) {
        if (k == 2) call(0, groups, nullptr);
        check(cudaDeviceSynchronize());
        continue;
      }
      const int calls = tile_counts[k] <= 16 ? 256 : tile_counts[k] <= 256 ? 64 : 4;
      times[k] = kvarn_bench::graph_time(calls, [&](int i, cudaStream_t stream) {
        call(i * groups % (pool_groups - groups + 1), groups, stream);
      });
    }
  };

  std::vector<cuda::observed_queries> observed;
  for (int i = 0; i < 32; ++i)  // 4 query heads of 128 tokens for each of 8 KV heads
    observed.push_back({tokens.data() + std::size_t(i) * 4 * group_numbers,
                        sums.data() + std::size_t(i) * heads * dim * dim, group});
  const device_array<cuda::observed_queries> observed_table(observed);
  const auto observe = [&](int kv_heads, cudaStream_t stream) {
    check(cuda::observe({.head_dim = dim,
                         .strides = {4 * heads * dim, dim, 1},
                         .kv_heads = heads,
                         .heads = 4,
                         .sequences = observed_table.data(),
                         .count = kv_heads / heads},
                        stream));
  };
  const auto factorize = [&](int kv_heads, cudaStream_t stream) {
    check(cuda::factorize(
        {.head_dim = dim, .sums = sums.data(), .factors = factors.data(), .count = kv_heads},
        stream));
  };
  observe(256, nullptr);
  factorize(256, nullptr);
  check(cudaDeviceSynchronize());

  std::printf("D = G = 128, 2 bits, FP16; microseconds per call\n");
  std::printf("%-36s %9s %9s %9s\n", "tiles", "16", "256", "4096");
  double times[3] = {};
  over_counts(
      [&](int first, int groups, cudaStream_t stream) {
        kvarn_bench::copy_kernel<<<std::min(groups * heads, 1056), 256, 0, stream>>>(
            reinterpret_cast<const uint4*>(tokens.data() + first * group_numbers),
            groups * group_numbers / 8, reinterpret_cast<uint4*>(pages.data() + first * page_bytes),
            groups * page_bytes / 32);
      },
      times);
  print("copy: FP16 tokens in, a record out", times);
  for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value})
    for (const auto method :
         {kvarn::encoder::tuned, kvarn::encoder::query_aware, kvarn::encoder::paper}) {
      const bool is_key = kind == kvarn::tile_kind::key;
      if (!is_key && method == kvarn::encoder::query_aware) continue;
      over_counts(
          [&](int first, int groups, cudaStream_t stream) {
            check(cuda::encode({.format = format,
                                .kind = kind,
                                .method = method,
                                .strides = {heads * dim, dim, 1},
                                .kv_heads = heads,
                                .groups = source_table.data() + first,
                                .count = groups},
                               stream));
          },
          times);
      const std::string name = std::string("encode ") + (is_key ? "keys" : "values") +
                               (method == kvarn::encoder::tuned         ? ", tuned"
                                : method == kvarn::encoder::query_aware ? ", query_aware"
                                                                        : ", paper");
      print(name.c_str(), times);
    }
  over_counts(
      [&](int first, int groups, cudaStream_t stream) {
        kvarn_bench::copy_kernel<<<std::min(groups * heads, 1056), 256, 0, stream>>>(
            reinterpret_cast<const uint4*>(pages.data() + first * page_bytes),
            groups * page_bytes / 32,
            reinterpret_cast<uint4*>(tokens.data() + first * group_numbers),
            groups * group_numbers / 8);
      },
      times);
  print("copy: a record in, FP16 tokens out", times);
  for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value})
    for (const bool rotate_back : {true, false}) {
      over_counts(
          [&](int first, int groups, cudaStream_t stream) {
            check(cuda::decode({.format = format,
                                .kind = kind,
                                .strides = {heads * dim, dim, 1},
                                .rotate_back = rotate_back,
                                .kv_heads = heads,
                                .groups = target_table.data() + first,
                                .count = groups},
                               stream));
          },
          times);
      const std::string name = std::string("decode ") +
                               (kind == kvarn::tile_kind::key ? "keys" : "values") +
                               (rotate_back ? ", rotated back" : ", as stored");
      print(name.c_str(), times);
    }
  std::printf("%-36s %9s %9s %9s\n", "KV heads, 4 x 128 queries each", "8", "64", "256");
  double moment[3] = {};
  double factor[3] = {};
  for (int k = 0; k < 3; ++k) {
    const int n = k == 0 ? 8 : k == 1 ? 64 : 256;
    if (is_profile) break;
    moment[k] = kvarn_bench::graph_time(16, [&](int, cudaStream_t s) { observe(n, s); });
    factor[k] = kvarn_bench::graph_time(16, [&](int, cudaStream_t s) { factorize(n, s); });
  }
  print("query moments", moment);
  print("factors", factor);
}
