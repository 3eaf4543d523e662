// The parts of a cache on a device: bookkeeping and bytes, its kernels, what is being sealed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../cache/cache_state.hpp"
#include "../cache/page_table.hpp"
#include "../config.hpp"
#include "arguments.hpp"
#include "cache_launchers.hpp"
#include "device_memory.hpp"
#include "device_storage.hpp"

namespace kvarn::cuda {

struct device_cache_options {
  int seal_tiles = 256;  // that one call seals at most, of all sequences together
};

inline namespace KVARN_ISA_NAMESPACE {

// What a cache on a device has beside its state.
template <class T>
struct device_state : cache_state<T, device_storage<T>> {
  using base = cache_state<T, device_storage<T>>;
  using base::base;

  // Tiles of one sequence that are being sealed.
  struct pending_seal {
    sequence_id id;
    std::int64_t end;  // position behind their tokens
    std::size_t first_page;
    std::size_t tiles;
    bool cancelled = false;
  };

  ~device_state() {
    for (void* memory : {workspace, static_cast<void*>(device_factors)}) cudaFree(memory);
    for (cudaEvent_t event : {before_seal, sealed})
      if (event != nullptr) cudaEventDestroy(event);
  }

  // Nothing is being sealed any more; pages that were not handed over are free again.
  void end_sealing() {
    pending.clear();
    pending_pages.reset();
    this->memory.rows.end_hold();
  }

  // What was begun to be sealed from there on is not kept.
  void cancel_from(sequence_id id, std::int64_t position) {
    for (pending_seal& p : pending)
      if (p.id == id && p.end > position) p.cancelled = true;
  }

  cache_launchers launch;
  device_cache_options options;
  std::vector<cache_format> formats;  // of layers that are not exact, each once
  void* workspace = nullptr;          // of encode
  float* device_factors = nullptr;    // [layers][kv_heads][key_head_dim][key_head_dim]
  staged_array<row_copy> copies;
  staged_array<encode_group> groups;
  cudaEvent_t before_seal = nullptr;
  cudaEvent_t sealed = nullptr;
  std::vector<pending_seal> pending;
  std::optional<claimed_pages> pending_pages;
  std::vector<std::uint64_t> stamps;  // by slot: the last begin that had the sequence
  std::uint64_t stamp = 0;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn::cuda
