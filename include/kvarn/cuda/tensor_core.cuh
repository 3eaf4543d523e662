// Tensor cores, and copies of records into shared memory.
#pragma once

#include "device.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// d = a b + c, 16 x 8 x 32, of unsigned bytes a and signed or unsigned bytes b.
template <bool SignedB>
__device__ inline void multiply_bytes(int (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1, const int (&c)[4]) {
  if constexpr (SignedB)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
          "r"(c[2]), "r"(c[3]));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
          "r"(c[2]), "r"(c[3]));
}

// c += a b, 16 x 8 x 16, of binary16 or bfloat16.
template <element_type Type>
__device__ inline void multiply_pairs(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                      std::uint32_t b1) {
  static_assert(Type != element_type::float32);
  if constexpr (Type == element_type::float16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements across a warp: lane 4 r + i holds elements 2 i and
// 2 i + 1 of row r, before and after.
__device__ inline std::uint32_t transpose_matrix(std::uint32_t row) {
  std::uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(row));
  return out;
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory of which arriving and waiting are two things. Phases are counted 0, 1,
// ...; a thread may wait for the present one or the one before it.
class shared_barrier {
 public:
  __device__ explicit shared_barrier(std::uint64_t* place) : address_(shared_address(place)) {}

  // By one thread, before fence_init and the first use by others. A phase takes `count` arrivals.
  __device__ void init(int count) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_), "r"(count) : "memory");
  }
  // Behind init, by the same thread, for copies that arrive by themselves.
  __device__ static void fence_init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ void arrive() const {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address_)
                 : "memory");
  }
  __device__ void wait(int phase) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(address_),
        "r"(phase & 1)
        : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(address_),
        "r"(phase & 1)
        : "memory");
#endif
  }
  __device__ std::uint32_t address() const { return address_; }

 private:
  std::uint32_t address_;
};

// One warp's copies of records into one place of shared memory. On devices with bulk copies one
// lane asks for the record and all wait on a barrier; on older ones every lane copies 16 bytes at a
// time. At most two copies of a warp are under way, and they are waited for in the order of their
// start.
class record_slot {
 public:
  __device__ record_slot(std::byte* place, std::uint64_t* barrier)
      : place_(shared_address(place)), barrier_(barrier) {}

  // By one lane, before any use by the warp.
  __device__ void init() const { barrier_.init(1); }

  // By the whole warp, when all lanes have read what was there.
  __device__ void start(const std::byte* record, int bytes) const {
#if __CUDA_ARCH__ >= 900
    if (lane_index() == 0) {
      std::uint64_t policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier_.address()),
                   "r"(bytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(place_),
          "l"(record), "r"(bytes), "r"(barrier_.address()), "l"(policy)
          : "memory");
    }
#else
    for (int i = 16 * lane_index(); i < bytes; i += 512)
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place_ + static_cast<unsigned>(i)),
          "l"(record + i)
          : "memory");
    commit();
#endif
  }

  // In the place of a copy, where there is nothing to copy.
  __device__ static void skip() { commit(); }

  // Waits for the copy number `use` (0, 1, ...) into this place.
  __device__ void wait(int use) const {
#if __CUDA_ARCH__ >= 900
    barrier_.wait(use);
#else
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
#endif
  }

 private:
  __device__ static void commit() {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  std::uint32_t place_;
  shared_barrier barrier_;
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
