// What the kernels need of a GPU that C++ has no words for: warps, conversions, bulk copies, tensor
// cores. No arithmetic of the method.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "../config.hpp"
#include "../format/float16.hpp"
#include "arguments.hpp"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

inline constexpr unsigned all_lanes = 0xffffffffu;

// An error is reported here and forgotten: the launch behind it does not take it for its own.
inline launch_status status_of(cudaError_t code) {
  if (code == cudaSuccess) return {};
  cudaGetLastError();
  return {code, cudaGetErrorString(code)};
}

// The status of the launch just made.
inline launch_status last_launch() { return status_of(cudaGetLastError()); }

inline launch_status refuse(std::string message) {
  return {cudaErrorInvalidValue, std::move(message)};
}

// Refuses counts, not negative, whose product is no int: so many blocks or vectors a call may have.
inline launch_status check_product(const char* name, int count, const char* other_name, int other) {
  constexpr int most = std::numeric_limits<int>::max();
  if (count == 0 || other <= most / count) return {};
  return refuse(std::string(name) + " is " + std::to_string(count) + ", " + other_name + " " +
                std::to_string(other) + "; their product must be at most " + std::to_string(most));
}

// What encode_arguments and decode_arguments say of their groups.
template <class Arguments>
launch_status check_groups(const Arguments& arguments) {
  if (const status s = validate(arguments.format); !s.ok()) return refuse(s.message());
  if (arguments.kv_heads < 1)
    return refuse("kv_heads is " + std::to_string(arguments.kv_heads) + "; it must be at least 1");
  if (arguments.count < 0)
    return refuse("count is " + std::to_string(arguments.count) + "; it must not be negative");
  if (arguments.count > 0 && arguments.groups == nullptr) return refuse("groups is null");
  return check_product("count", arguments.count, "kv_heads", arguments.kv_heads);
}

// An attribute of the current device, or -1. Launches ask: the runtime is asked once.
inline int device_attribute(cudaDeviceAttr attribute) {
  constexpr int devices = 64;
  static std::atomic<int> known[devices][cudaDevAttrMax];  // values + 1; 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return -1;
  std::atomic<int>* const place = device < devices ? &known[device][attribute] : nullptr;
  if (place != nullptr && *place != 0) return *place - 1;
  int value = -1;
  if (cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) return -1;
  if (place != nullptr) *place = value + 1;
  return value;
}

// Lets blocks of a kernel have so many bytes of shared memory beside its static arrays; refuses
// what the device does not have.
template <class Kernel>
launch_status allow_shared_memory(Kernel kernel, std::size_t bytes) {
  const launch_status s = status_of(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  if (s.code != cudaErrorInvalidValue) return s;
  return refuse("a block of the kernel takes " + std::to_string(bytes) +
                " bytes of shared memory beside its static arrays; the device allows " +
                std::to_string(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)));
}

// Whether the current device runs code in which wait_for_kernels_before waits and blocks form
// clusters: it takes that of the highest architecture up to its own.
inline bool runs_newer_code() {
  constexpr int newer = 900;
#if defined(__CUDA_ARCH_LIST__)
  constexpr int compiled[] = {__CUDA_ARCH_LIST__};
#else
  constexpr int compiled[] = {newer};
#endif
  const int device = 100 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
                     10 * device_attribute(cudaDevAttrComputeCapabilityMinor);
  for (const int architecture : compiled)
    if (architecture >= newer && architecture <= device) return true;
  return false;
}

// Blocks of a cluster that every device takes which has clusters.
inline constexpr int max_cluster = 8;

// Starts a kernel that calls wait_for_kernels_before, where it can wait while the kernel in front
// of it ends. `cluster` neighbouring blocks in x form a cluster; more than 1 only where
// runs_newer_code().
template <class Kernel, class Parameters>
launch_status launch(Kernel kernel, dim3 grid, int threads, std::size_t shared_bytes,
                     cudaStream_t stream, const Parameters& parameters, int cluster = 1) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = !runs_newer_code() ? 0 : cluster == 1 ? 1 : 2;
  return status_of(cudaLaunchKernelEx(&config, kernel, parameters));
}

// Until all that was launched before is done and can be read; then the kernel behind this one may
// be started, to wait in its turn. Only what no kernel writes may be read before it.
__device__ inline void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A number that other blocks have written, from any memory, loaded where it stands in the program.
__device__ inline float load_now(const float* place) {
  float x;
  asm volatile("ld.relaxed.gpu.f32 %0, [%1];" : "=f"(x) : "l"(place) : "memory");
  return x;
}

// Brings an object in device memory, which may be written later, into the L2 cache. By one thread
// for each object: requests for one line wait for each other (by all threads of 256 blocks it took
// six microseconds).
template <class T>
__device__ inline void prefetch(const T* object) {
  const auto* const first = reinterpret_cast<const char*>(object);
  asm volatile("prefetch.global.L2 [%0];" ::"l"(first));
  asm volatile("prefetch.global.L2 [%0];" ::"l"(first + sizeof(T) - 1));
}

// The barrier of a cluster. Every thread arrives, then waits: for all of the cluster that have not
// ended. With `orders`, what they wrote before they arrived can be read behind it.
template <bool Orders>
__device__ inline void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (Orders)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The same place in the shared memory of block `rank` of the cluster, for blocks that have begun
// and not ended.
template <class T>
__device__ inline T* in_block_of_cluster(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  T* place;
  asm("mapa.u64 %0, %1, %2;" : "=l"(place) : "l"(shared), "r"(rank));
  return place;
#else
  return shared;
#endif
}

// x, of which the compiler keeps nothing in registers that it has computed before.
__device__ inline int forgotten(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x & 31u); }

__device__ inline float to_float(std::uint16_t half) {
  return static_cast<float>(float16::from_bits(half));
}

// The larger magnitude; NaN where either is.
__device__ inline float larger_magnitude(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(fabsf(a)), "f"(fabsf(b)));
  return out;
}

// The same of two numbers of a type of 16 bits, in the halves of a word; `a` is a result of this.
__device__ inline std::uint32_t larger_magnitudes(element_type type, std::uint32_t a,
                                                  std::uint32_t b) {
  std::uint32_t out;
  if (type == element_type::float16)
    asm("{ .reg .b32 x; abs.f16x2 x, %2; max.NaN.f16x2 %0, %1, x; }" : "=r"(out) : "r"(a), "r"(b));
  else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b & 0x7fff7fffu));
  return out;
}

// Two packed binary16.
struct float_pair {
  float low;
  float high;
};
__device__ inline float_pair unpack_halves(std::uint32_t pair) {
  return {to_float(static_cast<std::uint16_t>(pair)),
          to_float(static_cast<std::uint16_t>(pair >> 16))};
}

// The same of a type of 16 bits.
__device__ inline float_pair unpack_pair(element_type type, std::uint32_t pair) {
  if (type == element_type::float16) return unpack_halves(pair);
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
// Two numbers in one word, to nearest even.
__device__ inline std::uint32_t pack_pair(element_type type, float low, float high) {
  std::uint32_t out;
  if (type == element_type::float16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
// Two numbers rounded, or what the rounding leaves, rounded.
__device__ inline std::uint32_t part_of_pair(element_type type, float low, float high,
                                             bool is_rest) {
  const float_pair rounded = unpack_pair(type, pack_pair(type, low, high));
  return pack_pair(type, is_rest ? low - rounded.low : low, is_rest ? high - rounded.high : high);
}

// Element `index` of an array of `type`.
__device__ inline float load_element(const void* array, element_type type, std::int64_t index) {
  if (type == element_type::float32) return __ldg(static_cast<const float*>(array) + index);
  const std::uint16_t bits = __ldg(static_cast<const std::uint16_t*>(array) + index);
  return type == element_type::float16 ? to_float(bits)
                                       : static_cast<float>(bfloat16::from_bits(bits));
}

// To nearest even; beyond the type's range to its largest finite value.
__device__ inline std::uint16_t round_to(element_type type, float value) {
  return type == element_type::float16 ? float16::saturated(value).bits
                                       : bfloat16::saturated(value).bits;
}
// The same of two numbers, in one word.
__device__ inline std::uint32_t round_pair(element_type type, float low, float high) {
  std::uint32_t out;
  if (type == element_type::float16)
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ inline void store_element(void* array, element_type type, std::int64_t index,
                                     float value) {
  if (type == element_type::float32)
    static_cast<float*>(array)[index] = value;
  else
    static_cast<std::uint16_t*>(array)[index] = round_to(type, value);
}

// Eight 16-bit elements.
__device__ inline void widen_eight(uint4 raw, element_type type, float* out) {
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float_pair pair = unpack_pair(type, words[i]);
    out[2 * i] = pair.low;
    out[2 * i + 1] = pair.high;
  }
}

// Copies 8 or 16 bytes from global to shared memory in the background.
__device__ inline void copy_8_bytes(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
__device__ inline void copy_16_bytes(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
// Until all such copies of this thread are done.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Bytes of four words become words: out[i] = byte i of a, b, c and d.
__device__ inline void transpose_bytes(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c,
                                       std::uint32_t& d) {
  const std::uint32_t ab_low = __byte_perm(a, b, 0x5140);
  const std::uint32_t cd_low = __byte_perm(c, d, 0x5140);
  const std::uint32_t ab_high = __byte_perm(a, b, 0x7362);
  const std::uint32_t cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_low, cd_low, 0x5410);
  b = __byte_perm(ab_low, cd_low, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410);
  d = __byte_perm(ab_high, cd_high, 0x7632);
}

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
