// The choice of kernels at run time.
#pragma once

#include "../config.hpp"
#include "kernel_includes.hpp"
#include "target.hpp"
#include "targets.inl"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// Calls f with the kernels of a target: an empty object whose type has them as static functions.
// Precondition: is_available(on).
template <class F>
decltype(auto) with_kernels(target on, const F& f) {
  KVARN_ASSERT(is_available(on));
  switch (on) {
    default:  // the first of the list, the scalar code
#define KVARN_TARGET(name, architecture, condition) \
  KVARN_ON_##architecture(case target::name : return f(name::kernels{});)
#include "targets.inl"
#undef KVARN_TARGET
  }
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
