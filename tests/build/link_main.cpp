// Links two copies of link_unit.cpp, compiled with -march=x86-64 and -march=x86-64-v3, and requires
// that both compute the same.
#include <cstdint>
#include <cstdio>

std::uint64_t link_unit_v1();
std::uint64_t link_unit_v3();

int main() {
  const std::uint64_t v1 = link_unit_v1();
  std::printf("x86-64:    %016llx\n", static_cast<unsigned long long>(v1));
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi2")) {
    std::puts("x86-64-v3: left out, this processor cannot run it");
    return 77;
  }
  const std::uint64_t v3 = link_unit_v3();
  std::printf("x86-64-v3: %016llx\n", static_cast<unsigned long long>(v3));
  return v1 == v3 ? 0 : 1;
}
