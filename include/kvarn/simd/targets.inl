// The list of instruction sets, in ascending order of preference on each architecture; the scalar
// code first, which is the definition of all others.
//
// A file of this list is read in two ways. Where KVARN_TARGET(NAME, ARCHITECTURE, CONDITION) is
// defined it is that entry, on one architecture or `any`; the condition is evaluated in
// detail::detect_targets. Elsewhere it is the kernels, in a namespace of that name.
// clang-format off
#include "scalar.inl"
#include "avx2.inl"
#include "avx_vnni.inl"
#include "avx512.inl"
#include "amx.inl"
#include "neon.inl"
// clang-format on
