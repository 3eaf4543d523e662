// Attention on the device where only the call is out of the ordinary: a million tokens, pages far
// into the pool, a graph of two streams.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/attention_formats.hpp"
#include "support/attention_scenes.hpp"

namespace {

using kvarn::cache_format;
using kvarn_test::check;
using kvarn_test::device_array;
namespace cuda = kvarn::cuda;

// A sequence with one KV head whose pages are repeated: every token counts `repeats` times, which
// changes no output and adds log(repeats) to the log of the sum.
struct repeated_call {
  std::vector<float> out;
  std::vector<float> lse;
};

// Pages stand from page `first_page` on in a pool that ends behind them.
// `launch`: given a call, makes it.
template <class Launch>
repeated_call attend_repeated(const std::vector<kvarn_test::made_record>& records, int repeats,
                              std::int64_t first_page, const std::vector<float>& queries,
                              int splits, Launch launch) {
  const cache_format format = kvarn_test::attention_formats[0];
  const std::size_t page_bytes = format.page_bytes(1);
  const auto groups = static_cast<int>(records.size() / 2);
  const device_array<std::byte> pages((static_cast<std::size_t>(first_page) + records.size() / 2) *
                                      page_bytes);
  std::vector<cuda::page_entry> table;
  for (int g = 0; g < groups * repeats; ++g)
    table.push_back({std::int64_t{g} * format.group,
                     static_cast<std::int32_t>(first_page + g % groups), format.group});
  for (int g = 0; g < groups; ++g) {
    std::byte* const page =
        pages.data() +
        (static_cast<std::size_t>(first_page) + static_cast<std::size_t>(g)) * page_bytes;
    for (int kind = 0; kind < 2; ++kind) {
      const auto& record = records[static_cast<std::size_t>(2 * g + kind)];
      check(cudaMemcpy(page + (kind == 0 ? format.key_offset(0) : format.value_offset(0)),
                       record.data(), record.bytes.size() - 1, cudaMemcpyHostToDevice));
    }
  }
  const device_array<cuda::page_entry> device_table(table);
  const device_array<float> device_queries(queries);
  const device_array<float> out(4 * 128, 0xff);
  const device_array<float> lse(4, 0xff);
  cuda::attention_sequence sequence;
  sequence.queries = device_queries.data();
  sequence.out = out.data();
  sequence.lse = lse.data();
  sequence.position = std::int64_t{groups} * repeats * format.group - 1;
  sequence.page_count = groups * repeats;
  sequence.pages = device_table.data();
  const device_array<cuda::attention_sequence> list(
      std::vector<cuda::attention_sequence>{sequence});
  cuda::attention_arguments a;
  a.heads = 4;
  a.query_type = a.out_type = cuda::element_type::float32;
  a.query_strides = a.out_strides = {4 * 128, 128, 1};
  a.softmax_scale = 0.08f;
  a.pages = pages.data();
  a.sequences = list.data();
  a.count = 1;
  a.max_pages = sequence.page_count;
  a.splits = splits;
  const auto functions = kvarn_test::attention_of<0>();
  const device_array<std::byte> workspace(functions.workspace_bytes(a), 0xff);
  a.workspace = workspace.data();
  launch([&](cudaStream_t stream) { check(functions.launch(a, stream)); });
  kvarn_test::synchronize();
  return {out.to_host(), lse.to_host()};
}

repeated_call attend_repeated(const std::vector<kvarn_test::made_record>& records, int repeats,
                              std::int64_t first_page, const std::vector<float>& queries,
                              int splits) {
  return attend_repeated(records, repeats, first_page, queries, splits,
                         [](const auto& attend) { attend(nullptr); });
}

std::vector<kvarn_test::made_record> records_of(int groups) {
  const cache_format format = kvarn_test::attention_formats[0];
  std::vector<kvarn_test::made_record> records;
  for (int g = 0; g < groups; ++g) {
    records.emplace_back(format.key_layout(), 1000 + static_cast<std::uint64_t>(2 * g));
    records.emplace_back(format.value_layout(), 1001 + static_cast<std::uint64_t>(2 * g));
  }
  return records;
}

TEST(CudaAttentionCalls, MillionTokens) {
  const auto records = records_of(64);
  const auto queries = kvarn_test::numbers<float>(4 * 128, 5);
  const repeated_call once = attend_repeated(records, 1, 0, queries, 0);
  const repeated_call many = attend_repeated(records, 128, 0, queries, 0);
  const repeated_call serial = attend_repeated(records, 128, 0, queries, 1);
  EXPECT_EQ(std::memcmp(many.out.data(), serial.out.data(), many.out.size() * sizeof(float)), 0);
  const double error = kvarn_test::relative_error(many.out, once.out);
  EXPECT_LE(error, 1e-5);
  EXPECT_GT(error, 0.0);
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_NEAR(many.lse[i], once.lse[i] + std::log(128.0f), 1e-4);
}

TEST(CudaAttentionCalls, PagesBeyondTwoGigabytes) {
  const auto records = records_of(9);
  const auto queries = kvarn_test::numbers<float>(4 * 128, 6);
  const repeated_call low = attend_repeated(records, 1, 0, queries, 0);
  const repeated_call high =
      attend_repeated(records, 1, (std::int64_t{5} << 30) / 9216, queries, 0);
  EXPECT_EQ(std::memcmp(low.out.data(), high.out.data(), low.out.size() * sizeof(float)), 0);
}

// Kernels are started before the one in front of them has ended, also across streams that a graph
// joins: a call between two others that use the same workspace and output.
TEST(CudaAttentionCalls, CallsInAGraphOfTwoStreams) {
  const auto records = records_of(9);
  const auto queries = kvarn_test::numbers<float>(4 * 128, 7);
  const repeated_call plain = attend_repeated(records, 4, 0, queries, 0);
  const auto capture_and_run = [](const auto& attend) {
    cudaStream_t first = nullptr;
    cudaStream_t second = nullptr;
    cudaEvent_t forked = nullptr;
    cudaEvent_t joined = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    for (cudaStream_t* stream : {&first, &second})
      check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&forked, &joined})
      check(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    check(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal));
    attend(first);
    check(cudaEventRecord(forked, first));
    check(cudaStreamWaitEvent(second, forked));
    attend(second);
    check(cudaEventRecord(joined, second));
    check(cudaStreamWaitEvent(first, joined));
    attend(first);
    check(cudaStreamEndCapture(first, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(executable, first));
    check(cudaStreamSynchronize(first));
    check(cudaGraphExecDestroy(executable));
    check(cudaGraphDestroy(graph));
    for (cudaEvent_t event : {forked, joined}) check(cudaEventDestroy(event));
    for (cudaStream_t stream : {first, second}) check(cudaStreamDestroy(stream));
  };
  const repeated_call graph = attend_repeated(records, 4, 0, queries, 0, capture_and_run);
  EXPECT_EQ(std::memcmp(plain.out.data(), graph.out.data(), plain.out.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(plain.lse.data(), graph.lse.data(), plain.lse.size() * sizeof(float)), 0);
}

}  // namespace
