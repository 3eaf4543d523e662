// Names, detection and choice of targets.
#include "kvarn/simd/target.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvarn/simd/dispatch.hpp"
#include "support/targets.hpp"

namespace {

using kvarn::is_available;
using kvarn::target;

TEST(TargetNames, AreThoseOfTheTableAndParseBack) {
  std::set<std::string_view> names;
  for (int i = 0; i < kvarn::target_count; ++i) {
    const auto t = static_cast<target>(i);
    EXPECT_EQ(kvarn::target_infos[i].id, t);
    const std::string_view name = kvarn::name_of(t);
    EXPECT_TRUE(names.insert(name).second) << name;
    const auto parsed = kvarn::parse_target(name);
    ASSERT_TRUE(parsed.ok()) << name;
    EXPECT_EQ(parsed.value(), t);
  }
}

TEST(TargetNames, RefusesOthersAndSaysWhatIsAllowed) {
  for (const std::string_view name : {"", "avx", "AVX2", "avx2 ", "best"}) {
    const auto parsed = kvarn::parse_target(name);
    ASSERT_FALSE(parsed.ok()) << name;
    EXPECT_EQ(parsed.why().code(), kvarn::error_code::invalid_argument);
    const std::string message = parsed.why().message();
    EXPECT_NE(message.find("target is " + std::string(name)), std::string::npos) << message;
    for (const kvarn::target_info& info : kvarn::target_infos)
      EXPECT_NE(message.find(" " + std::string(info.name)), std::string::npos) << message;
  }
}

TEST(TargetDetection, IsConsistent) {
  EXPECT_TRUE(is_available(target::scalar));
  // What one target needs, a better one needs too.
  EXPECT_TRUE(!is_available(target::avx_vnni) || is_available(target::avx2));
  EXPECT_TRUE(!is_available(target::avx512) || is_available(target::avx2));
  EXPECT_TRUE(!is_available(target::amx) || is_available(target::avx512));
#if defined(__x86_64__)
  EXPECT_FALSE(is_available(target::neon));
#else
  EXPECT_FALSE(is_available(target::avx2));
#endif
}

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
// The first line of /proc/cpuinfo that starts with `key`, as a set of words.
std::set<std::string> cpu_flags(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind(key, 0) == 0) {
      std::istringstream words(line.substr(line.find(':') + 1));
      return {std::istream_iterator<std::string>(words), {}};
    }
  return {};
}

TEST(TargetDetection, AgreesWithTheKernel) {
#if defined(__x86_64__)
  const std::set<std::string> flags = cpu_flags("flags");
  ASSERT_FALSE(flags.empty());
  const auto has = [&](std::initializer_list<const char*> names) {
    for (const char* name : names)
      if (flags.count(name) == 0) return false;
    return true;
  };
  const bool avx2 = has({"avx", "avx2", "fma", "f16c"});
  const bool avx512 = avx2 && has({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
                                   "avx512vbmi", "gfni"});
  EXPECT_EQ(is_available(target::avx2), avx2);
  EXPECT_EQ(is_available(target::avx_vnni), avx2 && has({"avx_vnni"}));
  EXPECT_EQ(is_available(target::avx512), avx512);
  // The kernel may have AMX and refuse its state to this process.
  EXPECT_TRUE(!is_available(target::amx) || (avx512 && has({"amx_tile", "amx_int8"})));
#else
  const std::set<std::string> flags = cpu_flags("Features");
  // Under an emulator the file may be that of another machine.
  if (flags.count("asimd") != 0) {
    EXPECT_EQ(is_available(target::neon), flags.count("asimddp") != 0);
  }
#endif
}
#endif

TEST(TargetChoiceDeathTest, IsTheBestThatIsAvailable) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::vector<target> covered = kvarn_test::covered_targets();
  const target best = covered.empty() ? target::scalar : covered.back();
  EXPECT_EXIT(
      {
        ::unsetenv("KVARN_TARGET");
        std::exit(kvarn::default_target() == best ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// Read once, at the first use: each choice needs a process of its own.
TEST(TargetChoiceDeathTest, FollowsTheEnvironment) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::vector<target> covered = kvarn_test::covered_targets();
  const target best = covered.empty() ? target::scalar : covered.back();
  const auto expect = [](const std::string& name, target expected) {
    EXPECT_EXIT(
        {
          ::setenv("KVARN_TARGET", name.c_str(), 1);
          std::exit(kvarn::default_target() == expected ? 0 : 1);
        },
        testing::ExitedWithCode(0), "")
        << name;
  };
  for (const kvarn::target_info& info : kvarn::target_infos)
    expect(std::string(info.name), is_available(info.id) ? info.id : best);
  expect("no such target", best);
  expect("", best);
}

template <class Expected>
void expect_kernels(target on) {
  if (is_available(on))
    kvarn::with_kernels(on, [on](auto kernels) {
      EXPECT_TRUE((std::is_same_v<decltype(kernels), Expected>)) << kvarn::name_of(on);
    });
}

TEST(TargetChoice, GivesTheKernelsOfTheTarget) {
  expect_kernels<kvarn::scalar::kernels>(target::scalar);
#if defined(__x86_64__)
  expect_kernels<kvarn::avx2::kernels>(target::avx2);
  expect_kernels<kvarn::avx_vnni::kernels>(target::avx_vnni);
  expect_kernels<kvarn::avx512::kernels>(target::avx512);
  expect_kernels<kvarn::amx::kernels>(target::amx);
#endif
#if defined(__aarch64__)
  expect_kernels<kvarn::neon::kernels>(target::neon);
#endif
}

}  // namespace
