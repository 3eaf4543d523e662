// What attention kernels share: how the work of a sequence is cut, and what becomes of finished
// rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../format/tile_layout.hpp"
#include "attention_tile.cuh"
#include "device.cuh"
#include "rotation.cuh"
#include "tokens.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

inline constexpr int groups_per_chunk = 8;
inline constexpr int chunks_per_section = 4;
inline constexpr int exact_chunk = 128;  // tokens

// A number by which a kernel divides: quotients of 0 <= a < 2^31 are exact.
struct divisor {
  std::uint32_t factor;  // 2^(31 + shift) / value, rounded up
  int shift;

  // 1 in the place of smaller ones.
  static divisor of(int value) {
    const auto v = static_cast<std::uint64_t>((std::max)(value, 1));
    int shift = 0;
    while ((std::uint64_t{1} << shift) < v) ++shift;
    const std::uint64_t power = std::uint64_t{1} << (31 + shift);
    return {static_cast<std::uint32_t>((power + v - 1) / v), shift};
  }
  __device__ int quotient(int a) const {
    return static_cast<int>(__umulhi(2u * static_cast<unsigned>(a), factor) >> shift);
  }
};

struct attention_parameters {
  attention_arguments arguments;
  divisor by_splits;
  divisor by_heads;
  divisor by_kv_heads;
  float scale;      // of logits in units of log 2, with the rotation's factor
  float out_scale;  // of the rotation back
  soft_cap cap;     // in units of log 2
  int window;       // tokens that a row sees; all: more than there can be
  int block_rows;   // rows of queries in a block of threads, 4 or 8
  int splits;       // blocks of threads that a sequence is cut into
  int partials;     // sums that one sequence stores, at most
  // The blocks of a sequence are one cluster (or one block), which joins their sums: each block
  // those of 2^row_shift rows. Else a second kernel does.
  bool joins;
  int row_shift;
  int near_partials;  // up to so many are stored in shared memory of the block that joins them
  std::uint32_t page_bytes;
  int lag;  // by how many steps parts are joined later: 1 where there is room for those of two
  // Offsets into shared memory, in bytes.
  int query;
  int sums;
  int states;
  int parts;
  int stored;
};

KVARN_INLINE constexpr int blocks_of(int count, int size) { return (count + size - 1) / size; }

// The chunks of one sequence, and how blocks of threads share them: by the tokens that it has when
// the kernel runs, not by the bounds of the call.
struct sequence_chunks {
  int sink;
  int sealed;
  int tail;

  // Of counts of tokens, and of pages.
  KVARN_INLINE static constexpr sequence_chunks of(int sink, int pages, int tail) {
    return {blocks_of(sink, exact_chunk), blocks_of(pages, groups_per_chunk),
            blocks_of(tail, exact_chunk)};
  }
  KVARN_INLINE constexpr int count() const { return sink + sealed + tail; }

  // How many each of `splits` blocks takes, whole sections; 0: where that would give some more than
  // an eighth too many, each takes about the same time.
  __device__ int run(int splits, const divisor& by_splits) const {
    const int even = by_splits.quotient(count() + splits - 1);
    const int whole = chunks_per_section * blocks_of(even, chunks_per_section);
    return splits == 1 || (even >= chunks_per_section && 8 * whole <= 9 * even) ? whole : 0;
  }
  static constexpr int longest_uneven_run = 21;  // on average, of blocks with run 0
  // More than a device has places for blocks. With these, and below 56 chunks for each where the
  // run is 0, what `first` multiplies stays below 2^31.
  static constexpr int most_splits = 2048;
  // How many are summed up before they are stored.
  KVARN_INLINE static constexpr int partial(int run) { return run > 0 ? chunks_per_section : 1; }

  // The first chunk of block `block` of `splits`; that of `splits` is the end. Exact chunks take
  // about a quarter of the time of sealed ones.
  __device__ int first(int block, int splits, const divisor& by_splits, int run) const {
    const auto within = [](int i, int last) { return i < 0 ? 0 : i > last ? last : i; };
    if (run > 0) return within(block * run, count());
    if (splits >= count()) return within(block, count());
    // Chunks whose middle is in front of this, in halves of the time of an exact one.
    const int time = by_splits.quotient(block * (2 * sink + 8 * sealed + 2 * tail));
    return within(time / 2, sink) + within((time - 2 * sink + 3) / 8, sealed) +
           within((time - 2 * sink - 8 * sealed) / 2, tail);
  }
};

// Sizes that follow from the format alone.
template <cache_format Format>
struct attention_layout {
  static constexpr int key_dim = Format.key_head_dim;
  static constexpr int value_dim = Format.value_head_dim;
  static constexpr int key_bytes = static_cast<int>(Format.key_layout().record_bytes());
  static constexpr int value_bytes = static_cast<int>(Format.value_layout().record_bytes());
  static constexpr int slot_bytes = key_bytes + value_bytes;
  static constexpr int padded_key_dim = 64 * blocks_of(key_dim, 64);
  // In floats. The 4 more of a query's row hold its unit and its end; they, and the 8 of a part's
  // row, keep lanes on different banks.
  static constexpr int query_stride = padded_key_dim + 4;
  static constexpr int part_stride = value_dim + 8;
  // In binary16; the 32 more keep lanes on different banks.
  static constexpr int query_part_stride = padded_key_dim + 32;
  // What a row of queries takes in shared memory: in FP32, and in two parts.
  static constexpr int query_floats = query_stride + query_part_stride;
  // Elements of a query in shared memory: what scores with it are multiplied by, and (as bits of an
  // integer) how many tokens it is behind the block's first row.
  static constexpr int query_unit = padded_key_dim;
  static constexpr int query_offset = padded_key_dim + 1;
  static constexpr int stored_stride = value_dim + 4;
  // [leaf][row][part_stride], then the maximum and the sum of each.
  static constexpr int part_floats = groups_per_chunk * 4 * (part_stride + 2);
};

// 16 lanes take a row of head vectors: lane l has channels 8 (16 k + l) + i = v[k][i].
template <int Dim>
inline constexpr int lane_runs = blocks_of(Dim, 128);
template <int Dim>
using lane_channels = float[lane_runs<Dim>][8];

// Calls f(x, channel) for those of this lane.
template <int Dim, class F>
__device__ inline void for_channels(lane_channels<Dim>& v, F f) {
#pragma unroll
  for (int k = 0; k < lane_runs<Dim>; ++k) {
    const int first = 8 * (16 * k + (static_cast<int>(threadIdx.x) & 15));
    if (Dim % 128 != 0 && first >= Dim) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) f(v[k][i], first + i);
  }
}

// The rotation of such rows, where the dimension is a power of two.
template <int Dim>
__device__ inline void rotate_row(lane_channels<Dim>& v, int l) {
  constexpr int lanes = Dim < 128 ? Dim / 8 : 16;
  rotate_in_lanes<lanes>(v, l & (lanes - 1), 1.0f);
}

// In nats.
__device__ inline float log_of_sum(softmax_state s) {
  return s.sum > 0.0f ? static_cast<float>((s.maximum + log2(static_cast<double>(s.sum))) *
                                           0.69314718055994531)
                      : __int_as_float(0xff800000);
}

// From sums to the output: the sink logit, the division, the rotation back. `sums` holds `rows`
// rows and `state(row)` their maximum and sum; the block is synchronised before.
template <int Dim, int Threads, class State>
__device__ void finish_rows(const attention_parameters& p, const attention_sequence& sequence,
                            int kv_head, int first_row, int rows, const token_buffer<0>& sums,
                            State state) {
  const attention_arguments& a = p.arguments;
  constexpr int core = hadamard_core(Dim);
  constexpr int steps = Dim / 16;
  const int thread = static_cast<int>(threadIdx.x);
  if (core != 1 && a.rotate_output) {
    for (int unit = thread; unit < rows * steps; unit += Threads) {
      float* const place = sums.at(unit / steps, 16 * (unit % steps));
      float v[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] = place[4 * i];
      rotate_neighbours(v, Dim / core);
#pragma unroll
      for (int i = 0; i < 16; ++i) place[4 * i] = v[i];
    }
    rotate_cores<Threads>(sums, rows);
  }
  const int l = thread & 15;
  for (int first = 2 * (thread >> 5); first < rows; first += Threads / 16) {
    const int row = first + (thread >> 4 & 1);
    lane_channels<Dim> v = {};
    if (row < rows) for_channels<Dim>(v, [&](float& x, int c) { x = *sums.at(row, c); });
    if (core == 1 && a.rotate_output) rotate_row<Dim>(v, l);
    if (row >= rows) break;
    const int token = p.by_heads.quotient(first_row + row);
    const int head = kv_head * a.heads + first_row + row - token * a.heads;
    const softmax_state s = state(row);
    int maximum = s.maximum;
    float sum = s.sum;
    float factor = 1.0f;
    const float logit = a.sink_logits != nullptr ? a.sink_logits[head] * 1.44269504f : unseen;
    if (logit > unseen) {
      maximum = max(s.maximum, rounded_maximum(logit));
      factor = power(s.maximum - maximum);
      sum = s.sum * factor + exp2_approx(logit - static_cast<float>(maximum));
    }
    const float norm = sum > 0.0f ? factor / sum * p.out_scale : 0.0f;
    for_channels<Dim>(v, [norm](float& x, int) { x = x * norm; });
    const std::int64_t place = token * a.out_strides.token + head * a.out_strides.head;
#pragma unroll
    for (int k = 0; k < lane_runs<Dim>; ++k) {
      const int c = 8 * (16 * k + l);
      if (Dim % 128 == 0 || c < Dim)
        store_eight(sequence.out, a.out_type, place + c * a.out_strides.channel,
                    a.out_strides.channel, v[k]);
    }
    if (sequence.lse != nullptr && l == 0)
      sequence.lse[token * a.kv_heads * a.heads + head] = log_of_sum({maximum, sum});
  }
}

// Adds to a state what comes to it; `first` and `second` are the factors of both sides.
__device__ inline softmax_state joined(const softmax_state& a, const softmax_state& b, float& first,
                                       float& second) {
  const int maximum = max(a.maximum, b.maximum);
  first = power(a.maximum - maximum);
  second = power(b.maximum - maximum);
  return {maximum, std::fma(a.sum, first, b.sum * second)};
}

// What a warp joins next.
struct place_of_join {
  int chunk;
  int summed;  // chunks in the section
};

// The sealed groups of a block.
struct group_range {
  int first;
  int end;
  int whole;  // times eight chunks at the beginning, of which a warp takes whole ones
};

// A sealed group that a warp is to attend to.
struct alignas(16) listed_group {
  int page;
  int count;  // tokens; 0 where no row sees any
  int ahead;  // tokens from its first to the end of what the block's first row sees
};

// What a block of threads is to do. Every warp has a copy in shared memory: there are no registers
// for numbers that are seldom used.
struct block_work {
  attention_sequence sequence;
  std::int64_t first_end;  // one past the last position that the first row sees
  const std::byte* base;   // of the KV head in page 0
  int spread;              // how many tokens more the last row sees
  int kv_head;
  int first_row;
  int rows;
  int next;      // chunk that is attended to
  int end;       // of the chunks
  int partial;   // chunks that are summed up before they are stored
  int partials;  // what the sequence stores
  place_of_join join;
  group_range sealed;
  int sink_chunks;
  int first_tail;           // chunk
  int first_whole;          // chunk
  listed_group groups[32];  // that the warp takes next, from a multiple of 32 on
};

// Barriers of the two records of every warp, of parts that are written and parts that are free
// again. Records stand behind them: so aligned copies are fastest (at odd multiples of 16 bytes a
// call takes a fifth longer).
template <int Warps>
struct alignas(128) attention_barriers {
  std::uint64_t records[Warps][2];
  std::uint64_t ready[2];
  std::uint64_t free[2];
  block_work work[Warps];
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
