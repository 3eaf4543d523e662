// Second moments of queries and their factors, for the encoder query_aware.
//
// The numbers are those of kvarn::query_moment and kvarn::query_factor, bit for bit.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "../format/tile_layout.hpp"
#include "device.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

namespace kvarn::cuda {

inline namespace KVARN_CUDA_NAMESPACE {

// Adds q q^T of every query to the upper triangle of its KV head's sums, token by token, within a
// token head by head. Entries below the diagonal are left as they are.
launch_status observe(const observe_arguments& arguments, cudaStream_t stream);

// U of C + lambda I = (U + I) D (U + I)^T for every C. Every entry is written, 0 on and below the
// diagonal.
launch_status factorize(const factor_arguments& arguments, cudaStream_t stream);

// implementation

namespace detail {

// Four floats from a multiple of 16 bytes on.
__device__ inline void load_quad(const float* from, float* to) {
  const float4 quad = *reinterpret_cast<const float4*>(from);
  to[0] = quad.x;
  to[1] = quad.y;
  to[2] = quad.z;
  to[3] = quad.w;
}

struct observe_parameters {
  observe_arguments arguments;
  float unit;  // of the rotation
  int batch;   // queries at a time

  // Floats from one rotated query to the next: the channels to whole blocks of 64, and as many as
  // keep the lanes that write neighbouring queries off each other's banks.
  KVARN_INLINE int query_floats() const { return (arguments.head_dim + 63) / 64 * 64 + 4; }
};

// Brings queries into shared memory, sanitized and rotated: for head dimensions 64 and 128
// four lanes have a query in registers, of which they request the next while the block adds.
template <int Dim>
class batch_in_lanes {
 public:
  __device__ batch_in_lanes(const observe_parameters& p, const token_source& source, float*)
      : p_(p), source_(source), is_vectorised_(source.is_vectorised()) {}

  // Queries first .. first + count - 1, count at most p.batch.
  __device__ void request(int first, int count) {
    if (query() >= count || !is_vectorised_) return;
    const std::int64_t place = source_.place(first + query());
#pragma unroll
    for (int k = 0; k < runs; ++k) {
      const std::int64_t run = place + 32 * k + 8 * part();
      if (source_.type == element_type::float32) {
        const auto* const from =
            reinterpret_cast<const uint4*>(static_cast<const float*>(source_.data) + run);
        raw_[k][0] = __ldg(from);
        raw_[k][1] = __ldg(from + 1);
      } else {
        raw_[k][0] = __ldg(
            reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(source_.data) + run));
      }
    }
  }
  // Writes what was requested to rotated[query][query_floats()].
  __device__ void write(int first, int count, float* rotated) const {
    float* const out = rotated + query() * p_.query_floats() + 8 * part();
    const std::int64_t place = query() < count ? source_.place(first + query()) : 0;
    replaced_values replaced;
    float v[runs][8] = {};
#pragma unroll
    for (int k = 0; k < runs; ++k) {
      if (query() >= count) break;
      take(k, place, v[k]);
      sanitize_run<1>(v[k], out + 32 * k, replaced);
    }
    if (p_.arguments.rotate) rotate_in_lanes<lanes>(v, part(), p_.unit);
#pragma unroll
    for (int k = 0; k < runs; ++k)
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        *reinterpret_cast<float4*>(out + 32 * k + i) =
            make_float4(v[k][i], v[k][i + 1], v[k][i + 2], v[k][i + 3]);
  }

 private:
  static constexpr int lanes = 4;
  static constexpr int runs = Dim / (8 * lanes);
  static_assert(vectors_at_once(Dim) == block_threads / lanes);

  __device__ static int query() { return static_cast<int>(threadIdx.x) / lanes; }
  __device__ static int part() { return static_cast<int>(threadIdx.x) % lanes; }

  __device__ void take(int k, std::int64_t place, float (&v)[8]) const {
    if (!is_vectorised_) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] = load_element(source_.data, source_.type,
                            place + (32 * k + 8 * part() + i) * source_.strides.channel);
    } else if (source_.type == element_type::float32) {
      const uint4 a = raw_[k][0];
      const uint4 b = raw_[k][1];
      const std::uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(words[i]);
    } else {
      widen_eight(raw_[k][0], source_.type, v);
    }
  }

  const observe_parameters& p_;
  token_source source_;
  bool is_vectorised_;
  uint4 raw_[runs][2];
};

// The same for any head dimension, through a token_buffer at `memory`.
class batch_in_memory {
 public:
  __device__ batch_in_memory(const observe_parameters& p, const token_source& source, float* memory)
      : p_(p), source_(source), buffer_{memory, p.batch, p.arguments.head_dim} {}

  __device__ void request(int, int) {}
  __device__ void write(int first, int count, float* rotated) const {
    const int dim = p_.arguments.head_dim;
    const bool rotate = p_.arguments.rotate;
    const int l = static_cast<int>(threadIdx.x) & 15;
    replaced_values replaced;
    load_tokens<2>(source_, first, count, rotate, buffer_, replaced);
    for (int token = static_cast<int>(threadIdx.x) >> 4; token < count; token += 16) {
      float v[max_head_dim / 16];
      read_strided(buffer_, token, l, v);
      if (rotate && hadamard_core(dim) == 1) rotate_strided(v, dim / 16);
#pragma unroll
      for (int j = 0; j < max_head_dim / 16; ++j) {
        if (j >= dim / 16) break;
        rotated[token * p_.query_floats() + l + 16 * j] = rotate ? __fmul_rn(v[j], p_.unit) : v[j];
      }
    }
  }

 private:
  const observe_parameters& p_;
  token_source source_;
  token_buffer<0> buffer_;
};

// Calls f(entry, i, j) for each of a thread's 4 x 4 entries in the upper triangle of
// sums[dim][dim].
template <class F>
__device__ void for_upper_entries(float* sums, int dim, int row, int col, const F& f) {
  row = forgotten(row);
  col = forgotten(col);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row + i <= col + j && col + j < dim) f(sums[(row + i) * dim + col + j], i, j);
}

// A block adds 64 x 64 entries: blockIdx.y counts such blocks of the upper triangle. A thread has
// 4 x 4 of them and takes the queries in order. `Batch`: one of the two above.
template <class Batch>
KVARN_KERNEL void __launch_bounds__(block_threads)
    observe_kernel(const __grid_constant__ observe_parameters p) {
  extern __shared__ float4 shared[];
  const observe_arguments& a = p.arguments;
  const int dim = a.head_dim;
  const int thread = static_cast<int>(threadIdx.x);
  const int kv_head = static_cast<int>(blockIdx.x % static_cast<unsigned>(a.kv_heads));
  const observed_queries* const work = a.sequences + blockIdx.x / static_cast<unsigned>(a.kv_heads);
  int block_row = 0;
  int block_col = static_cast<int>(blockIdx.y);
  for (int left = (dim + 63) / 64; block_col >= left; --left) {
    block_col -= left;
    ++block_row;
  }
  block_col += block_row;

  const int vectors = work->count * a.heads;
  const token_source source{work->queries, a.type, a.heads,
                            std::int64_t{kv_head} * a.heads * a.strides.head, a.strides};
  auto* const rotated = reinterpret_cast<float*>(shared);  // [batch][query_floats()]
  const int rotated_floats = p.batch * p.query_floats();
  Batch batch(p, source, rotated + rotated_floats);
  batch.request(0, min(p.batch, vectors));
  for (int i = thread; i < rotated_floats; i += block_threads) rotated[i] = 0;

  const int row = 64 * block_row + 4 * (thread >> 4);
  const int col = 64 * block_col + 4 * (thread & 15);
  float sum[4][4] = {};
  const std::int64_t sums = std::int64_t{kv_head} * dim * dim;
  for_upper_entries(work->sums + sums, dim, row, col,
                    [&](float& entry, int i, int j) { sum[i][j] = entry; });
  for (int first = 0; first < vectors; first += p.batch) {
    const int count = min(p.batch, vectors - first);
    __syncthreads();
    batch.write(first, count, rotated);
    __syncthreads();
    batch.request(first + p.batch, min(p.batch, vectors - first - p.batch));
#pragma unroll 4
    for (int t = 0; t < count; ++t) {
      const float* const query = rotated + t * p.query_floats();
      float rows[4];
      float cols[4];
      load_quad(query + row, rows);
      load_quad(query + col, cols);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = std::fma(rows[i], cols[j], sum[i][j]);
    }
  }
  for_upper_entries(work->sums + sums, dim, row, col,
                    [&](float& entry, int i, int j) { entry = sum[i][j]; });
}

template <class Batch>
launch_status launch_observing(const observe_arguments& arguments, std::size_t batch_floats,
                               cudaStream_t stream) {
  const auto kernel = observe_kernel<Batch>;
  const observe_parameters p{arguments, rotation_unit(arguments.head_dim, arguments.rotate),
                             vectors_at_once(arguments.head_dim)};
  const std::size_t shared_bytes =
      sizeof(float) * (batch_floats + static_cast<std::size_t>(p.batch * p.query_floats()));
  if (launch_status s = allow_shared_memory(kernel, shared_bytes); !s.ok()) return s;
  const int blocks = (arguments.head_dim + 63) / 64;
  const dim3 grid(
      static_cast<unsigned>(arguments.count) * static_cast<unsigned>(arguments.kv_heads),
      static_cast<unsigned>(blocks * (blocks + 1) / 2));
  kernel<<<grid, block_threads, shared_bytes, stream>>>(p);
  return last_launch();
}

// lambda of one matrix, by every warp on its own.
__device__ inline float damping_of(const factor_arguments& a, const float* sums) {
  float trace = 0.0f;
  for (int i = lane_index() & 15; i < a.head_dim; i += 16) trace = trace + sums[i * a.head_dim + i];
#pragma unroll
  for (int half = 8; half > 0; half /= 2) trace = trace + __shfl_xor_sync(all_lanes, trace, half);
  return std::fma(trace, a.damping / static_cast<float>(a.head_dim), 1e-20f);
}

// Shared memory of a factorisation in registers. A *run*: 16 columns, of which the pivots are taken
// together.
template <int Steps>
struct factor_memory {
  static constexpr int run = 16;
  static constexpr int rows = run * Steps;
  static constexpr int panel_row_floats = run + 4;  // four rows at a time on different banks

  // Four rows that a thread needs, 16 apart, one after another.
  __device__ static int place_of(int row) { return row / 64 * 64 + row % 16 * 4 + row / 16 % 4; }

  alignas(16) float panel[rows * panel_row_floats];  // the run's columns, row by row
  alignas(16) float columns[run][rows];              // of each pivot, rows by place_of
  alignas(16) float scaled[run][rows];               // the same divided by the pivot
};

// One matrix per block, head_dim up to 128, in registers: thread (y, x) has entries (y + 16 i,
// x + 16 j), i <= j. Those below the diagonal take part and mean nothing.
//
// The pivots are one chain, so a run's pivots are taken inside warps, without barriers: lanes 0 to
// 15 have the run's own rows, the same in every warp, and lanes 16 to 31 have 16 rows above them.
// Then the block subtracts all 16 products from the columns in front, in the order of pivots.
template <int Steps>
class matrix_in_registers {
 public:
  __device__ matrix_in_registers(const float* sums, float* out, int n, factor_memory<Steps>& memory)
      : sums_(sums), out_(out), n_(n), memory_(memory) {}

  __device__ void factorize(float lambda) {
#pragma unroll
    for (int i = 0; i < Steps; ++i)
#pragma unroll
      for (int j = i; j < Steps; ++j) {
        const int row = y() + 16 * i;
        const int col = x() + 16 * j;
        entry_[i][j] = row <= col && col < n_ ? sums_[row * n_ + col] : 0.0f;
        if (row == col) entry_[i][j] = entry_[i][j] + lambda;
      }
    for_run(n_ / run - 1, [this](auto last) { put_panel<last>(); });
#pragma unroll 1
    for (int r = n_ / run - 1; r >= 0; --r) {
      __syncthreads();  // the first: of sums that are the output
      take_pivots(r);
      __syncthreads();
      for_run(r, [this](auto now) { subtract<now>(); });
    }
    for (int row = y(); row < n_; row += 16)
      for (int col = x(); col < row / 16 * 16; col += 16) out_[row * n_ + col] = 0.0f;
  }

 private:
  static constexpr int run = factor_memory<Steps>::run;

  __device__ static int x() { return static_cast<int>(threadIdx.x) & 15; }
  __device__ static int y() { return static_cast<int>(threadIdx.x) >> 4; }

  // Calls f with the number of run r as a constant, since elements in registers have numbers that
  // the compiler must know: a copy for each run.
  template <int Run = 0, class F>
  __device__ static void for_run(int r, F f) {
    if constexpr (Run < Steps) {
      if (r == Run)
        f(std::integral_constant<int, Run>{});
      else
        for_run<Run + 1>(r, f);
    }
  }

  template <int Run>
  __device__ void put_panel() {
#pragma unroll
    for (int i = 0; i <= Run; ++i)
      memory_.panel[(y() + 16 * i) * memory_.panel_row_floats + x()] = entry_[i][Run];
  }

  __device__ void take_pivots(int r) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = lane_index();
    if (warp >= max(r, 1)) return;
    const bool is_own = lane < run;
    const int row = is_own ? run * r + lane : run * warp + lane - run;
    float v[run];
#pragma unroll
    for (int k = 0; k < run; k += 4)
      load_quad(memory_.panel + row * memory_.panel_row_floats + k, v + k);
    const int place = memory_.place_of(row);
#pragma unroll
    for (int k = run - 1; k >= 0; --k) {
      const float inverse_pivot = 1.0f / __shfl_sync(all_lanes, v[k], k);
      const float column = v[k];
      v[k] = __fmul_rn(column, inverse_pivot);
#pragma unroll
      for (int j = k - 1; j >= 0; --j)
        v[j] = std::fma(-v[k], __shfl_sync(all_lanes, column, j), v[j]);
      if (!is_own) {
        memory_.columns[k][place] = column;
        memory_.scaled[k][place] = v[k];
      }
    }
    if (is_own ? warp > 0 : r == 0) return;
    float* const out = out_ + row * n_ + run * r;
#pragma unroll
    for (int k = 0; k < run; ++k) out[k] = is_own && k <= lane ? 0.0f : v[k];
  }

  // The products of a run, and the columns of the next one put out.
  template <int Run>
  __device__ void subtract() {
    if constexpr (Run > 0) {
#pragma unroll 2
      for (int k = run - 1; k >= 0; --k) {
        float u[Steps];
        float c[Steps];
#pragma unroll
        for (int i = 0; i < Run; i += 4) {
          load_quad(memory_.scaled[k] + 16 * i + 4 * y(), u + i);
          load_quad(memory_.columns[k] + 16 * i + 4 * x(), c + i);
        }
#pragma unroll
        for (int i = 0; i < Run; ++i)
#pragma unroll
          for (int j = i; j < Run; ++j) entry_[i][j] = std::fma(-u[i], c[j], entry_[i][j]);
      }
      put_panel<Run - 1>();
    }
  }

  const float* const sums_;
  float* const out_;
  const int n_;
  factor_memory<Steps>& memory_;
  float entry_[Steps][Steps];
};

template <int Steps>
KVARN_KERNEL void __launch_bounds__(block_threads, 2)
    factorize_in_registers(const __grid_constant__ factor_arguments a) {
  static_assert(Steps % 4 == 0 && Steps <= block_threads / 32 + 1);
  __shared__ factor_memory<Steps> memory;
  const int n = a.head_dim;
  const std::int64_t place = std::int64_t{blockIdx.x} * n * n;
  const float lambda = damping_of(a, a.sums + place);
  matrix_in_registers<Steps>(a.sums + place, a.factors + place, n, memory).factorize(lambda);
}

inline constexpr int factor_threads = 512;

// One matrix per block, any head_dim, in place of the output.
template <int Threads>
KVARN_KERNEL void __launch_bounds__(Threads)
    factorize_in_memory(const __grid_constant__ factor_arguments a) {
  __shared__ float column[max_head_dim];
  const int n = a.head_dim;
  const float* const sums = a.sums + std::int64_t{blockIdx.x} * n * n;
  float* const matrix = a.factors + std::int64_t{blockIdx.x} * n * n;
  const int thread = static_cast<int>(threadIdx.x);
  const float lambda = damping_of(a, sums);
  __syncthreads();  // of sums that are the output
  for (int e = thread; e < n * n; e += Threads) {
    const int i = e / n;
    const int j = e % n;
    matrix[e] = j < i ? 0.0f : i == j ? sums[e] + lambda : sums[e];
  }
  for (int k = n - 1; k > 0; --k) {
    __syncthreads();
    for (int i = thread; i < k; i += Threads) column[i] = matrix[i * n + k];
    const float inverse_pivot = 1.0f / matrix[k * n + k];
    __syncthreads();
    for (int i = thread >> 5; i < k; i += Threads / 32) {
      const float u = __fmul_rn(column[i], inverse_pivot);
      for (int j = i + lane_index(); j < k; j += 32)
        matrix[i * n + j] = std::fma(-u, column[j], matrix[i * n + j]);
      if (lane_index() == 0) matrix[i * n + k] = u;
    }
  }
  __syncthreads();
  for (int i = thread; i < n; i += Threads) matrix[i * n + i] = 0.0f;
}

inline launch_status check_head_dim(int head_dim) {
  const status s = validate(tile_layout{.head_dim = head_dim});
  return s.ok() ? launch_status{} : refuse(s.message());
}

}  // namespace detail

inline launch_status observe(const observe_arguments& arguments, cudaStream_t stream) {
  using detail::refuse;
  if (launch_status s = detail::check_head_dim(arguments.head_dim); !s.ok()) return s;
  if (arguments.kv_heads < 1 || arguments.heads < 1)
    return refuse("kv_heads is " + std::to_string(arguments.kv_heads) + " and heads " +
                  std::to_string(arguments.heads) + "; both must be at least 1");
  if (arguments.count < 0)
    return refuse("count is " + std::to_string(arguments.count) + "; it must not be negative");
  if (launch_status s =
          detail::check_product("count", arguments.count, "kv_heads", arguments.kv_heads);
      !s.ok() || arguments.count == 0)
    return s;
  if (arguments.sequences == nullptr) return refuse("sequences is null");
  const int dim = arguments.head_dim;
  if (dim == 64) return detail::launch_observing<detail::batch_in_lanes<64>>(arguments, 0, stream);
  if (dim == 128)
    return detail::launch_observing<detail::batch_in_lanes<128>>(arguments, 0, stream);
  return detail::launch_observing<detail::batch_in_memory>(
      arguments, detail::token_buffer_floats(dim, detail::vectors_at_once(dim)), stream);
}

inline launch_status factorize(const factor_arguments& arguments, cudaStream_t stream) {
  if (launch_status s = detail::check_head_dim(arguments.head_dim); !s.ok()) return s;
  if (arguments.count < 0)
    return detail::refuse("count is " + std::to_string(arguments.count) +
                          "; it must not be negative");
  if (arguments.count == 0) return {};
  if (arguments.sums == nullptr || arguments.factors == nullptr)
    return detail::refuse("sums or factors is null");
  const auto blocks = static_cast<unsigned>(arguments.count);
  if (arguments.head_dim <= 128)
    detail::factorize_in_registers<8><<<blocks, detail::block_threads, 0, stream>>>(arguments);
  else
    detail::factorize_in_memory<detail::factor_threads>
        <<<blocks, detail::factor_threads, 0, stream>>>(arguments);
  return detail::last_launch();
}

}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
