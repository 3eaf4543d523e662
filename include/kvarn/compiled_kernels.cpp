// Every kernel, for every target and element type: the one file of a program whose files are all
// compiled with KVARN_COMPILED_KERNELS defined, so that no other compiles any. The CMake target
// kvarn::compiled is this file, and defines the macro for what links it.
#include "config.hpp"
#include "format/float16.hpp"
#include "simd/on_target.hpp"
#include "simd/on_target.inl"

#if !defined(KVARN_COMPILED_KERNELS)
#error "define KVARN_COMPILED_KERNELS for all files of the program, or leave this file out of it"
#endif

namespace kvarn::on_target {

template struct elements<float>;
template struct elements<float16>;
template struct elements<bfloat16>;

template struct element_pairs<float, float>;
template struct element_pairs<float, float16>;
template struct element_pairs<float, bfloat16>;
template struct element_pairs<float16, float>;
template struct element_pairs<float16, float16>;
template struct element_pairs<float16, bfloat16>;
template struct element_pairs<bfloat16, float>;
template struct element_pairs<bfloat16, float16>;
template struct element_pairs<bfloat16, bfloat16>;

}  // namespace kvarn::on_target
