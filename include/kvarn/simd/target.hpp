// The instruction sets that the library has kernels for, and which of them this machine can run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iterator>
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

// The instruction sets of targets.inl, in its order: of those of a machine, the last is the best.
enum class target : std::uint8_t {
#define KVARN_TARGET(name, architecture, condition) name,
#include "targets.inl"
#undef KVARN_TARGET
};

struct target_info {
  target id;
  std::string_view name;
};

inline constexpr target_info target_infos[] = {
#define KVARN_TARGET(name, architecture, condition) {target::name, #name},
#include "targets.inl"
#undef KVARN_TARGET
};

inline constexpr int target_count = static_cast<int>(std::size(target_infos));

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

struct machine_features {
  cpuid_registers one = cpuid(1, 0);
  cpuid_registers seven = cpuid(7, 0);
  cpuid_registers seven_one = seven.a >= 1 ? cpuid(7, 1) : cpuid_registers{};
  std::uint64_t state = saved_state();
  unsigned targets = 0;  // found so far

  bool saves(std::uint64_t bits) const { return (state & bits) == bits; }
  bool runs(target t) const { return bit(targets, static_cast<int>(t)); }
};

#else

#if defined(__aarch64__)
inline bool has_dot_product() {
#if defined(__linux__)
  constexpr unsigned long hwcap_asimddp = 1ul << 20;
  return (getauxval(AT_HWCAP) & hwcap_asimddp) != 0;
#elif defined(__ARM_FEATURE_DOTPROD)
  return true;
#else
  return false;
#endif
}
#endif

struct machine_features {
  unsigned targets = 0;
};

#endif

// A bit for each target that this machine runs.
inline unsigned detect_targets() {
  machine_features machine;
#define KVARN_TARGET(name, architecture, condition) \
  KVARN_ON_##architecture(if (condition) machine.targets |= 1u << static_cast<int>(target::name);)
#include "targets.inl"
#undef KVARN_TARGET
  return machine.targets;
}

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
