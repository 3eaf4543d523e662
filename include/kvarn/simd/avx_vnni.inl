// AVX-VNNI on top of AVX2: only the dot products of bytes are its own.
#if defined(KVARN_TARGET)
KVARN_TARGET(avx_vnni, X86_64, machine.runs(target::avx2) && bit(machine.seven_one.a, 4))
#elif defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace avx_vnni {

using namespace avx2;

// Exact sums of products of codes (unsigned bytes) and operands (signed bytes), four a lane.
struct dot_sum {
  __m256i v;
};
inline constexpr int dot_accumulators = 8;
inline constexpr int max_dot_blocks = 2;  // of rows
inline constexpr bool dots_need_flush = false;
constexpr int dots_before_flush(int) { return max_head_dim; }
KVARN_ALWAYS_INLINE dot_sum no_dots() { return {_mm256_setzero_si256()}; }
KVARN_ALWAYS_INLINE void add_dots(dot_sum& sum, words codes, words operands) {
  sum.v = _mm256_dpbusd_avx_epi32(sum.v, codes.v, operands.v);
}
KVARN_ALWAYS_INLINE words flush(dot_sum sum) { return {sum.v}; }

#include "code_sums.inl"

struct kernels : avx2::kernels {
  static void attend_sealed(const cache_format& format, const sealed_run& run, float cap,
                            operand_precision precision, attention_row* rows, int row_count) {
    avx2::attend_sealed_by({&code_sums::sum}, format, run, cap, precision, rows, row_count);
  }
};

}  // namespace avx_vnni
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // __x86_64__
