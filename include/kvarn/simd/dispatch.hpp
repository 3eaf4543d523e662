// The choice of kernels at run time.
#pragma once

#include "../config.hpp"
#include "amx.hpp"
#include "avx2.hpp"
#include "avx512.hpp"
#include "avx_vnni.hpp"
#include "neon.hpp"
#include "scalar.hpp"
#include "target.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {

// Calls f with the kernels of a target: an empty object whose type has them as static functions.
// Precondition: is_available(on).
template <class F>
decltype(auto) with_kernels(target on, const F& f) {
  KVARN_ASSERT(is_available(on));
  switch (on) {
#if defined(__x86_64__)
    case target::avx2:
      return f(avx2::kernels{});
    case target::avx_vnni:
      return f(avx_vnni::kernels{});
    case target::avx512:
      return f(avx512::kernels{});
    case target::amx:
      return f(amx::kernels{});
#elif defined(__aarch64__)
    case target::neon:
      return f(neon::kernels{});
#endif
    default:
      return f(scalar::kernels{});
  }
}

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
