// The cache on a device against the cache on the host: both are driven by the same random
// operations; their files must be equal to the byte, and attention equal within its error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda/attention_formats.hpp"
#include "cuda/device_cache_scene.hpp"
#include "kvarn/cache/cache_file.hpp"
#include "kvarn/cache/kv_cache.hpp"
#include "kvarn/cuda/device_cache.hpp"
#include "support/attention_scenes.hpp"

namespace {

using kvarn::sequence_id;
using kvarn_test::check;
using kvarn_test::device_array;
namespace cuda = kvarn::cuda;

constexpr int kv_heads = kvarn_test::scene_kv_heads;
constexpr double largest_error = 1.5e-3;

const auto& attention_of(const kvarn::cache_format& format) {
  static const kvarn_test::attention_functions all[] = {
      kvarn_test::attention_of<0>(), kvarn_test::attention_of<3>(), kvarn_test::attention_of<7>()};
  for (const auto& [index, place] : {std::pair{0, 0}, std::pair{3, 1}, std::pair{7, 2}})
    if (kvarn_test::attention_formats[index] == format) return all[place];
  // Exact layers: any with their head dimensions.
  return all[format.key_head_dim == 128 ? 0 : 1];
}

struct run_counts {
  int sealed = 0, cancelled = 0, forks = 0, cut = 0, restored = 0, shifts = 0, refused = 0,
      attended = 0, cleared = 0;
};

template <class T>
class pair_driver {
 public:
  pair_driver(int kind, unsigned seed, run_counts& counts, bool query_aware = false)
      : scene_(kvarn_test::device_cache_scene_of(kind)), random_(seed), counts_(counts) {
    scene_.config.bits = scene_.bits;
    if (query_aware) {
      scene_.config.method = kvarn::encoder::query_aware;
      const auto& c = scene_.config;
      kvarn::query_moments moments(c.layers, kv_heads, c.format.key_head_dim);
      for (int layer = 0; layer < c.layers; ++layer) {
        const auto q = numbers(7 * c.query_heads * c.format.key_head_dim);
        moments.add(layer, kvarn::token_major(q.data(), c.query_heads, c.format.key_head_dim), 7,
                    c.query_heads);
      }
      factors_ = std::make_unique<kvarn::query_factors>(moments);
    }
    host_ = std::make_unique<kvarn::kv_cache<T>>(
        kvarn::kv_cache<T>::make(scene_.config, factors_.get()).value());
    device_ = std::make_unique<cuda::device_cache<T>>(
        cuda::device_cache<T>::make(scene_.config, kvarn_test::cache_launchers(), factors_.get())
            .value());
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking));
  }
  ~pair_driver() {
    cudaDeviceSynchronize();
    cudaStreamDestroy(stream_);
    cudaStreamDestroy(other_);
  }

  void run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
      step();
      compare();
    }
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  std::vector<float> numbers(int count) {
    std::normal_distribution<float> normal;
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& x : out) x = normal(random_);
    if (count > 0 && below(10) == 0) out[0] = std::nanf("");
    return out;
  }
  sequence_id any() {
    return live_[static_cast<std::size_t>(below(static_cast<int>(live_.size())))];
  }

  void step() {
    const int operation = below(16);
    if (live_.empty() || operation == 0) return create();
    const sequence_id id = any();
    switch (operation) {
      case 1:
        return fork(id);
      case 2:
        if (below(2) == 0) return free(id);
        return both_clear(id);
      case 3:
      case 4:
        return truncate(id);
      case 5:
      case 6:
        return seal();
      case 7:
        return begin_or_finish();
      case 8:
        return restore();
      case 9:
        return drop(id);
      default:
        return append();
    }
  }

  void create() {
    const auto host = host_->create();
    const auto device = device_->create();
    ASSERT_EQ(host.ok(), device.ok());
    if (!host.ok()) return;
    ASSERT_EQ(host.value(), device.value());
    live_.push_back(host.value());
  }
  void forget_pending(sequence_id id, std::int64_t position) {
    for (auto& p : pending_)
      if (p.id == id && p.end > position && p.tiles > 0) {
        p.tiles = 0;
        ++counts_.cancelled;
      }
  }
  void fork(sequence_id id) {
    const std::int64_t position =
        below(3) == 0 ? below(static_cast<int>(host_->length(id)) + 1) : -1;
    const auto host = host_->fork(id, position);
    const auto device = device_->fork(id, position);
    ASSERT_EQ(host.ok(), device.ok());
    if (!host.ok()) return;
    ASSERT_EQ(host.value(), device.value());
    live_.push_back(host.value());
    ++counts_.forks;
  }
  void free(sequence_id id) {
    ASSERT_TRUE(host_->free(id).ok());
    ASSERT_TRUE(device_->free(id).ok());
    std::erase(live_, id);
    forget_pending(id, -1);
  }
  void both_clear(sequence_id id) {
    ASSERT_TRUE(host_->clear(id).ok());
    ASSERT_TRUE(device_->clear(id).ok());
    forget_pending(id, -1);
    ++counts_.cleared;
  }
  void truncate(sequence_id id) {
    const auto length = static_cast<int>(host_->length(id, 0));
    const std::int64_t position =
        below(2) == 0 ? below(length + 1) : std::max(0, length - below(30));
    ASSERT_TRUE(host_->truncate(id, position).ok());
    ASSERT_TRUE(device_->truncate(id, position).ok());
    forget_pending(id, position);
    ++counts_.cut;
  }
  void drop(sequence_id id) {
    const auto pages = static_cast<int>(host_->table().pages(id).size());
    const int count = below(pages + 1);
    ASSERT_TRUE(host_->drop_oldest(id, count).ok());
    ASSERT_TRUE(device_->drop_oldest(id, count).ok());
    counts_.shifts += count;
  }
  void seal() {
    if (!pending_.empty()) return;
    const int most = 1 + below(3);
    for (const sequence_id id : std::vector(live_)) {
      const auto host = host_->seal(id, most, workspace_);
      const auto device = device_->seal(std::span(&id, 1), most, stream_);
      ASSERT_EQ(host.ok(), device.ok()) << device.why().message();
      if (!host.ok()) {
        EXPECT_EQ(host.why().message(), device.why().message());
        ++counts_.refused;
        continue;
      }
      ASSERT_EQ(host.value(), device.value());
      counts_.sealed += host.value();
    }
  }
  // A sealing beside other operations.
  void begin_or_finish() {
    if (!pending_.empty()) {
      const auto before = pending_;
      ASSERT_TRUE(device_->finish_seal(stream_).ok());
      pending_.clear();
      for (const auto& p : before)
        if (p.tiles > 0) {
          ASSERT_EQ(host_->seal(p.id, p.tiles, workspace_).value(), p.tiles);
        }
      return;
    }
    std::vector<pending> begun;
    std::int64_t total = 0;
    for (const sequence_id id : live_) {
      const auto tiles = static_cast<int>(std::min<std::int64_t>(host_->sealable(id), 2));
      if (tiles == 0) continue;
      total += tiles;
      begun.push_back(
          {id, tiles,
           host_->table().sealed_end(id) + std::int64_t{tiles} * scene_.config.format.group});
    }
    const auto device = device_->begin_seal(live_, 2, stream_, other_);
    ASSERT_EQ(device.ok(), total <= host_->free_pages()) << device.why().message();
    if (!device.ok()) return;
    ASSERT_EQ(device.value(), total);
    EXPECT_EQ(device_->begin_seal(live_, 2, stream_, other_).ok(), total == 0);
    pending_ = begun;
    counts_.sealed += static_cast<int>(total);
  }
  void restore() {
    if (!pending_.empty()) return;
    const std::vector<sequence_id> ids = {any()};
    std::stringstream of_host;
    std::stringstream of_device;
    ASSERT_TRUE(save_sequences(*host_, ids, of_host).ok());
    ASSERT_TRUE(device_->save(ids, of_device, stream_).ok());
    ASSERT_EQ(of_host.str(), of_device.str());
    // Each from the other's file.
    const auto device = device_->restore(of_host, stream_);
    const auto host = restore_sequences(*host_, of_device);
    ASSERT_EQ(host.ok(), device.ok());
    if (!host.ok()) {
      EXPECT_EQ(host.why().message(), device.why().message());
      ++counts_.refused;
      return;
    }
    ASSERT_EQ(host.value(), device.value());
    live_.push_back(host.value()[0]);
    ++counts_.restored;
  }

  void append() {
    const kvarn::cache_config& c = scene_.config;
    std::vector<sequence_id> ids = live_;
    std::shuffle(ids.begin(), ids.end(), random_);
    ids.resize(1 + random_() % ids.size());
    std::vector<int> tokens;
    const bool is_long = below(3) == 0;
    int total = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      tokens.push_back(is_long ? below(300) : 1 + below(5));
      total += tokens.back();
    }
    const int key_dim = c.format.key_head_dim;
    const int value_dim = c.format.value_head_dim;
    const auto queries = numbers(total * c.query_heads * key_dim);
    const auto out_floats = static_cast<std::size_t>(total * c.query_heads * value_dim);
    const auto lse_floats = static_cast<std::size_t>(total * c.query_heads);
    const device_array<float> device_queries(queries);
    const device_array<float> out(out_floats, 0xff);
    const device_array<float> lse(lse_floats, 0xff);
    auto batch = cuda::device_batch::make(c.layers, {.sequences = 6,
                                                     .tokens = 300,
                                                     .pages = 14,
                                                     .tail = 100000,
                                                     .query_type = cuda::element_type::float32,
                                                     .out_type = cuda::element_type::float32})
                     .value();
    const cuda::batch_tensors tensors{device_queries.data(), out.data(), lse.data()};
    const auto begun = device_->begin(batch, ids, tokens, std::span(&tensors, 1), stream_);
    ASSERT_TRUE(begun.ok()) << begun.message();
    for (int layer = 0; layer < c.layers; ++layer) {
      const auto keys = numbers(total * kv_heads * key_dim);
      const auto values = numbers(total * kv_heads * value_dim);
      const device_array<float> device_keys(keys);
      const device_array<float> device_values(values);
      ASSERT_TRUE(device_
                      ->append(batch, layer, device_keys.data(), device_values.data(),
                               cuda::element_type::float32, {kv_heads * key_dim, key_dim, 1},
                               {kv_heads * value_dim, value_dim, 1}, stream_)
                      .ok());
      std::ptrdiff_t first = 0;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const auto own_keys = kvarn::token_major(keys.data(), kv_heads, key_dim);
        const auto own_values = kvarn::token_major(values.data(), kv_heads, value_dim);
        ASSERT_TRUE(host_
                        ->append(ids[i], layer, own_keys.from(static_cast<int>(first)),
                                 own_values.from(static_cast<int>(first)), tokens[i])
                        .ok());
        first += tokens[i];
      }
      if (!is_long) compare_attention(batch, layer, ids, tokens, queries, out, lse);
      check(cudaStreamSynchronize(stream_));
    }
    if (below(4) == 0) return;  // drafts
    for (const sequence_id id : ids) {
      ASSERT_TRUE(host_->commit(id).ok());
      ASSERT_TRUE(device_->commit(id).ok());
    }
  }

  void compare_attention(const cuda::device_batch& batch, int layer,
                         const std::vector<sequence_id>& ids, const std::vector<int>& tokens,
                         const std::vector<float>& queries, const device_array<float>& device_out,
                         const device_array<float>& device_lse) {
    const kvarn::cache_config& c = scene_.config;
    const int key_dim = c.format.key_head_dim;
    const int value_dim = c.format.value_head_dim;
    auto a = device_->attention(batch, layer);
    a.softmax_scale = 0.1f;
    a.max_tokens = 5;
    const auto& functions = attention_of(device_->format(layer));
    const device_array<std::byte> workspace(functions.workspace_bytes(a), 0xff);
    a.workspace = workspace.data();
    check(functions.launch(a, stream_));
    check(cudaStreamSynchronize(stream_));
    const auto out = device_out.to_host();
    const auto lse = device_lse.to_host();
    std::vector<float> expected(out.size());
    std::vector<float> expected_lse(lse.size());
    int first = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const kvarn::cache_queries<float, float> q{
          kvarn::token_major(queries.data(), c.query_heads, key_dim).from(first),
          kvarn::token_major(expected.data(), c.query_heads, value_dim).from(first), tokens[i],
          expected_lse.data() + first * c.query_heads};
      ASSERT_TRUE(host_->attend(ids[i], layer, q, {.softmax_scale = 0.1f}, workspace_).ok());
      first += tokens[i];
    }
    EXPECT_LE(kvarn_test::relative_error(out, expected), largest_error) << "layer " << layer;
    for (std::size_t i = 0; i < lse.size(); ++i)
      EXPECT_NEAR(lse[i], expected_lse[i], 3e-4 * (10 + std::fabs(expected_lse[i])));
    ++counts_.attended;
  }

  void compare() {
    for (const sequence_id id : live_) {
      for (int layer = 0; layer < scene_.config.layers; ++layer)
        ASSERT_EQ(host_->table().extent(id, layer), device_->table().extent(id, layer));
      ASSERT_EQ(host_->length(id), device_->length(id));
    }
    if (pending_.empty()) {
      ASSERT_EQ(host_->free_pages(), device_->free_pages());
    }
    std::stringstream of_host;
    std::stringstream of_device;
    ASSERT_TRUE(save_sequences(*host_, live_, of_host).ok());
    const auto saved = device_->save(live_, of_device, stream_);
    ASSERT_TRUE(saved.ok()) << saved.message();
    const std::string host = of_host.str();
    const std::string device = of_device.str();
    const auto place = std::mismatch(host.begin(), host.end(), device.begin(), device.end());
    ASSERT_TRUE(host == device) << "stored bytes differ from byte " << place.first - host.begin()
                                << " of " << host.size() << " and " << device.size() << " on";
  }

  struct pending {
    sequence_id id;
    int tiles;
    std::int64_t end;
  };

  kvarn_test::device_cache_scene scene_;
  std::mt19937 random_;
  run_counts& counts_;
  std::unique_ptr<kvarn::query_factors> factors_;
  std::unique_ptr<kvarn::kv_cache<T>> host_;
  std::unique_ptr<cuda::device_cache<T>> device_;
  kvarn::cache_workspace workspace_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t other_ = nullptr;
  std::vector<sequence_id> live_;
  std::vector<pending> pending_;
};

TEST(CudaCache, RandomOperations) {
  run_counts counts;
  for (unsigned seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int kind = static_cast<int>(seed % 2);
    switch (seed % 6) {
      case 4:
        pair_driver<kvarn::bfloat16>(kind, seed, counts).run(60);
        break;
      case 5:
        pair_driver<float>(kind, seed, counts).run(60);
        break;
      default:
        pair_driver<kvarn::float16>(kind, seed, counts, seed % 6 == 3).run(60);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(counts.sealed, 100);
  EXPECT_GT(counts.cancelled, 3);
  EXPECT_GT(counts.forks, 20);
  EXPECT_GT(counts.cut, 50);
  EXPECT_GT(counts.restored, 10);
  EXPECT_GT(counts.shifts, 5);
  EXPECT_GT(counts.refused, 5);
  EXPECT_GT(counts.attended, 100);
  EXPECT_GT(counts.cleared, 5);
}

// One captured step, run again while sequences grow, are sealed and move to other memory.
TEST(CudaCache, StepsInAGraph) {
  auto s = kvarn_test::device_cache_scene_of(0);
  s.bits = {{2, 2}, {2, 2}};
  s.config.layers = 2;
  s.config.bits = s.bits;
  auto host = kvarn::kv_cache<>::make(s.config).value();
  auto device = cuda::device_cache<>::make(s.config, kvarn_test::cache_launchers()).value();
  cudaStream_t stream = nullptr;
  cudaStream_t beside = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  constexpr int sequences = 3;
  constexpr int dim = 128;
  constexpr int query_heads = kv_heads * kvarn_test::scene_heads;
  std::vector<sequence_id> ids;
  for (int i = 0; i < sequences; ++i) {
    ids.push_back(host.create().value());
    ASSERT_EQ(device.create().value(), ids.back());
  }
  auto batch =
      cuda::device_batch::make(2, {.sequences = sequences, .pages = 6, .tail = 300}).value();
  const device_array<kvarn::float16> keys(sequences * kv_heads * dim, 0);
  const device_array<kvarn::float16> values(sequences * kv_heads * dim, 0);
  const device_array<kvarn::float16> queries(sequences * query_heads * dim, 0);
  const device_array<kvarn::float16> out(sequences * query_heads * dim, 0);
  const cuda::batch_tensors tensors{queries.data(), out.data(), nullptr};
  const auto& functions = attention_of(s.config.format);
  auto a = device.attention(batch, 0);
  const device_array<std::byte> workspace(functions.workspace_bytes(a), 0xff);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t steps = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(device
                    .append(batch, layer, keys.data(), values.data(), cuda::element_type::float16,
                            {kv_heads * dim, dim, 1}, {kv_heads * dim, dim, 1}, stream)
                    .ok());
    a = device.attention(batch, layer);
    a.softmax_scale = 0.09f;
    a.workspace = workspace.data();
    check(functions.launch(a, stream));
  }
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&steps, graph, 0));
  kvarn::cache_workspace host_workspace;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  bool is_sealing = false;
  int sealed = 0;
  for (int step = 0; step < 500; ++step) {
    const auto fill = [&](const device_array<kvarn::float16>& to) {
      std::vector<kvarn::float16> x;
      for (std::size_t i = 0; i < to.size(); ++i) x.emplace_back(normal(random));
      check(cudaMemcpy(to.data(), x.data(), to.bytes(), cudaMemcpyHostToDevice));
      return x;
    };
    const auto k = fill(keys);
    const auto v = fill(values);
    const auto q = fill(queries);
    // The last sequence takes every other step only.
    const std::vector<int> tokens(static_cast<std::size_t>(step % 2 == 0 ? 3 : 2), 1);
    const std::span<const sequence_id> now(ids.data(), tokens.size());
    const auto begun = device.begin(batch, now, tokens, std::span(&tensors, 1), stream);
    ASSERT_TRUE(begun.ok()) << begun.message();
    check(cudaGraphLaunch(steps, stream));
    check(cudaStreamSynchronize(stream));
    const auto result = out.to_host();
    double error = 0;
    double size = 0;
    for (std::size_t i = 0; i < now.size(); ++i) {
      std::vector<float> expected(query_heads * dim);
      for (int layer = 0; layer < 2; ++layer) {
        ASSERT_TRUE(
            host.append(now[i], layer,
                        kvarn::token_major(k.data(), kv_heads, dim).from(static_cast<int>(i)),
                        kvarn::token_major(v.data(), kv_heads, dim).from(static_cast<int>(i)), 1)
                .ok());
        const kvarn::cache_queries<kvarn::float16, float> call{
            kvarn::token_major(q.data(), query_heads, dim).from(static_cast<int>(i)),
            kvarn::token_major(expected.data(), query_heads, dim)};
        ASSERT_TRUE(
            host.attend(now[i], layer, call, {.softmax_scale = 0.09f}, host_workspace).ok());
      }
      for (std::size_t d = 0; d < expected.size(); ++d) {
        const double x = static_cast<double>(expected[d]);
        const double e =
            static_cast<double>(static_cast<float>(result[i * expected.size() + d])) - x;
        error += e * e;
        size += x * x;
      }
      ASSERT_TRUE(host.commit(now[i]).ok());
      ASSERT_TRUE(device.commit(now[i]).ok());
    }
    ASSERT_LE(std::sqrt(error / size), 2 * largest_error) << "step " << step;
    if (is_sealing) {
      ASSERT_TRUE(device.finish_seal(stream).ok());
      for (const sequence_id id : ids) sealed += host.seal(id, 1, host_workspace).value();
    }
    if (!is_sealing || step % 2 == 0)
      is_sealing = device.begin_seal(ids, 1, stream, beside).value() > 0;
    else
      is_sealing = false;
  }
  EXPECT_GE(sealed, 7);
  check(cudaDeviceSynchronize());
  check(cudaGraphExecDestroy(steps));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  check(cudaStreamDestroy(beside));
}

TEST(CudaCache, SaysWhatItCannotTake) {
  auto s = kvarn_test::device_cache_scene_of(1);
  s.config.bits = s.bits;
  const auto launchers = kvarn_test::cache_launchers();
  const auto message_of = [](const auto& result) { return result.why().message(); };
  s.config.exact_memory = 0;
  EXPECT_NE(message_of(cuda::device_cache<>::make(s.config, launchers)).find("exact_memory is 0"),
            std::string::npos);
  s.config.exact_memory = std::size_t{1} << 20;
  EXPECT_NE(message_of(cuda::device_cache<>::make(s.config, {})).find("launcher"),
            std::string::npos);
  s.config.method = kvarn::encoder::query_aware;
  EXPECT_NE(message_of(cuda::device_cache<>::make(s.config, launchers)).find("query factors"),
            std::string::npos);
  s.config.method = kvarn::encoder::tuned;
  auto cache = cuda::device_cache<>::make(s.config, launchers).value();
  const sequence_id id = cache.create().value();
  auto batch = cuda::device_batch::make(2, {.sequences = 2, .tokens = 1000, .tail = 900}).value();
  const cuda::batch_tensors tensors;
  const auto begin = [&](std::vector<sequence_id> ids, std::vector<int> tokens) {
    return cache.begin(batch, ids, tokens, std::span(&tensors, 1), nullptr);
  };
  EXPECT_NE(begin({id, id}, {1, 1}).message().find("given twice"), std::string::npos);
  EXPECT_NE(begin({id}, {1001}).message().find("1001"), std::string::npos);
  EXPECT_NE(begin({id}, {950}).message().find("tail of a sequence is 945"), std::string::npos);
  EXPECT_NE(begin({{5, 5}}, {1}).message().find("slot 5"), std::string::npos);
  const auto full = begin({id}, {900});  // of 768 bytes in each of two layers
  EXPECT_EQ(full.code(), kvarn::error_code::short_buffer) << full.message();
  EXPECT_EQ(cache.length(id, 0), 0);
  EXPECT_TRUE(begin({id}, {300}).ok());
  EXPECT_EQ(cuda::device_batch::make(2, {.sequences = 0}).why().code(),
            kvarn::error_code::invalid_argument);
  EXPECT_EQ(message_of(cuda::device_batch::make(2, {.tail = 1 << 30})),
            "bounds are 1 sequences (1 to 65535), 1 tokens (at least 1), 0 pages, a list of 0, a "
            "tail of 1073741824 (0 to 1073741823, the others not negative)");
  check(cudaDeviceSynchronize());
}

}  // namespace
