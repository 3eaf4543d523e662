// Everything that depends on the compiler: the only header of the library that leaves macros.
#pragma once

#include <cassert>

#if (defined(__FAST_MATH__) || defined(__USE_FAST_MATH__)) && !defined(KVARN_ALLOW_FAST_MATH)
#error "kvarn promises equal bytes on every machine, which -ffast-math breaks; compile without it"
#endif

// Marks a function that both the host and a CUDA device can call.
#if defined(__CUDACC__)
#define KVARN_HOST_DEVICE __host__ __device__
#else
#define KVARN_HOST_DEVICE
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define KVARN_ALWAYS_INLINE __forceinline
#else
#define KVARN_ALWAYS_INLINE inline __attribute__((always_inline))
#endif

// One copy for all callers: for what is large, or rare, and for loops whose registers a caller
// would take away. Code that is not generated need not be compiled.
#if defined(_MSC_VER) && !defined(__clang__)
#define KVARN_NOINLINE __declspec(noinline) inline
#else
#define KVARN_NOINLINE inline __attribute__((noinline))
#endif

// The same for what no fast target calls, or only a failure: optimised for size.
#if defined(__GNUC__)
#define KVARN_COLD KVARN_NOINLINE __attribute__((cold))
#else
#define KVARN_COLD KVARN_NOINLINE
#endif

// For the small functions of types that cross translation units. Always inlined, so that the linker
// never hands a copy compiled for a newer CPU to a caller compiled for an older one.
#define KVARN_INLINE KVARN_HOST_DEVICE KVARN_ALWAYS_INLINE

// Before a loop of few, known passes: unrolled at any optimisation level, so that arrays of vectors
// stay in registers.
#if defined(__clang__)
#define KVARN_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define KVARN_UNROLL _Pragma("GCC unroll 16")
#else
#define KVARN_UNROLL
#endif

// Checks a documented precondition in debug builds. Define it before inclusion to use your own.
#if !defined(KVARN_ASSERT)
#define KVARN_ASSERT(condition) assert(condition)
#endif

// Their arguments where the file is compiled for that architecture, else nothing.
#define KVARN_ON_ANY(...) __VA_ARGS__
#if defined(__x86_64__)
#define KVARN_ON_X86_64(...) __VA_ARGS__
#else
#define KVARN_ON_X86_64(...)
#endif
#if defined(__aarch64__)
#define KVARN_ON_AARCH64(...) __VA_ARGS__
#else
#define KVARN_ON_AARCH64(...)
#endif

#if defined(__cpp_exceptions)
#define KVARN_EXCEPTIONS 1
#else
#define KVARN_EXCEPTIONS 0
#endif

// Functions that do work live in an inline namespace named after the instruction sets that the
// including file is compiled for, and after whether it has kernels of its own
// (simd/on_target.hpp): two files that differ in any of this then never share a copy.
#if defined(__AVX512F__)
#define KVARN_ISA_A avx512
#elif defined(__AVX2__)
#define KVARN_ISA_A avx2
#elif defined(__AVX__)
#define KVARN_ISA_A avx
#elif defined(__SSE4_1__)
#define KVARN_ISA_A sse4
#else
#define KVARN_ISA_A base
#endif
#if defined(__AVX512FP16__)
#define KVARN_ISA_B fp16
#elif defined(__AVX512VBMI__)
#define KVARN_ISA_B vbmi
#elif defined(__AVX512VNNI__)
#define KVARN_ISA_B vnni
#elif defined(__AVX512BW__) && defined(__AVX512VL__)
#define KVARN_ISA_B bwvl
#elif defined(__AVXVNNI__)
#define KVARN_ISA_B avxvnni
#elif defined(__ARM_FEATURE_SVE2)
#define KVARN_ISA_B sve2
#elif defined(__ARM_FEATURE_SVE)
#define KVARN_ISA_B sve
#elif defined(__ARM_FEATURE_DOTPROD)
#define KVARN_ISA_B dot
#else
#define KVARN_ISA_B x
#endif
#if defined(__FMA__)
#define KVARN_ISA_C fma
#else
#define KVARN_ISA_C x
#endif
#if defined(__BMI2__) && defined(__LZCNT__)
#define KVARN_ISA_D haswell
#elif defined(__BMI2__)
#define KVARN_ISA_D bmi2
#elif defined(__LZCNT__)
#define KVARN_ISA_D lzcnt
#elif defined(__ARM_FEATURE_ATOMICS)
#define KVARN_ISA_D lse
#else
#define KVARN_ISA_D x
#endif
#if defined(KVARN_COMPILED_KERNELS)
#define KVARN_ISA_E extern
#else
#define KVARN_ISA_E x
#endif
#define KVARN_ISA_PASTE_EXPANDED(a, b, c, d, e) isa_##a##_##b##_##c##_##d##_##e
#define KVARN_ISA_PASTE(a, b, c, d, e) KVARN_ISA_PASTE_EXPANDED(a, b, c, d, e)
#define KVARN_ISA_NAMESPACE \
  KVARN_ISA_PASTE(KVARN_ISA_A, KVARN_ISA_B, KVARN_ISA_C, KVARN_ISA_D, KVARN_ISA_E)

// The functions by which kernels are reached belong to the including file, or, under
// KVARN_COMPILED_KERNELS, to one file that serves others with whatever -march flags.
#if defined(KVARN_COMPILED_KERNELS)
#define KVARN_KERNELS_NAMESPACE compiled
#define KVARN_KERNELS_INLINE
#else
#define KVARN_KERNELS_NAMESPACE KVARN_ISA_NAMESPACE
#define KVARN_KERNELS_INLINE inline
#endif

// CUDA code lives in an inline namespace named after the architectures that the including file is
// compiled for, and kernels are hidden: two libraries built for different ones never share a
// kernel.
#if defined(__CUDACC__)
#define KVARN_KERNEL __attribute__((visibility("hidden"))) __global__
#if defined(__CUDA_ARCH_LIST__)
#define KVARN_CUDA_PASTE_EXPANDED(a, b, c, d, e, f, g, h, ...) \
  sm_##a##_##b##_##c##_##d##_##e##_##f##_##g##_##h
#define KVARN_CUDA_PASTE(...) KVARN_CUDA_PASTE_EXPANDED(__VA_ARGS__)
#define KVARN_CUDA_NAMESPACE KVARN_CUDA_PASTE(__CUDA_ARCH_LIST__, x, x, x, x, x, x, x, x)
#else
#define KVARN_CUDA_NAMESPACE sm_default
#endif
#endif
