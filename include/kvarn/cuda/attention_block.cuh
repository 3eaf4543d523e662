// One block of threads on its way through a run of chunks of one sequence and KV head. What it does
// with them: attention.cuh.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../format/tile_layout.hpp"
#include "attention_combine.cuh"
#include "attention_exact.cuh"
#include "attention_rows.cuh"
#include "attention_tile.cuh"
#include "device.cuh"
#include "tensor_core.cuh"
#include "tokens.cuh"

namespace kvarn::cuda {
inline namespace KVARN_CUDA_NAMESPACE {
namespace detail {

// `Blocks`: of four rows, which go through a tile together.
template <cache_format Format, int Warps, int Blocks>
class attention_block {
  static_assert(Blocks == 1 || Warps == 8, "a warp keeps the sums of one leaf of a chunk");

 public:
  __device__ attention_block(const attention_parameters& p, std::byte* shared,
                             attention_barriers<Warps>& barriers)
      : p_(p),
        shared_(shared),
        barriers_(barriers),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        keys_(shared + warp_ * layout::slot_bytes, &barriers.records[warp_][0]),
        values_(shared + warp_ * layout::slot_bytes + layout::key_bytes,
                &barriers.records[warp_][1]),
        work_(barriers.work[warp_]) {}

  __device__ void run() {
    // What can be done before the kernels in front have ended.
    const int heads = p_.arguments.heads;
    const int row_block = p_.by_kv_heads.quotient(static_cast<int>(blockIdx.y));
    const int kv_head = static_cast<int>(blockIdx.y) - row_block * p_.arguments.kv_heads;
    const int first_row = row_block * block_rows;
    const int first_token = p_.by_heads.quotient(first_row);
    const std::int64_t query_place = place_of_query(kv_head, first_row);
    init_barriers();
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)
      prefetch(p_.arguments.sequences + blockIdx.z);
    wait_for_kernels_before();

    copy_sequence();
    const int rows = min(sequence().tokens * heads - first_row, block_rows);
    // Behind the records queries would wait, and all warps for each other.
    channel_run raw[lane_runs<layout::key_dim>];
    request_queries(raw, query_place, kv_head, first_row, rows);
    const auto chunks =
        sequence_chunks::of(sequence().sink.count, sequence().page_count, sequence().tail.count);
    const int run = chunks.run(p_.splits, p_.by_splits);
    const int first = chunks.first(static_cast<int>(blockIdx.x), p_.splits, p_.by_splits, run);
    const int end = chunks.first(static_cast<int>(blockIdx.x) + 1, p_.splits, p_.by_splits, run);
    if (rows <= 0 || (first >= end && !p_.joins)) return;
    const int first_sealed = max(first - chunks.sink, 0);
    const int end_sealed = min(max(end - chunks.sink, 0), chunks.sealed);
    const group_range groups{groups_per_chunk * first_sealed,
                             min(groups_per_chunk * end_sealed, sequence().page_count),
                             max(end_sealed - first_sealed, 0) / groups_per_chunk};
    const page_entry first_entry = entry(groups, lane_index());
    if (is_cluster()) arrive_in_cluster<false>();
    if (lane_index() == 0) {
      work_.first_row = first_row;
      work_.first_end = sequence().position + first_token + 1;
      work_.spread = p_.by_heads.quotient(first_row + rows - 1) - first_token;
      work_.kv_head = kv_head;
      work_.base = p_.arguments.pages + Format.key_offset(work_.kv_head);
      work_.rows = rows;
      work_.next = first;
      work_.end = end;
      work_.partial = chunks.partial(run);
      work_.partials =
          work_.partial == 1 ? chunks.count() : blocks_of(chunks.count(), chunks_per_section);
      work_.join = {first, 0};
      work_.sealed = groups;
      work_.sink_chunks = chunks.sink;
      work_.first_tail = chunks.sink + chunks.sealed;
      work_.first_whole = chunks.sink + first_sealed;
    }
    __syncwarp();
    prepare_queries(raw, query_place, kv_head, first_row, rows);
    list_groups(first_entry);
    advance();
    start_keys();
    start_values();
    prefetch_exact(next_exact(first));
    if (is_cluster()) wait_for_cluster();  // all its blocks have begun
    __syncthreads();                       // queries are there
    int step = 0;
    while (attend_step(step)) step += Blocks;
    if (p_.joins) finish();
  }

 private:
  using layout = attention_layout<Format>;
  static constexpr int threads = 32 * Warps;
  static constexpr int block_rows = 4 * Blocks;
  static constexpr int channels = layout::value_dim / 8;  // of a lane
  static constexpr int warps_per_row = Warps / 4;         // when parts are joined

  __device__ const attention_sequence& sequence() const { return work_.sequence; }
  __device__ void copy_sequence() const {
    constexpr int words = sizeof(attention_sequence) / sizeof(std::uint32_t);
    static_assert(words <= 32);
    if (lane_index() < words)
      reinterpret_cast<std::uint32_t*>(&work_.sequence)[lane_index()] =
          reinterpret_cast<const std::uint32_t*>(p_.arguments.sequences + blockIdx.z)[lane_index()];
    __syncwarp();
  }

  __device__ void init_barriers() const {
    if (lane_index() != 0) return;
    keys_.init();
    values_.init();
    if (warp_ == 0)
      for (int i = 0; i < 2; ++i) {
        shared_barrier(&barriers_.ready[i]).init(threads);
        shared_barrier(&barriers_.free[i]).init(threads);
      }
    shared_barrier::fence_init();
  }

  // Entry n of those this warp takes: 64 / Warps of every eight chunks that are taken whole, then
  // one (or two) of every chunk.
  __device__ page_entry entry(const group_range& groups, int n) const {
    constexpr int per_eight = 64 / Warps;
    int group = groups.first + groups_per_chunk * 8 * (n / per_eight) +
                groups_per_chunk * (warp_ + Warps * (n % per_eight / groups_per_chunk)) +
                n % groups_per_chunk;
    const int behind = n - per_eight * groups.whole;
    if (behind >= 0)
      group = groups.first + groups_per_chunk * 8 * groups.whole + warp_ + Warps * behind;
    if (group >= groups.end) return {0, 0, 0};
    const auto raw = __ldg(reinterpret_cast<const uint4*>(sequence().pages + group));
    return {static_cast<std::int64_t>(raw.x | (static_cast<std::uint64_t>(raw.y) << 32)),
            static_cast<std::int32_t>(raw.z), static_cast<std::int32_t>(raw.w)};
  }
  // Writes down the next groups of this warp, of which a lane has the entry of one.
  __device__ void list_groups(const page_entry& entry) const {
    // What of the group is in front of the end of what the first row sees.
    const int ahead = static_cast<int>(work_.first_end - entry.position);
    const bool is_seen = ahead + work_.spread > 0 && ahead - entry.count < p_.window;
    __syncwarp();
    work_.groups[lane_index()] = {entry.page, is_seen ? entry.count : 0, ahead};
    __syncwarp();
  }
  // The next group of this warp.
  __device__ void advance() {
    if (taken_ % 32 == 0 && taken_ > 0) list_groups(entry(work_.sealed, taken_ + lane_index()));
    loaded_ = work_.groups[taken_ % 32];
    ++taken_;
  }
  __device__ const std::byte* record() const {
    return work_.base +
           static_cast<std::uint64_t>(static_cast<std::uint32_t>(loaded_.page)) * p_.page_bytes;
  }
  __device__ void start_keys() const {
    if (loaded_.count > 0)
      keys_.start(record(), layout::key_bytes);
    else
      record_slot::skip();
  }
  __device__ void start_values() const {
    if (loaded_.count > 0)
      values_.start(record() + layout::key_bytes, layout::value_bytes);
    else
      record_slot::skip();
  }

  __device__ float* query(int row) const {
    return reinterpret_cast<float*>(shared_ + p_.query) + row * layout::query_stride;
  }
  // A row of the queries rounded to binary16 (part 0), and what the rounding left (part 1).
  __device__ std::uint16_t* query_parts(int row, int part) const {
    return reinterpret_cast<std::uint16_t*>(query(block_rows)) +
           (2 * row + part) * layout::query_part_stride;
  }
  __device__ int query_offset(int row) const {
    return __float_as_int(query(row)[layout::query_offset]);
  }
  // Head vectors at the beginning and at the end, where there are no parts.
  __device__ token_buffer<0> vectors(int dim) const {
    return {reinterpret_cast<float*>(shared_ + p_.parts), block_rows, dim};
  }

  // Queries come as lane_channels, row by row. Those of other dimensions than powers of two are
  // rotated in shared memory before.
  static constexpr bool rotates_in_lanes = hadamard_core(layout::key_dim) == 1;
  __device__ static int query_row() { return static_cast<int>(threadIdx.x) >> 4; }
  __device__ static int query_lane() { return static_cast<int>(threadIdx.x) & 15; }

  __device__ token_source queries(int kv_head) const {
    const attention_arguments& a = p_.arguments;
    return {sequence().queries, a.query_type, a.heads,
            std::int64_t{kv_head} * a.heads * a.query_strides.head, a.query_strides};
  }
  // The element at which this lane's channels of its row begin.
  __device__ std::int64_t place_of_query(int kv_head, int first_row) const {
    const attention_arguments& a = p_.arguments;
    const int row = first_row + query_row();
    const int token = p_.by_heads.quotient(row);
    return token * a.query_strides.token +
           (std::int64_t{kv_head} * a.heads + row - token * a.heads) * a.query_strides.head +
           8 * query_lane() * a.query_strides.channel;
  }
  __device__ void request_queries(channel_run (&raw)[lane_runs<layout::key_dim>],
                                  std::int64_t place, int kv_head, int first_row, int rows) const {
    const token_source source = queries(kv_head);
    if constexpr (!rotates_in_lanes) {
      replaced_values replaced;
      load_tokens<1, threads>(source, first_row, rows, !p_.arguments.queries_rotated,
                              vectors(layout::key_dim), replaced);
    } else if (query_row() < rows) {
#pragma unroll
      for (int k = 0; k < lane_runs<layout::key_dim>; ++k)
        if (layout::key_dim % 128 == 0 || 8 * (16 * k + query_lane()) < layout::key_dim)
          raw[k].request(source, place + 128 * k, source.is_vectorised());
    }
  }
  // Rotates them and puts them where scores take them from, with magnitudes of at most
  // largest_query. The block is not synchronised.
  __device__ void prepare_queries(const channel_run (&raw)[lane_runs<layout::key_dim>],
                                  std::int64_t place, int kv_head, int first_row, int rows) const {
    constexpr int dim = layout::key_dim;
    const attention_arguments& a = p_.arguments;
    const int row = query_row();
    const int l = query_lane();
    if (2 * warp_ < block_rows) {
      lane_channels<dim> v = {};
      if (row < rows) {
        if constexpr (!rotates_in_lanes) {
          const auto buffer = vectors(dim);
          for_channels<dim>(v, [&](float& x, int c) { x = *buffer.at(row, c); });
        } else {
          const token_source source = queries(kv_head);
          replaced_values replaced;
#pragma unroll
          for (int k = 0; k < lane_runs<dim>; ++k) {
            const int c = 8 * (16 * k + l);
            if (dim % 128 != 0 && c >= dim) break;
            raw[k].take(source, place + 128 * k * source.strides.channel, source.is_vectorised(),
                        query(row) + c, v[k]);
            sanitize_run<1>(v[k], query(row) + c, replaced);
          }
        }
      }
      if constexpr (rotates_in_lanes)
        if (!a.queries_rotated) rotate_row<dim>(v, l);
      float largest = 1e-30f;
      for_channels<dim>(v, [&](float& x, int) { largest = fmaxf(largest, fabsf(x)); });
#pragma unroll
      for (int lane = 1; lane < 16; lane *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, lane));
      const float inverse = largest_query / largest;
#pragma unroll
      for (int k = 0; k < lane_runs<layout::padded_key_dim>; ++k) {
        const int c = 8 * (16 * k + l);
        if (c >= layout::padded_key_dim) break;
        float x[8];
        std::uint16_t parts[2][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i] = v[k][i] * inverse;
          const std::uint16_t rounded = float16(x[i]).bits;
          parts[0][place_of_channel(i)] = rounded;
          parts[1][place_of_channel(i)] = float16(x[i] - to_float(rounded)).bits;
        }
        auto* const out = reinterpret_cast<float4*>(query(row) + c);
        out[0] = make_float4(x[0], x[1], x[2], x[3]);
        out[1] = make_float4(x[4], x[5], x[6], x[7]);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const auto pair = [&](int i) {
            return parts[part][2 * i] | static_cast<std::uint32_t>(parts[part][2 * i + 1]) << 16;
          };
          *reinterpret_cast<uint4*>(query_parts(row, part) + c) =
              make_uint4(pair(0), pair(1), pair(2), pair(3));
        }
      }
      if (l == 0) {
        query(row)[layout::query_unit] = largest * (1.0f / largest_query) * p_.scale;
        query(row)[layout::query_offset] =
            __int_as_float(p_.by_heads.quotient(first_row + row) - p_.by_heads.quotient(first_row));
      }
    }
  }

  // The results of one step (4 rows with one chunk): leaf by leaf the values of each row, then the
  // states.
  __device__ float* parts(int step) const {
    return reinterpret_cast<float*>(shared_ + p_.parts) + (step & p_.lag) * layout::part_floats;
  }
  __device__ float* part(int step, int leaf, int row) const {
    return parts(step) + (4 * leaf + row) * layout::part_stride;
  }
  __device__ softmax_state& part_state(int step, int leaf, int row) const {
    return reinterpret_cast<softmax_state*>(parts(step) + groups_per_chunk * 4 *
                                                              layout::part_stride)[4 * leaf + row];
  }
  // Until all warps have joined what was there before.
  __device__ void wait_for_parts(int step) const {
    if (step > p_.lag) shared_barrier(&barriers_.free[step & p_.lag]).wait((step >> p_.lag) - 1);
  }
  __device__ bool is_sealed(int chunk) const {
    return chunk >= work_.sink_chunks && chunk < work_.first_tail;
  }
  // Whether each warp takes one of this chunk and the next seven.
  __device__ bool is_whole(int chunk) const {
    return chunk >= work_.first_whole && chunk < work_.first_whole + 8 * work_.sealed.whole;
  }

  // A chunk, or eight, of all rows. False where there is none; then joins the last one.
  __device__ bool attend_step(int step) {
    float sum[Blocks][channels];
    softmax_state state[Blocks];
    if (work_.next < work_.end) {
      const int groups = is_whole(work_.next) ? groups_per_chunk : 1;
      const int last_leaf = Blocks > 1 ? warp_ + 1 : groups_per_chunk;
#pragma unroll 1
      for (int leaf = warp_; leaf < last_leaf; leaf += Warps) {
        if (is_sealed(work_.next)) {
          clear(state, sum);
          attend_groups(groups, state, sum);
          if constexpr (Blocks == 1) leave_sums(step, leaf, state, sum, 0);
        } else if (Blocks == 1) {
          leave_exact(step, leaf, 0);
        }
      }
    }
#pragma unroll 1
    for (int b = 0; b < Blocks; ++b) {
      const bool has_chunk = work_.next < work_.end;
      if (has_chunk) {
        if constexpr (Blocks > 1) {
          if (is_sealed(work_.next)) {
            leave_sums(step + b, warp_, state, sum, b);
          } else {
            leave_exact(step + b, warp_, b);
            clear(state, sum);  // so that they need no registers meanwhile
          }
        }
        shared_barrier(&barriers_.ready[(step + b) & p_.lag]).arrive();
      }
      const int joined = step + b - p_.lag;
      if (joined >= 0 && joined < step + (has_chunk ? Blocks : 0)) join_parts(joined);
    }
    const int chunk = work_.next;
    __syncwarp();
    const int next = chunk + (is_whole(chunk) ? groups_per_chunk : 1);
    if (lane_index() == 0) work_.next = next;
    __syncwarp();
    return (p_.lag > 0 ? chunk : next) < work_.end;
  }

  __device__ static void clear(softmax_state (&state)[Blocks], float (&sum)[Blocks][channels]) {
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
      state[b] = {nothing_seen, 0.0f};
#pragma unroll
      for (float& x : sum[b]) x = 0.0f;
    }
  }

  // The next `count` groups of this warp, added to what it has.
  __device__ void attend_groups(int count, softmax_state (&state)[Blocks],
                                float (&sum)[Blocks][channels]) {
#pragma unroll 1
    for (const int end = taken_ + count; taken_ < end;) {
      if (loaded_.count > 0) {
        attend_group(state, sum);
        continue;
      }
      advance();
      start_keys();
      start_values();
    }
  }

  // The loaded group. The next takes its place.
  __device__ void attend_group(softmax_state (&state)[Blocks], float (&sum)[Blocks][channels]) {
    const std::byte* const keys = shared_ + warp_ * layout::slot_bytes;
    const int row = lane_index() & 3;
    score_array<Format> scores[Blocks];
    keys_.wait(use_);
    float slope[Blocks];
    score_tile<Format>(
        keys, [&](int b) { return query(row + 4 * b); },
        [&](int b) { return query_parts((lane_index() >> 3) + 4 * b, (lane_index() >> 2) & 1); },
        scores, slope);
    const int count = loaded_.count;
    const int ahead = loaded_.ahead;
    const bool sees_all =
        count == Format.group && ahead >= Format.group && ahead + work_.spread <= p_.window;
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
      // Above 0, so that what a row does not see stays so in these units.
      slope[b] = std::fma(slope[b], query(row + 4 * b)[layout::query_unit], least_slope);
      if (p_.cap.cap != 0.0f) cap_scores<Format>(scores[b], slope[b], p_.cap);
      // Rows that see all are left as they are, so that a row's bits do not depend on the others.
      if (!sees_all)
        hide_scores<Format>(scores[b],
                            seen_tokens::of(count, ahead + query_offset(row + 4 * b), p_.window));
    }
    __syncwarp();
    advance();
    start_keys();
    tile_weights tile[Blocks];
    weigh_scores<Format>(scores, slope, tile);
    values_.wait(use_);
    float factor[Blocks];
    bool is_higher = false;
    float before[Blocks];
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
      state[b] = joined(state[b], {tile[b].maximum, 0.0f}, before[b], factor[b]);
      is_higher = is_higher || before[b] != 1.0f;
    }
    if (__any_sync(all_lanes, is_higher)) {
#pragma unroll
      for (int b = 0; b < Blocks; ++b)
#pragma unroll
        for (int k = 0; k < channels; ++k) sum[b][k] = sum[b][k] * before[b];
    }
    float unit[Blocks] = {};
    sum_values<Format>(keys + layout::key_bytes, scores, tile, unit,
                       [&](int b, int k, float value) {
                         sum[b][k] = std::fma(value, factor[b] * unit[b], sum[b][k]);
                       });
#pragma unroll
    for (int b = 0; b < Blocks; ++b)
      state[b].sum = std::fma(tile[b].sum, factor[b] * power_of_two(-weight_bits), state[b].sum);
    __syncwarp();
    start_values();
    ++use_;
  }

  // Leaves what four rows get of the exact tokens of a leaf.
  __device__ void leave_exact(int step, int leaf, int block) const {
    const int chunk = work_.next;
    if (block == 0) prefetch_exact(next_exact(chunk + 1));
    const exact_rows& rows = rows_of(chunk);
    const int first = first_token(chunk) + leaf_tokens * leaf;
    const int count = min(leaf_tokens, rows.count - first);
    const exact_task task{
        exact_leaf(p_.arguments, rows, work_.kv_head, first, count),
        p_.arguments.exact_type,
        count,
        static_cast<int>(work_.first_end - (rows.position + first)),
        p_.window,
        p_.cap,
        place_of(query(4 * block)),
        place_of(part(step, leaf, 0)),
        place_of(&part_state(step, leaf, 0)),
    };
    wait_for_parts(step);
    detail::attend_exact<Format.id()>(task);
  }
  __device__ int place_of(const void* pointer) const {
    return static_cast<int>(static_cast<const std::byte*>(pointer) - shared_);
  }

  // Of a chunk of exact tokens: where they are, and the first of them.
  __device__ const exact_rows& rows_of(int chunk) const {
    return chunk < work_.sink_chunks ? sequence().sink : sequence().tail;
  }
  __device__ int first_token(int chunk) const {
    return exact_chunk * (chunk < work_.sink_chunks ? chunk : chunk - work_.first_tail);
  }
  // Asks for what this warp takes of a chunk of exact tokens, where that is one of this block.
  __device__ void prefetch_exact(int chunk) const {
    if (chunk >= work_.end) return;
    const exact_rows& rows = rows_of(chunk);
    const attention_arguments& a = p_.arguments;
    const int bytes = element_bytes(a.exact_type);
#pragma unroll 1
    for (int leaf = warp_; leaf < groups_per_chunk; leaf += Warps) {
      const int token = first_token(chunk) + leaf_tokens * leaf + (lane_index() & 15);
      if (token >= rows.count) return;
      const auto ask = [&](const void* array, const token_strides& strides, int dim) {
        const auto* const row = static_cast<const std::byte*>(array) +
                                (token * strides.token + work_.kv_head * strides.head) * bytes;
#pragma unroll 1
        for (int i = 128 * (lane_index() >> 4); i < dim * bytes; i += 256)
          asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
      };
      ask(rows.keys, a.key_strides, layout::key_dim);
      ask(rows.values, a.value_strides, layout::value_dim);
    }
  }
  __device__ int next_exact(int chunk) const { return is_sealed(chunk) ? work_.first_tail : chunk; }

  // Leaves the sums of one leaf that a lane has of its row in four rows.
  __device__ void leave_sums(int step, int leaf, const softmax_state (&state)[Blocks],
                             const float (&sum)[Blocks][channels], int block) const {
    wait_for_parts(step);
    // Of both blocks at hand: an array that is indexed at run time would be put into memory.
    const auto value = [&](int k) { return block == 0 ? sum[0][k] : sum[Blocks - 1][k]; };
    float* const out = part(step, leaf, lane_index() & 3);
    const int channel = lane_index() >> 2;
#pragma unroll
    for (int k = 0; k < channels; ++k) out[channel + 8 * k] = value(k);
    if (lane_index() < 4)
      part_state(step, leaf, lane_index()) = block == 0 ? state[0] : state[Blocks - 1];
  }

  // Sums so far of what a warp joins: part of the channels of one row of every four. No other warp
  // reads them before the end. Level 0: the section that is under way, 1: the whole sequence.
  __device__ float2* sums(int level, int row) const {
    return reinterpret_cast<float2*>(shared_ + p_.sums) +
           (level * block_rows + row) * (layout::value_dim / 2);
  }
  __device__ softmax_state& sum_state(int level, int row, int warp) const {
    return reinterpret_cast<softmax_state*>(
        shared_ + p_.states)[(level * Blocks + (row >> 2)) * Warps + warp];
  }

  // Joins what the warps of a step have left to the section that is under way. A warp has part of
  // one row of every four, a lane these pairs of its channels.
  static constexpr int lane_pairs = blocks_of(layout::value_dim / 2, 32 * warps_per_row);
  template <class F>
  __device__ void for_pairs(F f) const {
#pragma unroll
    for (int k = 0; k < lane_pairs; ++k) {
      const int pair = lane_index() + 32 * (warp_ % warps_per_row + warps_per_row * k);
      if (layout::value_dim % (64 * warps_per_row) == 0 || pair < layout::value_dim / 2) f(k, pair);
    }
  }
  __device__ void join_parts(int step) const {
    shared_barrier(&barriers_.ready[step & p_.lag]).wait(step >> p_.lag);
    const int block = 4 * (step % Blocks);
    const int row = warp_ / warps_per_row;
    place_of_join next = work_.join;
    softmax_state section;
    float2 sum[lane_pairs];
    if (next.summed > 0) {
      section = sum_state(0, block, warp_);
      for_pairs([&](int k, int pair) { sum[k] = sums(0, block + row)[pair]; });
    }
    // A lane has one leaf.
    const softmax_state mine = part_state(step, lane_index() & 7, row);
    const auto leaf_values = [&](int leaf) {
      return reinterpret_cast<const float2*>(part(step, leaf, row));
    };
    const int chunks = is_whole(next.chunk) ? groups_per_chunk : 1;
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      softmax_state state{mine.maximum, mine.sum};
      float2 value[lane_pairs];
      if (chunks > 1) {
        state = {__shfl_sync(all_lanes, mine.maximum, i), __shfl_sync(all_lanes, mine.sum, i)};
        for_pairs([&](int k, int pair) { value[k] = leaf_values(i)[pair]; });
      } else {
        state = {__reduce_max_sync(all_lanes, mine.maximum), 0.0f};
        const float my_factor = power(mine.maximum - state.maximum);
        for_pairs([&](int k, int) { value[k] = make_float2(0.0f, 0.0f); });
#pragma unroll
        for (int leaf = 0; leaf < groups_per_chunk; ++leaf) {
          const float factor = __shfl_sync(all_lanes, my_factor, leaf);
          state.sum = std::fma(__shfl_sync(all_lanes, mine.sum, leaf), factor, state.sum);
          for_pairs([&](int k, int pair) {
            const float2 x = leaf_values(leaf)[pair];
            value[k].x = std::fma(x.x, factor, value[k].x);
            value[k].y = std::fma(x.y, factor, value[k].y);
          });
        }
      }
      join_sums(next.summed > 0, section, sum, state, value);
      ++next.chunk;
      ++next.summed;
      if (next.summed == work_.partial || next.chunk == work_.end) {
        end_section(next.chunk - 1, block + row, section, sum);
        next.summed = 0;
      }
    }
    shared_barrier(&barriers_.free[step & p_.lag]).arrive();
    if (next.summed > 0) for_pairs([&](int k, int pair) { sums(0, block + row)[pair] = sum[k]; });
    __syncwarp();
    if (lane_index() == 0) {
      if (next.summed > 0) sum_state(0, block, warp_) = section;
      if (step % Blocks == Blocks - 1) work_.join = next;  // else the next four rows begin with it
    }
    __syncwarp();
  }

  // Adds a state and sums to what is there, if anything is.
  __device__ static void join_sums(bool has_any, softmax_state& state, float2 (&sum)[lane_pairs],
                                   const softmax_state& other, const float2 (&value)[lane_pairs]) {
    if (!has_any) {
      state = other;
#pragma unroll
      for (int k = 0; k < lane_pairs; ++k) sum[k] = value[k];
      return;
    }
    float before;
    float now;
    state = joined(state, other, before, now);
#pragma unroll
    for (int k = 0; k < lane_pairs; ++k) {
      sum[k].x = std::fma(sum[k].x, before, value[k].x * now);
      sum[k].y = std::fma(sum[k].y, before, value[k].y * now);
    }
  }

  // The sum of a section (or, with the sequence cut finely, of a chunk) that ends with `chunk`:
  // stores it, or joins it to the total.
  __device__ void end_section(int chunk, int row, const softmax_state& state,
                              const float2 (&sum)[lane_pairs]) const {
    const int partial = work_.partial;
    if (p_.splits > 1) {
      if (row >= work_.rows) return;
      float* const out = stored_row(partial == 1 ? chunk : chunk / chunks_per_section, row);
      for_pairs([&](int k, int pair) { reinterpret_cast<float2*>(out)[pair] = sum[k]; });
      if (lane_index() == 0 && warp_ % warps_per_row == 0)
        *reinterpret_cast<softmax_state*>(out + layout::value_dim) = state;
      return;
    }
    softmax_state total;
    float2 total_sum[lane_pairs];
    const bool has_any = chunk >= partial;
    if (has_any) {
      total = sum_state(1, row, warp_);
      for_pairs([&](int k, int pair) { total_sum[k] = sums(1, row)[pair]; });
    }
    join_sums(has_any, total, total_sum, state, sum);
    for_pairs([&](int k, int pair) { sums(1, row)[pair] = total_sum[k]; });
    __syncwarp();
    if (lane_index() == 0) sum_state(1, row, warp_) = total;
    __syncwarp();
  }

  // Where a row of a partial sum is kept until it is joined.
  __device__ float* stored_row(int partial, int row) const {
    if (work_.partials <= p_.near_partials) {
      const int near = (partial << p_.row_shift) + (row & ((1 << p_.row_shift) - 1));
      return in_block_of_cluster(
          reinterpret_cast<float*>(shared_ + p_.stored) + near * layout::stored_stride,
          row >> p_.row_shift);
    }
    const std::int64_t head = std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
    return static_cast<float*>(p_.arguments.workspace) +
           ((head * p_.partials + partial) * block_rows + row) * layout::stored_stride;
  }

  __device__ bool is_cluster() const { return p_.joins && p_.splits > 1; }
  // From the sums of this block, or of all blocks of the cluster, of which each takes some rows, to
  // the output.
  __device__ void finish() {
    int first = 0;
    int rows = work_.rows;
    if (is_cluster()) {
      arrive_in_cluster<true>();
      wait_for_cluster();
      first = static_cast<int>(blockIdx.x) << p_.row_shift;
      rows = min(rows - first, 1 << p_.row_shift);
      if (rows <= 0) return;
    } else {
      __syncthreads();
    }
    const auto buffer = vectors(layout::value_dim);
    auto* const states = reinterpret_cast<softmax_state*>(shared_ + p_.states);
    if (is_cluster()) {
      const int row_stride = layout::stored_stride;
      const bool is_near = work_.partials <= p_.near_partials;
      join_rows<layout::value_dim, threads, 8>(
          rows, work_.partials, chunks_per_section / work_.partial, stored_row(0, first),
          row_stride, is_near ? row_stride << p_.row_shift : row_stride * block_rows, buffer,
          states);
    } else {
      for (int item = static_cast<int>(threadIdx.x); item < rows * layout::value_dim;
           item += threads) {
        const int row = item / layout::value_dim;
        const int d = item % layout::value_dim;
        *buffer.at(row, d) =
            work_.partials > 0 ? reinterpret_cast<const float*>(sums(1, row))[d] : 0.0f;
      }
    }
    __syncthreads();
    finish_rows<layout::value_dim, threads>(
        p_, sequence(), work_.kv_head, work_.first_row + first, rows, buffer, [&](int row) {
          if (work_.partials == 0) return softmax_state{nothing_seen, 0.0f};
          return is_cluster() ? states[row] : sum_state(1, row, (row & 3) * warps_per_row);
        });
  }

  const attention_parameters& p_;
  std::byte* const shared_;
  attention_barriers<Warps>& barriers_;
  const int warp_;
  const record_slot keys_;
  const record_slot values_;
  block_work& work_;
  int taken_ = 0;          // groups of this warp
  listed_group loaded_{};  // the last of them, which is in the slots, or on its way
  int use_ = 0;            // of the slots
};

}  // namespace detail
}  // namespace KVARN_CUDA_NAMESPACE
}  // namespace kvarn::cuda
