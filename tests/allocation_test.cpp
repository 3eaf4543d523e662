// Saving and loading while the system gives no memory: an error, never an exception. A program of
// its own, since it replaces the global operator new.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <new>
#include <sstream>
#include <streambuf>
#include <string>

#include "cache/support.hpp"

namespace {

int allocations_left = -1;  // until all fail; below 0: none fails

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* const memory = std::malloc(size != 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

// Takes all that is written and allocates nothing.
class null_buffer final : public std::streambuf {
  int_type overflow(int_type c) override { return traits_type::not_eof(c); }
  std::streamsize xsputn(const char*, std::streamsize count) override { return count; }
};

// How often `call` fails with ever more allocations allowed until it succeeds; -1: with another
// error than out_of_memory.
int failures_of(const std::function<kvarn::error_code()>& call) {
  for (int allowed = 0;; ++allowed) {
    allocations_left = allowed;
    const kvarn::error_code code = call();
    allocations_left = -1;
    if (code == kvarn::error_code::ok) return allowed;
    if (code != kvarn::error_code::out_of_memory) return -1;
  }
}

TEST(FailedAllocations, AreErrorsOfSavingAndLoading) {
  auto config = kvarn_test::small_config();
  config.method = kvarn::encoder::query_aware;
  kvarn_test::test_cache<> c(config);
  const auto id = c.create();
  const auto queries = kvarn_test::token_tensor(kvarn_test::seeds(7, 1), 0, 4, 3, 64);
  ASSERT_TRUE(c.cache.observe(id, 0, kvarn::token_major(queries.data(), 4, 64), 1).ok());
  c.append(id, kvarn_test::seeds(0, 200));
  c.seal(id, 1);
  std::stringstream sequences;
  ASSERT_TRUE(kvarn::save_sequences(c.cache, std::span(&id, 1), sequences).ok());
  std::stringstream moments;
  ASSERT_TRUE(kvarn::save_moments(*c.cache.statistics(id), moments).ok());

  null_buffer nowhere;
  std::ostream out(&nowhere);
  EXPECT_GT(
      failures_of([&] { return kvarn::save_sequences(c.cache, std::span(&id, 1), out).code(); }),
      0);
  EXPECT_GE(failures_of([&] { return kvarn::save_moments(*c.cache.statistics(id), out).code(); }),
            0);
  EXPECT_GT(failures_of([&] {
              sequences.clear();
              sequences.seekg(0);
              return kvarn::restore_sequences(c.cache, sequences).why().code();
            }),
            0);
  EXPECT_GT(failures_of([&] {
              moments.clear();
              moments.seekg(0);
              return kvarn::load_moments(moments).why().code();
            }),
            0);
}

}  // namespace
