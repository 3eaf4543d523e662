// What calls of the cache on a device leave that fail: the cache as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cache/file_walker.hpp"
#include "cuda/device_cache_scene.hpp"
#include "cuda/launch.hpp"
#include "kvarn/cuda/device_cache.hpp"
#include "support/failing_resource.hpp"

namespace {

using kvarn::sequence_id;
using kvarn_test::check;
using kvarn_test::device_array;
using kvarn_test::scene_kv_heads;
namespace cuda = kvarn::cuda;

class CudaCacheFailures : public testing::Test {
 protected:
  CudaCacheFailures() {
    scene_.config.bits = scene_.bits;
    scene_.config.memory = &memory_;
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&beside_, cudaStreamNonBlocking));
  }
  ~CudaCacheFailures() override {
    cudaDeviceSynchronize();
    cudaStreamDestroy(stream_);
    cudaStreamDestroy(beside_);
  }

  cuda::device_cache<float> make(const cuda::cache_launchers& launchers) const {
    return cuda::device_cache<float>::make(scene_.config, launchers).value();
  }
  static cuda::device_batch batch_of(int tokens) {
    return cuda::device_batch::make(2,
                                    {.sequences = 6, .tokens = tokens, .pages = 14, .tail = 9000})
        .value();
  }
  kvarn::status begin(cuda::device_cache<float>& cache, cuda::device_batch& batch,
                      const std::vector<sequence_id>& ids, int tokens) const {
    const cuda::batch_tensors tensors;
    return cache.begin(batch, ids, std::vector<int>(ids.size(), tokens), std::span(&tensors, 1),
                       stream_);
  }
  // The same numbers for the tokens of all layers, other ones at each call.
  void append(cuda::device_cache<float>& cache, const std::vector<sequence_id>& ids, int tokens) {
    auto batch = batch_of(tokens);
    const auto begun = begin(cache, batch, ids, tokens);
    ASSERT_TRUE(begun.ok()) << begun.message();
    write(cache, batch, static_cast<int>(ids.size()) * tokens);
    for (const sequence_id id : ids) ASSERT_TRUE(cache.commit(id).ok());
  }
  void write(cuda::device_cache<float>& cache, const cuda::device_batch& batch, int tokens) {
    const int key_dim = scene_.config.format.key_head_dim;
    const int value_dim = scene_.config.format.value_head_dim;
    std::vector<float> numbers(
        static_cast<std::size_t>(tokens * scene_kv_heads * std::max(key_dim, value_dim)));
    for (float& x : numbers) x = static_cast<float>(random_() % 1000) / 100.0f;
    const device_array<float> device_numbers(numbers);
    for (int layer = 0; layer < 2; ++layer)
      ASSERT_TRUE(cache
                      .append(batch, layer, device_numbers.data(), device_numbers.data(),
                              cuda::element_type::float32, {scene_kv_heads * key_dim, key_dim, 1},
                              {scene_kv_heads * value_dim, value_dim, 1}, stream_)
                      .ok());
    check(cudaStreamSynchronize(stream_));
  }
  std::string saved(cuda::device_cache<float>& cache, const std::vector<sequence_id>& ids) const {
    std::stringstream file;
    EXPECT_TRUE(cache.save(ids, file, stream_).ok());
    return file.str();
  }

  kvarn_test::device_cache_scene scene_ = kvarn_test::device_cache_scene_of(1);
  kvarn_test::failing_resource memory_;
  std::mt19937 random_{1};
  cudaStream_t stream_ = nullptr;
  cudaStream_t beside_ = nullptr;
};

TEST_F(CudaCacheFailures, OfAnAllocationChangeNothing) {
  auto cache = make(kvarn_test::cache_launchers());
  const std::vector<sequence_id> ids{cache.create().value(), cache.create().value()};
  append(cache, ids, 200);
  ASSERT_EQ(cache.seal(std::span(ids).first(1), 1, stream_).value(), 1);
  const sequence_id fork = cache.fork(ids[0]).value();
  auto batch = batch_of(300);
  const std::vector<sequence_id> all{ids[0], ids[1], fork};
  const auto fails_until_it_succeeds = [&](int least, const auto& call) {
    const std::string before = saved(cache, all);
    const auto pages = cache.free_pages();
    const auto exact = cache.memory().exact;
    int failures = 0;
    for (int allowed = 0;; ++allowed) {
      memory_.left = allowed;
      const kvarn::status done = call();
      memory_.left = 1 << 30;
      if (done.ok()) break;
      ++failures;
      ASSERT_EQ(done.code(), kvarn::error_code::out_of_memory) << done.message();
      ASSERT_TRUE(saved(cache, all) == before) << "after " << allowed << " allocations";
      ASSERT_EQ(cache.free_pages(), pages);
      for (const sequence_id id : all) ASSERT_EQ(cache.length(id, 0), cache.length(id));
      ASSERT_GE(cache.memory().exact, exact);
    }
    EXPECT_GE(failures, least);
  };
  fails_until_it_succeeds(5, [&] { return begin(cache, batch, all, 300); });
  write(cache, batch, 3 * 300);
  for (const sequence_id id : all) ASSERT_TRUE(cache.commit(id).ok());
  fails_until_it_succeeds(2, [&] { return cache.begin_seal(all, 2, stream_, beside_).why(); });
  // What only gives memory back takes none, whatever is under way.
  memory_.left = 0;
  EXPECT_TRUE(cache.truncate(ids[1], 40).ok());
  EXPECT_TRUE(cache.free(fork).ok());
  EXPECT_TRUE(cache.finish_seal(stream_).ok());
  EXPECT_TRUE(cache.drop_oldest(ids[0], 1).ok());
  EXPECT_TRUE(cache.clear(ids[0]).ok());
  EXPECT_TRUE(cache.free(ids[1]).ok());
  EXPECT_EQ(cache.memory().exact, 0u);
  EXPECT_EQ(cache.free_pages(), scene_.config.page_count);
  memory_.left = 1 << 30;
  append(cache, {ids[0]}, 300);  // all of it can be had again
}

// Launchers of which some call fails, behind one that takes long.
struct failing_encode {
  static inline int left = 0;
  static cuda::launch_status encode(const cuda::encode_arguments& a, cudaStream_t stream) {
    if (left-- == 0) return {cudaErrorUnknown, "as wanted"};
    check(cudaLaunchHostFunc(
        stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); },
        nullptr));
    return kvarn_test::cache_launchers().encode(a, stream);
  }
};

TEST_F(CudaCacheFailures, OfAnEncodingGiveBackPagesThatNobodyWrites) {
  auto launchers = kvarn_test::cache_launchers();
  launchers.encode = &failing_encode::encode;
  auto cache = make(launchers);
  const std::vector<sequence_id> ids{cache.create().value()};
  append(cache, ids, 200);
  const std::string before = saved(cache, ids);
  for (const int launched : {0, 1}) {  // of those of keys and values
    failing_encode::left = launched;
    const auto begun = cache.begin_seal(ids, 2, stream_, beside_);
    EXPECT_EQ(begun.why().code(), kvarn::error_code::device_failure);
    EXPECT_EQ(begun.why().message(), "sealing: as wanted");
    EXPECT_EQ(cudaStreamQuery(beside_), cudaSuccess) << "it still writes";
    EXPECT_EQ(cache.free_pages(), scene_.config.page_count);
    EXPECT_TRUE(cache.finish_seal(stream_).ok());  // of nothing
    EXPECT_TRUE(saved(cache, ids) == before);
  }
  failing_encode::left = 2;
  EXPECT_EQ(cache.seal(ids, 2, stream_).value(), 2);
}

// Not all old and new rows fit at once.
TEST_F(CudaCacheFailures, AreNotForLackOfMemoryThatMovedRowsLeave) {
  const int dims = scene_.config.format.key_head_dim + scene_.config.format.value_head_dim;
  const auto row = static_cast<std::size_t>(scene_kv_heads * dims) * sizeof(float);
  scene_.config.exact_memory = row * 3200;
  auto cache = make(kvarn_test::cache_launchers());
  std::vector<sequence_id> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(cache.create().value());
  append(cache, ids, 200);
  const std::size_t before = cache.memory().exact;
  const std::string file = saved(cache, ids);
  auto batch = batch_of(100);
  const auto begun = begin(cache, batch, ids, 100);
  ASSERT_TRUE(begun.ok()) << begun.message();
  EXPECT_GT(before + cache.memory().exact, scene_.config.exact_memory) << "it would have fitted";
  for (const sequence_id id : ids) ASSERT_TRUE(cache.truncate(id, 200).ok());
  EXPECT_TRUE(saved(cache, ids) == file);
}

// A sequence of a file can be longer than attention counts on a device.
TEST_F(CudaCacheFailures, OfPositionsThatAttentionDoesNotReach) {
  auto cache = make(kvarn_test::cache_launchers());
  const sequence_id id = cache.create().value();
  append(cache, {id}, 5);  // its sink
  std::string file = saved(cache, {id});
  for (const char* field : {"first", "length"}) {
    const kvarn_test::file_walker walker(file);
    file = walker.changed(walker.find("sequence"), walker.sequence.at(field),
                          static_cast<std::uint64_t>(cuda::max_distance) - 3);
  }
  std::stringstream stream(file);
  const sequence_id far = cache.restore(stream, stream_).value()[0];
  auto batch = batch_of(4);
  EXPECT_EQ(begin(cache, batch, {far}, 4).message(),
            "tokens of a sequence is 4; it has 1073741821; attention on a device takes at most "
            "1073741824");
  EXPECT_EQ(cache.length(far, 0), cuda::max_distance - 3);
  EXPECT_TRUE(begin(cache, batch, {far}, 3).ok());
}

}  // namespace
