// The target without vector instructions: the definitions themselves.
#pragma once

#include "kernel_includes.hpp"

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace scalar {

#include "kernels.inl"

}  // namespace scalar
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
