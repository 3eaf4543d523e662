// Counts whose products are beyond what a launch takes are refused, by both numbers. Nothing is
// launched here.
#include <gtest/gtest.h>

#include <string>

#include "cuda/attention_formats.hpp"
#include "cuda/launch.hpp"

namespace {

namespace cuda = kvarn::cuda;

constexpr int many = 1 << 16;
const std::string beyond = "; their product must be at most 2147483647";

// Memory that no kernel sees.
template <class T>
T* somewhere() {
  alignas(16) static std::byte bytes[16];
  return reinterpret_cast<T*>(bytes);
}

void expect_refused(const cuda::launch_status& launched, const std::string& message) {
  EXPECT_EQ(launched.code, cudaErrorInvalidValue);
  EXPECT_EQ(launched.message, message);
}

TEST(CudaLimits, OfGroupsAndHeads) {
  cuda::encode_arguments encode;
  encode.groups = somewhere<cuda::encode_group>();
  encode.kv_heads = many;
  encode.count = many / 2;
  expect_refused(kvarn_test::launch(encode, nullptr), "count is 32768, kv_heads 65536" + beyond);
  cuda::decode_arguments decode;
  decode.groups = somewhere<cuda::decode_group>();
  decode.kv_heads = many;
  decode.count = many;
  expect_refused(kvarn_test::launch(decode, nullptr), "count is 65536, kv_heads 65536" + beyond);
}

TEST(CudaLimits, OfQueriesToObserve) {
  cuda::observe_arguments observe;
  observe.sequences = somewhere<cuda::observed_queries>();
  observe.kv_heads = many;
  observe.count = many;
  expect_refused(kvarn_test::launch(observe, nullptr), "count is 65536, kv_heads 65536" + beyond);
  observe.count = -1;
  expect_refused(kvarn_test::launch(observe, nullptr), "count is -1; it must not be negative");
  cuda::factor_arguments factor;
  factor.count = -1;
  expect_refused(kvarn_test::launch(factor, nullptr), "count is -1; it must not be negative");
}

TEST(CudaLimits, OfTokensToAppend) {
  cuda::append_arguments append;
  append.sequences = somewhere<cuda::append_sequence>();
  append.count = 1;
  append.kv_heads = 1024;
  append.max_tokens = 1 << 21;
  expect_refused(kvarn_test::cache_launchers().append(append, nullptr),
                 "max_tokens is 2097152, kv_heads 1024" + beyond);
}

TEST(CudaLimits, OfAttention) {
  const auto functions = kvarn_test::attention_of<0>();
  cuda::attention_arguments call;
  call.sequences = somewhere<cuda::attention_sequence>();
  call.softmax_scale = 0.1f;
  call.kv_heads = 40000;
  call.count = 60000;
  expect_refused(functions.launch(call, nullptr),
                 "count is 60000, kv_heads x heads x max_tokens 40000" + beyond);
  EXPECT_EQ(functions.workspace_bytes(call), 0u);
  call.kv_heads = 1;
  call.max_tokens = many;
  call.heads = many;
  EXPECT_EQ(functions.workspace_bytes(call), 0u);
  EXPECT_FALSE(functions.launch(call, nullptr).ok());
  call.max_tokens = call.heads = call.count = 1;
  for (const auto& [name, bound] : {std::pair{"max_sink", &cuda::attention_arguments::max_sink},
                                    {"max_pages", &cuda::attention_arguments::max_pages},
                                    {"max_tail", &cuda::attention_arguments::max_tail}})
    for (const int value : {-1, (1 << 30) + 1}) {
      auto other = call;
      other.*bound = value;
      expect_refused(
          functions.launch(other, nullptr),
          std::string(name) + " is " + std::to_string(value) + "; allowed are 0 to 1073741824");
    }
}

}  // namespace
