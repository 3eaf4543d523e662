// The targets with vector instructions that this machine can run: tests compare each with the
// definition.
#pragma once

#include <string>
#include <vector>

#include "kvarn/simd/dispatch.hpp"

namespace kvarn_test {

inline std::vector<kvarn::target> covered_targets() {
  std::vector<kvarn::target> covered;
  for (const kvarn::target_info& info : kvarn::target_infos)
    if (info.id != kvarn::target::scalar && kvarn::is_available(info.id))
      covered.push_back(info.id);
  return covered;
}

inline std::string names_of(const std::vector<kvarn::target>& targets) {
  std::string names;
  for (const kvarn::target t : targets) names += " " + std::string(kvarn::name_of(t));
  return names;
}

// Calls f(target, kernels) for every one of them.
template <class F>
void for_each_target(const F& f) {
  for (const kvarn::target t : covered_targets())
    kvarn::with_kernels(t, [&](auto kernels) { f(t, kernels); });
}

}  // namespace kvarn_test
