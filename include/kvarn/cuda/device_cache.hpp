// A KV cache in the memory of a GPU, with the bookkeeping, the bytes and the files of kv_cache.
//
// Everything here is C++ without nvcc; kernels are called through cache_launchers, which one .cu
// file gets from cache_launchers_of_device() in cache_launchers.cuh. A step of an engine:
//
//   begin      enters new tokens of a batch in all layers and sends what kernels must know
//   append     of each layer: a kernel that rotates their keys and values into exact rows
//   attention  of each layer: the arguments of attend<format>, launched by the engine
//   commit     as in kv_cache
//
// append and attention can be captured in a graph once and run for every step. Sealing is a call,
// or begins on a stream of its own, beside steps, and is finished later. The user's page:
// docs/cuda.md.
//
// Calls change the bookkeeping at once and the device's memory in the order of the streams that
// they are given: a stream must be behind all that was given to another one before, but for
// begin_seal. One thread at a time. Errors are those of kv_cache, and device_failure.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../cache/cache_base.hpp"
#include "../cache/cache_file.hpp"
#include "../cache/cache_state.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "arguments.hpp"
#include "cache_launchers.hpp"
#include "device_batch.hpp"
#include "device_memory.hpp"
#include "device_state.hpp"

namespace kvarn::cuda {

inline namespace KVARN_ISA_NAMESPACE {

// `T`: the type of exact rows: float16, bfloat16 or float. What it has of cache_base.hpp is as much
// a part of it: create, fork, commit, drop_oldest, lengths, accounting.
template <class T = float16>
class device_cache : public cache_base<device_state<T>> {
  using base = cache_base<device_state<T>>;

 public:
  using base::free_pages;
  using base::is_live;

  // An empty cache on the current device, or what is wrong. Takes all device memory at once: pages
  // (or config.pages, 16-byte aligned device memory), exact_memory bytes for exact rows, and little
  // more; config.memory is for tables in host memory. `factors`: encoder::query_aware needs them,
  // copied.
  static result<device_cache> make(const cache_config& config, const cache_launchers& launchers,
                                   const query_factors* factors = nullptr,
                                   const device_cache_options& options = {}) {
    if (status s = validate(config); !s.ok()) return s;
    if (status s = kvarn::detail::check_factors(config, factors); !s.ok()) return s;
    if (config.exact_memory == 0)
      return status{error_code::invalid_argument,
                    "exact_memory is 0; a cache on a device needs the bytes for its exact rows"};
    if (config.method == encoder::query_aware && factors == nullptr)
      return status{error_code::invalid_argument,
                    "encoder query_aware on a device needs query factors; gather query_moments"};
    if (launchers.append == nullptr || launchers.copy_rows == nullptr ||
        launchers.encode == nullptr || launchers.encode_workspace_bytes == nullptr)
      return status{error_code::invalid_argument,
                    "a launcher is null; take them from cache_launchers_of_device()"};
    if (reinterpret_cast<std::uintptr_t>(config.pages.data()) % 16 != 0)
      return status{error_code::invalid_argument,
                    "pages do not begin at a multiple of 16 bytes; those of a device must"};
    if (options.seal_tiles < 1 || options.seal_tiles > (1 << 20))
      return base::bad_value("seal_tiles", options.seal_tiles, "allowed are 1 to 1048576");
    return or_out_of_memory([&]() -> result<device_cache> {
      device_cache cache(std::make_unique<state>(config, factors));
      if (status s = cache.prepare(launchers, options); !s.ok()) return s;
      return cache;
    });
  }

  // ---- Sequences: as kv_cache; what is being sealed of the tokens is forgotten too.

  status free(sequence_id id) {
    s().cancel_from(id, -1);
    return base::free(id);
  }
  status clear(sequence_id id) {
    s().cancel_from(id, -1);
    return base::clear(id);
  }
  status truncate(sequence_id id, std::int64_t position) {
    const status done = base::truncate(id, position);
    if (done.ok()) s().cancel_from(id, position);
    return done;
  }

  // ---- Steps

  // Appends tokens[i] tokens to ids[i] in all layers, not committed, and sends what the kernels of
  // the step read. The tokens of all sequences stand behind one another in the tensors of append
  // and in `tensors`, of which there is one for each layer, or one for all. Rows that must move are
  // moved by a launch; where old and new memory of all do not fit exact_memory at once, in several.
  // After an error nothing is appended, and the kernels of the batch must not run.
  status begin(device_batch& batch, std::span<const sequence_id> ids, std::span<const int> tokens,
               std::span<const batch_tensors> tensors, cudaStream_t stream) {
    if (status bad = check_batch(batch, ids, tokens, tensors); !bad.ok()) return bad;
    // Rows move in launches of their own: copies of one are in no order. First those that a failure
    // has left.
    if (status bad = flush(stream); !bad.ok()) return bad;
    const status reserved = or_out_of_memory([&] { return reserve(ids, tokens, stream); });
    if (status bad = flush(stream); !bad.ok()) return bad;
    if (!reserved.ok()) return reserved;
    status entered = enter(batch, ids, tokens, tensors, stream);
    if (!entered.ok())
      for (std::size_t i = 0; i < ids.size(); ++i)
        s().truncate(ids[i], s().table.appended(ids[i]) - tokens[i]);
    return entered;
  }

  // Launches the rotation of one layer's new keys and values, [tokens][kv_heads][head_dim], into
  // exact rows. `replaced`: device memory, or null.
  status append(const device_batch& batch, int layer, const void* keys, const void* values,
                element_type type, const token_strides& key_strides,
                const token_strides& value_strides, cudaStream_t stream,
                replaced_counts* replaced = nullptr) const {
    if (status bad = check_layer(layer); !bad.ok()) return bad;
    const row_shape& shape = s().storage.shape();
    append_arguments a;
    a.key_head_dim = shape.key_head_dim;
    a.value_head_dim = shape.value_head_dim;
    a.kv_heads = shape.kv_heads;
    a.keys = keys;
    a.values = values;
    a.type = type;
    a.exact_type = element_type_of<T>;
    a.key_strides = key_strides;
    a.value_strides = value_strides;
    a.rotate_keys = s().storage.rotates_keys();
    a.rotate_values = s().storage.rotates_values();
    a.count = batch.bounds_.sequences;
    a.sequences = batch.arrays_->appends.device() + std::ptrdiff_t{layer} * a.count;
    a.max_tokens = batch.bounds_.tokens;
    a.replaced = replaced;
    return status_of(s().launch.append(a, stream), "append");
  }

  // The arguments of attention of one layer, for attend<format(layer)>; the caller gives
  // softmax_scale, workspace and what else it wants.
  attention_arguments attention(const device_batch& batch, int layer) const {
    KVARN_ASSERT(check_layer(layer).ok());
    const row_shape& shape = s().storage.shape();
    const batch_bounds& bounds = batch.bounds_;
    attention_arguments a;
    a.kv_heads = shape.kv_heads;
    a.heads = s().query_heads / shape.kv_heads;
    a.query_type = bounds.query_type;
    a.out_type = bounds.out_type;
    a.exact_type = element_type_of<T>;
    a.query_strides = query_strides(bounds);
    a.out_strides = out_strides(bounds);
    a.key_strides = {std::int64_t{shape.kv_heads} * shape.key_head_dim, shape.key_head_dim, 1};
    a.value_strides = {std::int64_t{shape.kv_heads} * shape.value_head_dim, shape.value_head_dim,
                       1};
    a.pages = s().storage.page(layer, 0);
    a.count = bounds.sequences;
    a.sequences = batch.arrays_->sequences.device() + std::ptrdiff_t{layer} * a.count;
    a.max_tokens = bounds.tokens;
    a.max_pages = s().table.is_exact_layer(layer) ? 0 : bounds.pages;
    a.max_sink = s().storage.sink();
    a.max_tail = bounds.tail;
    return a;
  }

  // The format of a layer, to choose the kernel by; of an exact layer only head dimensions count.
  const cache_format& format(int layer) const { return s().storage.format(layer); }

  // ---- Sealing

  // Seals of each sequence at most `most` of its sealable tiles, oldest first, and of all together
  // at most device_cache_options::seal_tiles; returns how many. short_buffer: not enough pages,
  // none is sealed. One launch for each format, and keys and values.
  result<int> seal(std::span<const sequence_id> ids, int most, cudaStream_t stream) {
    result<int> begun = begin_seal(ids, most, stream, stream);
    if (!begun.ok() || begun.value() == 0) return begun;
    if (status bad = finish_seal(stream); !bad.ok()) return bad;
    return begun;
  }

  // The same beside steps: encodes along `stream`, behind what `steps` has been given so far. Until
  // finish_seal the tokens count as exact, and no other sealing can begin.
  result<int> begin_seal(std::span<const sequence_id> ids, int most, cudaStream_t steps,
                         cudaStream_t stream) {
    if (!s().pending.empty())
      return status{error_code::invalid_argument,
                    "a sealing has begun and is not finished; call finish_seal first"};
    if (most < 0) return base::bad_value("tiles to seal", most, "it must not be negative");
    ++s().stamp;
    for (const sequence_id id : ids)
      if (status bad = check_once(id); !bad.ok()) return bad;
    return or_out_of_memory([&] { return encode_tiles(ids, most, steps, stream); });
  }

  // Whether what was begun is encoded, so that finish_seal holds no step up.
  bool is_sealed() const { return cudaEventQuery(s().sealed) == cudaSuccess; }

  // Makes what was begun part of the sequences for steps that begin later; `steps` waits for the
  // encoding. Of sequences that were cut meanwhile nothing is kept.
  status finish_seal(cudaStream_t steps) {
    state& own = s();
    if (own.pending.empty()) return {};
    if (status bad = status_of(cudaStreamWaitEvent(steps, own.sealed), "waiting for the sealing");
        !bad.ok())
      return bad;
    // Rows move where tails become shorter; see begin.
    if (status bad = flush(steps); !bad.ok()) return bad;
    const std::span<const std::int32_t> pages = own.pending_pages->hand_over();
    for (const auto& p : own.pending) {
      const auto taken = pages.subspan(p.first_page, p.tiles);
      if (p.cancelled)
        own.table.release(taken);
      else
        own.publish(p.id, taken);
    }
    own.end_sealing();
    return flush(steps);
  }

  // ---- Files: save_sequences and restore_sequences, along a stream that they wait for.

  status save(std::span<const sequence_id> ids, std::ostream& file, cudaStream_t stream) {
    if (status bad = flush(stream); !bad.ok()) return bad;
    s().storage.transfer_on(stream);
    return save_sequences(*this, ids, file);
  }
  result<std::vector<sequence_id>> restore(std::istream& file, cudaStream_t stream) {
    s().storage.transfer_on(stream);
    return restore_sequences(*this, file);
  }

 private:
  using state = device_state<T>;
  using base::check;
  using base::layers;
  using base::s;

  explicit device_cache(std::unique_ptr<state> made) : base(std::move(made)) {}

  static constexpr std::size_t copies_at_once = 4096;

  status prepare(const cache_launchers& launchers, const device_cache_options& options) {
    state& own = s();
    own.launch = launchers;
    own.options = options;
    own.stamps.resize(own.moments.size());
    std::size_t bytes = 0;
    for (int layer = 0; layer < layers(); ++layer) {
      if (own.table.is_exact_layer(layer)) continue;
      const cache_format& format = own.storage.format(layer);
      if (std::find(own.formats.begin(), own.formats.end(), format) != own.formats.end()) continue;
      own.formats.push_back(format);
      for (const tile_kind kind : {tile_kind::key, tile_kind::value})
        bytes = (std::max)(bytes, launchers.encode_workspace_bytes(format, kind, own.method));
    }
    if (bytes > 0)
      if (status bad = status_of(cudaMalloc(&own.workspace, bytes), "workspace"); !bad.ok())
        return bad;
    const auto tiles = static_cast<std::size_t>(options.seal_tiles);
    for (const status& made :
         {own.copies.make(copies_at_once),
          own.groups.make(2 * tiles * static_cast<std::size_t>(layers())),
          status_of(cudaEventCreateWithFlags(&own.before_seal, cudaEventDisableTiming), "an event"),
          status_of(cudaEventCreateWithFlags(&own.sealed, cudaEventDisableTiming), "an event")})
      if (!made.ok()) return made;
    return own.factors == nullptr ? status() : send_factors();
  }

  status send_factors() {
    state& own = s();
    const auto dim = static_cast<std::size_t>(own.factors->head_dim());
    const auto heads = static_cast<std::size_t>(own.factors->kv_heads());
    const std::size_t square = dim * dim;
    void* place = nullptr;
    cudaError_t code =
        cudaMalloc(&place, static_cast<std::size_t>(layers()) * heads * square * sizeof(float));
    own.device_factors = static_cast<float*>(place);
    for (std::size_t i = 0; i < static_cast<std::size_t>(layers()) * heads; ++i)
      if (code == cudaSuccess)
        code = cudaMemcpy(
            own.device_factors + i * square,
            own.factors->at(static_cast<int>(i / heads), static_cast<int>(i % heads)).upper(),
            square * sizeof(float), cudaMemcpyHostToDevice);
    // From pageable memory they may still be on their way, and other streams would not wait.
    if (code == cudaSuccess) code = cudaStreamSynchronize(nullptr);
    return status_of(code, "query factors");
  }

  status check_layer(int layer) const {
    if (layer >= 0 && layer < layers()) return {};
    return base::bad_value("layer", layer, "allowed are 0 to " + std::to_string(layers() - 1));
  }
  status check_once(sequence_id id) {
    if (status bad = check(id); !bad.ok()) return bad;
    if (s().stamps[id.slot] == s().stamp)
      return {error_code::invalid_argument,
              "the sequence in slot " + std::to_string(id.slot) + " is given twice"};
    s().stamps[id.slot] = s().stamp;
    return {};
  }

  status check_batch(const device_batch& batch, std::span<const sequence_id> ids,
                     std::span<const int> tokens, std::span<const batch_tensors> tensors) {
    const batch_bounds& bounds = batch.bounds_;
    const auto beyond = [](const char* what, std::int64_t value, std::int64_t bound) {
      return base::bad_value(what, value, "the batch was made for " + std::to_string(bound));
    };
    if (batch.arrays_->appends.capacity() !=
        static_cast<std::size_t>(bounds.sequences) * static_cast<std::size_t>(layers()))
      return {error_code::invalid_argument, "the batch was made for another number of layers"};
    if (ids.size() > static_cast<std::size_t>(bounds.sequences))
      return beyond("number of sequences", static_cast<std::int64_t>(ids.size()), bounds.sequences);
    if (tokens.size() != ids.size())
      return base::bad_value("size of tokens", static_cast<std::int64_t>(tokens.size()),
                             "there are " + std::to_string(ids.size()) + " sequences");
    if (tensors.size() != 1 && tensors.size() != static_cast<std::size_t>(layers()))
      return base::bad_value("size of tensors", static_cast<std::int64_t>(tensors.size()),
                             "allowed are 1 and " + std::to_string(layers()) + ", one per layer");
    std::int64_t list = 0;
    ++s().stamp;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (status bad = check_once(ids[i]); !bad.ok()) return bad;
      if (tokens[i] < 0 || tokens[i] > bounds.tokens)
        return beyond("tokens of a sequence", tokens[i], bounds.tokens);
      const auto pages = static_cast<std::int64_t>(s().table.pages(ids[i]).size());
      list += pages;
      if (pages > bounds.pages) return beyond("pages of a sequence", pages, bounds.pages);
      for (int layer = 0; layer < layers(); ++layer) {
        const sequence_extent e = s().table.extent(ids[i], layer);
        const std::int64_t tail =
            (std::max)(e.length + tokens[i] - e.tail_position, std::int64_t{0});
        if (tail > bounds.tail) return beyond("tail of a sequence", tail, bounds.tail);
        if (e.length + tokens[i] > max_distance)
          return base::bad_value("tokens of a sequence", tokens[i],
                                 "it has " + std::to_string(e.length) +
                                     "; attention on a device takes at most " +
                                     std::to_string(max_distance));
      }
    }
    if (list > bounds.list) return beyond("pages of all sequences", list, bounds.list);
    return {};
  }

  int to_sink(const sequence_extent& extent, int tokens) const {
    return (std::min)(tokens, s().storage.sink() - extent.sink_count);
  }

  status reserve(std::span<const sequence_id> ids, std::span<const int> tokens,
                 cudaStream_t stream) {
    state& own = s();
    // Room for a group more than the tail keeps: after sealing few rows move. Sinks, which never
    // grow, first: what tails leave behind is then in one piece.
    const int least = own.table.tail() + own.table.group() + 16;
    for (const bool is_sink : {true, false})
      for (std::size_t i = 0; i < ids.size(); ++i)
        for (int layer = 0; layer < layers(); ++layer) {
          auto& both = own.storage.rows(ids[i], layer);
          const int sunk = to_sink(own.table.extent(ids[i], layer), tokens[i]);
          const auto fit = [&] {
            return is_sink ? own.storage.reserve(both.sink, sunk, false, own.storage.sink())
                           : own.storage.reserve(both.tail, tokens[i] - sunk, false, least);
          };
          if (fit()) continue;
          // Once more behind what moves: its old memory is free then.
          if (status bad = flush(stream); !bad.ok()) return bad;
          if (fit()) continue;
          return {error_code::short_buffer, own.storage.exact_room() + "; " +
                                                std::to_string(tokens[i]) +
                                                " tokens more of sequence " + std::to_string(i) +
                                                " do not fit what is left in one piece"};
        }
    return {};
  }

  // Launches the moving of rows.
  status flush(cudaStream_t stream) {
    state& own = s();
    std::span<const row_copy> left = own.memory.rows.copies();
    while (!left.empty()) {
      const auto now = left.first((std::min)(left.size(), copies_at_once));
      std::copy(now.begin(), now.end(), own.copies.write());
      if (status bad = own.copies.send(now.size(), stream); !bad.ok()) return bad;
      if (status bad = status_of(
              own.launch.copy_rows(own.copies.device(), static_cast<int>(now.size()), stream),
              "moving rows");
          !bad.ok())
        return bad;
      if (status bad = own.copies.used(stream); !bad.ok()) return bad;
      left = left.subspan(now.size());
    }
    own.memory.rows.copied();
    return {};
  }

  token_strides query_strides(const batch_bounds& bounds) const {
    return or_packed(bounds.query_strides, s().storage.shape().key_head_dim);
  }
  token_strides out_strides(const batch_bounds& bounds) const {
    return or_packed(bounds.out_strides, s().storage.shape().value_head_dim);
  }
  token_strides or_packed(const token_strides& given, int dim) const {
    if (given.token != 0 || given.head != 0) return given;
    return {std::int64_t{s().query_heads} * dim, dim, 1};
  }

  status enter(device_batch& batch, std::span<const sequence_id> ids, std::span<const int> tokens,
               std::span<const batch_tensors> tensors, cudaStream_t stream) {
    state& own = s();
    auto& arrays = *batch.arrays_;
    const batch_bounds& bounds = batch.bounds_;
    const auto count = static_cast<std::size_t>(bounds.sequences);
    page_entry* const lists = arrays.pages.write();
    append_sequence* const appends = arrays.appends.write();
    attention_sequence* const sequences = arrays.sequences.write();
    std::fill_n(appends, arrays.appends.capacity(), append_sequence{});
    attention_sequence nothing;
    nothing.tokens = 0;
    std::fill_n(sequences, arrays.sequences.capacity(), nothing);
    const auto moved = [](auto* pointer, std::int64_t elements, element_type type) {
      using byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(pointer)>>,
                                      const std::byte, std::byte>;
      return static_cast<byte*>(pointer) + elements * element_bytes(type);
    };
    std::size_t listed = 0;
    std::int64_t first = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto pages = own.table.pages(ids[i]);
      for (std::size_t k = 0; k < pages.size(); ++k)
        lists[listed + k] = {pages[k].position, pages[k].page, pages[k].count};
      for (int layer = 0; layer < layers(); ++layer) {
        const std::size_t at = static_cast<std::size_t>(layer) * count + i;
        enter_layer(ids[i], layer, tokens[i], appends[at], sequences[at]);
        const batch_tensors& t = tensors[tensors.size() == 1 ? 0 : static_cast<std::size_t>(layer)];
        appends[at].first = first;
        sequences[at].pages = arrays.pages.device() + listed;
        sequences[at].queries =
            moved(t.queries, first * query_strides(bounds).token, bounds.query_type);
        sequences[at].out = moved(t.out, first * out_strides(bounds).token, bounds.out_type);
        if (t.lse != nullptr) sequences[at].lse = t.lse + first * own.query_heads;
      }
      listed += pages.size();
      first += tokens[i];
    }
    for (const status& sent :
         {arrays.pages.send(listed, stream), arrays.appends.send(arrays.appends.capacity(), stream),
          arrays.sequences.send(arrays.sequences.capacity(), stream)})
      if (!sent.ok()) return sent;
    return {};
  }

  void enter_layer(sequence_id id, int layer, int tokens, append_sequence& to_append,
                   attention_sequence& to_attend) {
    state& own = s();
    const row_shape& shape = own.storage.shape();
    auto& rows = own.storage.rows(id, layer);
    const int sunk = to_sink(own.table.extent(id, layer), tokens);
    to_append.count = tokens;
    to_append.to_sink = sunk;
    to_append.sink_keys = rows.sink.keys(shape, 0, rows.sink.count()).data;
    to_append.sink_values = rows.sink.values(shape, 0, rows.sink.count()).data;
    to_append.tail_keys = rows.tail.keys(shape, 0, rows.tail.count()).data;
    to_append.tail_values = rows.tail.values(shape, 0, rows.tail.count()).data;
    if (sunk > 0) rows.sink.extend(sunk);
    if (tokens > sunk) rows.tail.extend(tokens - sunk);
    own.table.append(id, layer, tokens);
    const sequence_extent e = own.table.extent(id, layer);
    to_attend.position = e.length - tokens;
    to_attend.tokens = tokens;
    to_attend.page_count = e.page_count;
    to_attend.sink = {rows.sink.keys(shape, 0, 0).data, rows.sink.values(shape, 0, 0).data, 0,
                      e.sink_count};
    to_attend.tail = {rows.tail.keys(shape, 0, 0).data, rows.tail.values(shape, 0, 0).data,
                      e.tail_position, e.tail_count};
  }

  result<int> encode_tiles(std::span<const sequence_id> ids, int most, cudaStream_t steps,
                           cudaStream_t stream) {
    state& own = s();
    std::vector<typename state::pending_seal> wanted;
    std::size_t total = 0;
    for (const sequence_id id : ids) {
      const auto tiles = static_cast<std::size_t>(
          (std::min)({own.table.sealable(id), std::int64_t{most},
                      std::int64_t{own.options.seal_tiles} - static_cast<std::int64_t>(total)}));
      if (tiles == 0) continue;
      own.table.reserve(id, tiles);
      wanted.push_back(
          {id, own.table.sealed_end(id) + static_cast<std::int64_t>(tiles) * own.table.group(),
           total, tiles});
      total += tiles;
    }
    if (total == 0) return 0;
    own.pending_pages.emplace(own.table, total);
    if (!own.pending_pages->claim())
      return status{error_code::short_buffer,
                    std::to_string(total) + " pages are needed; " + std::to_string(free_pages()) +
                        " of " + std::to_string(own.table.page_count()) + " are free"};
    own.pending.swap(wanted);
    own.memory.rows.hold();
    const status launched = or_out_of_memory([&] { return launch_encoding(steps, stream); });
    if (launched.ok()) return static_cast<int>(total);
    // What was launched before the failure reads rows and writes pages until it has ended.
    cudaStreamSynchronize(stream);
    own.end_sealing();
    return launched;
  }

  status launch_encoding(cudaStream_t steps, cudaStream_t stream) {
    state& own = s();
    for (const status& waits :
         {status_of(cudaEventRecord(own.before_seal, steps), "recording an event"),
          status_of(cudaStreamWaitEvent(stream, own.before_seal), "waiting for steps")})
      if (!waits.ok()) return waits;
    encode_group* const all = own.groups.write();
    std::size_t used = 0;
    std::vector<encode_arguments> calls;
    for (const cache_format& format : own.formats)
      for (const tile_kind kind : {tile_kind::key, tile_kind::value}) {
        const std::size_t first = used;
        for (int layer = 0; layer < layers(); ++layer)
          if (!own.table.is_exact_layer(layer) && own.storage.format(layer) == format)
            used += list_tiles(layer, kind, all + used);
        calls.push_back(encoding(format, kind));
        calls.back().groups = own.groups.device() + first;
        calls.back().count = static_cast<int>(used - first);
      }
    if (status bad = own.groups.send(used, stream); !bad.ok()) return bad;
    for (const encode_arguments& call : calls)
      if (status bad = status_of(own.launch.encode(call, stream), "sealing"); !bad.ok()) return bad;
    if (status bad = own.groups.used(stream); !bad.ok()) return bad;
    return status_of(cudaEventRecord(own.sealed, stream), "recording an event");
  }

  encode_arguments encoding(const cache_format& format, tile_kind kind) const {
    const row_shape& shape = s().storage.shape();
    const int dim = kind == tile_kind::key ? shape.key_head_dim : shape.value_head_dim;
    encode_arguments a;
    a.format = format;
    a.kind = kind;
    a.method = s().method;
    a.type = element_type_of<T>;
    a.strides = {std::int64_t{shape.kv_heads} * dim, dim, 1};
    a.rotate = false;
    a.kv_heads = shape.kv_heads;
    a.workspace = s().workspace;
    return a;
  }

  // The pending tiles of one layer; returns how many.
  std::size_t list_tiles(int layer, tile_kind kind, encode_group* out) const {
    const state& own = s();
    const row_shape& shape = own.storage.shape();
    const std::size_t factor_floats = static_cast<std::size_t>(shape.kv_heads) *
                                      static_cast<std::size_t>(shape.key_head_dim) *
                                      static_cast<std::size_t>(shape.key_head_dim);
    std::size_t count = 0;
    for (const auto& p : own.pending) {
      const auto& tail = own.storage.rows(p.id, layer).tail;
      for (std::size_t tile = 0; tile < p.tiles; ++tile) {
        const int row = static_cast<int>(tile) * own.table.group();
        encode_group& group = out[count++];
        group = {};
        group.tokens =
            (kind == tile_kind::key ? tail.keys(shape, 0, row) : tail.values(shape, 0, row)).data;
        group.page = own.storage.page(layer, own.pending_pages->numbers()[p.first_page + tile]);
        if (own.device_factors != nullptr && kind == tile_kind::key)
          group.factors = own.device_factors + static_cast<std::size_t>(layer) * factor_floats;
      }
    }
    return count;
  }
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn::cuda
