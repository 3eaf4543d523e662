// Ends the program with code 77, before any other code of it runs, where the processor lacks the
// instruction set that bytes_main.cpp was compiled for. This file is compiled without -march.
//
// KVARN_BYTES_LEVEL: the x86-64 level needed: 1, 3 or 4.
#include <unistd.h>

#if KVARN_BYTES_LEVEL > 1
namespace {

// Priority 101 is the first one that programs may use.
__attribute__((constructor(101))) void require_level() {
  __builtin_cpu_init();
  // The features one by one: clang 14 does not know the names of the levels.
  bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#if KVARN_BYTES_LEVEL > 3
  supported = supported && __builtin_cpu_supports("avx512f") &&
              __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  if (!supported) _exit(77);
}

}  // namespace
#endif
