// The instruction sets that the library has kernels for, and which of them this machine can run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "../config.hpp"
#include "../error.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace kvarn {

// In ascending order of preference on each architecture.
enum class target : std::uint8_t {
  scalar,    // plain C++: the definition
  avx2,      // AVX2, FMA, F16C
  avx_vnni,  // the same with 256-bit VNNI
  avx512,    // AVX-512 F, BW, DQ, VL, VNNI, VBMI, and GFNI
  amx,       // the same with AMX int8 tiles
  neon,      // AArch64 with the dot product extension
};

inline constexpr int target_count = 6;

struct target_info {
  target id;
  std::string_view name;
};

inline constexpr target_info target_infos[target_count] = {
    {target::scalar, "scalar"}, {target::avx2, "avx2"}, {target::avx_vnni, "avx_vnni"},
    {target::avx512, "avx512"}, {target::amx, "amx"},   {target::neon, "neon"},
};

constexpr std::string_view name_of(target t) { return target_infos[static_cast<int>(t)].name; }

inline namespace KVARN_ISA_NAMESPACE {

namespace detail {

#if defined(__x86_64__)

struct cpuid_registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

inline cpuid_registers cpuid(unsigned leaf, unsigned subleaf) {
  cpuid_registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

constexpr bool bit(unsigned word, int index) { return ((word >> index) & 1u) != 0; }

// The register state that the operating system saves (XCR0); 0 where it saves none.
inline std::uint64_t saved_state() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

// Linux hands out the 8 KB of AMX tile state to a process that asks for it.
inline bool request_amx_state() {
#if defined(__linux__)
  constexpr long arch_req_xcomp_perm = 0x1023;
  constexpr long xfeature_xtiledata = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata) == 0;
#else
  return false;
#endif
}

inline unsigned detect_targets() {
  const auto mask = [](target t) { return 1u << static_cast<int>(t); };
  unsigned found = mask(target::scalar);
  const cpuid_registers one = cpuid(1, 0);
  const cpuid_registers seven = cpuid(7, 0);
  const std::uint64_t state = saved_state();
  const auto saved = [state](std::uint64_t bits) { return (state & bits) == bits; };

  const bool avx2 = saved(0x6) && bit(one.c, 28) && bit(one.c, 12) && bit(one.c, 29) &&
                    bit(seven.b, 5);  // AVX, FMA, F16C, AVX2
  if (!avx2) return found;
  found |= mask(target::avx2);
  if (seven.a >= 1 && bit(cpuid(7, 1).a, 4)) found |= mask(target::avx_vnni);

  const bool avx512 = saved(0xe6) && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
                      bit(seven.b, 31) && bit(seven.c, 11) && bit(seven.c, 1) &&
                      bit(seven.c, 8);  // F, DQ, BW, VL, VNNI, VBMI, GFNI
  if (!avx512) return found;
  found |= mask(target::avx512);
  const bool amx = saved(0x60000) && bit(seven.d, 24) && bit(seven.d, 25);  // TILE, INT8
  if (amx && request_amx_state()) found |= mask(target::amx);
  return found;
}

#elif defined(__aarch64__)

inline unsigned detect_targets() {
  unsigned found = 1u << static_cast<int>(target::scalar);
#if defined(__linux__)
  constexpr unsigned long hwcap_asimddp = 1ul << 20;
  if ((getauxval(AT_HWCAP) & hwcap_asimddp) != 0) found |= 1u << static_cast<int>(target::neon);
#elif defined(__ARM_FEATURE_DOTPROD)
  found |= 1u << static_cast<int>(target::neon);
#endif
  return found;
}

#else

inline unsigned detect_targets() { return 1u << static_cast<int>(target::scalar); }

#endif

}  // namespace detail

// Whether this machine and its operating system can run the kernels of a target. The first call
// asks the processor, and Linux for AMX state.
KVARN_NOINLINE bool is_available(target t) {
  static const unsigned found = detail::detect_targets();
  return ((found >> static_cast<int>(t)) & 1u) != 0;
}

// The target of that name, or which names there are.
inline result<target> parse_target(std::string_view name) {
  std::string names;
  for (const target_info& info : target_infos) {
    if (info.name == name) return info.id;
    names += ' ';
    names += info.name;
  }
  return failure(error_code::invalid_argument,
                 {"target is ", std::string(name).c_str(), "; allowed are", names.c_str()});
}

// The target that calls without one use: that of the environment variable KVARN_TARGET where this
// machine can run it, else the best one. Read once.
KVARN_NOINLINE target default_target() {
  static const target chosen = [] {
    const char* const name = std::getenv("KVARN_TARGET");
    target best = target::scalar;
    for (const target_info& info : target_infos) {
      if (!is_available(info.id)) continue;
      best = info.id;
      if (name != nullptr && info.name == name) break;
    }
    return best;
  }();
  return chosen;
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
