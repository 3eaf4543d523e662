// libFuzzer on the driver of tests/cache/model_test.cpp: the first byte chooses the type of exact
// rows, the others the configuration and the operations. Inputs of 400 bytes are long enough:
// -max_len=400.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "cache/model_driver.hpp"

extern "C" int LLVMFuzzerInitialize(int*, char***);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t*, std::size_t);

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  GTEST_FLAG_SET(break_on_failure, true);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  kvarn_test::driver_counts counts;
  const std::span<const std::uint8_t> bytes(data + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      kvarn_test::model_driver<float>(bytes, counts).run();
      break;
    case 1:
      kvarn_test::model_driver<kvarn::bfloat16>(bytes, counts).run();
      break;
    default:
      kvarn_test::model_driver<kvarn::float16>(bytes, counts).run();
      break;
  }
  return 0;
}
