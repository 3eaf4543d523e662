// The bytes of a cache in the memory of a GPU: pages of records, and exact rows of every sequence.
// Those stand as [token][kv_heads][head_dim], so that one pair of strides fits all sequences.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../cache/cache_config.hpp"
#include "../cache/exact_run.hpp"
#include "../cache/paged_storage.hpp"
#include "../config.hpp"
#include "../error.hpp"
#include "device_memory.hpp"

namespace kvarn::cuda {
inline namespace KVARN_ISA_NAMESPACE {

template <class T>
class device_storage : public paged_storage<T, device_space> {
  using base = paged_storage<T, device_space>;

 public:
  using typename base::run;
  using memory_type = device_accounts;

  // Precondition: validate(config) is ok.
  device_storage(const cache_config& config, device_accounts& memory)
      : base(config, memory, memory.rows) {}

  // What files of sequences take and bring: copies along a stream, each waited for.

  void transfer_on(cudaStream_t stream) {
    stream_ = stream;
    failed_ = cudaSuccess;
  }
  status transfer_status() const { return status_of(failed_, "copying a cache"); }

  void fetch_page(std::int32_t page) const {
    std::size_t offset = 0;
    for (int layer = 0; layer < this->layers(); ++layer) {
      move(page_buffer() + offset, this->page(layer, page), this->page_bytes(layer));
      offset += this->page_bytes(layer);
    }
    wait();
  }
  std::byte* file_page(int layer, std::int32_t) const {
    std::size_t offset = 0;
    for (int i = 0; i < layer; ++i) offset += this->page_bytes(i);
    return page_buffer() + offset;
  }
  void put_page(std::int32_t page) const {
    for (int layer = 0; layer < this->layers(); ++layer)
      move(this->page(layer, page), file_page(layer, page), this->page_bytes(layer));
    wait();
  }
  template <class Visit>
  void read_rows(const run& rows, int count, const Visit& visit) const {
    for (const int kind : {0, 1}) {
      const block rows_of_kind(*this, rows, count, kind);
      move(resized(staging_, rows_of_kind.elements), rows_of_kind.place, rows_of_kind.bytes());
      wait();
      for (int head = 0; head < this->shape().kv_heads; ++head) {
        T* const own = resized(head_, rows_of_kind.elements_of_head);
        rows_of_kind.for_tokens(head, [&](std::size_t staged, std::size_t at) {
          std::memcpy(own + at, staging_.data() + staged, rows_of_kind.vector_bytes());
        });
        visit(own, rows_of_kind.elements_of_head);
      }
    }
  }
  template <class Visit>
  void write_rows(run& rows, int count, const Visit& visit) const {
    for (const int kind : {0, 1}) {
      const block rows_of_kind(*this, rows, count, kind);
      T* const staged_rows = resized(staging_, rows_of_kind.elements);
      for (int head = 0; head < this->shape().kv_heads; ++head) {
        T* const own = resized(head_, rows_of_kind.elements_of_head);
        visit(own, rows_of_kind.elements_of_head);
        rows_of_kind.for_tokens(head, [&](std::size_t staged, std::size_t at) {
          std::memcpy(staged_rows + staged, own + at, rows_of_kind.vector_bytes());
        });
      }
      move(rows_of_kind.place, staged_rows, rows_of_kind.bytes());
      wait();
    }
  }

 private:
  // The keys (kind 0) or values of some rows.
  struct block {
    T* place;
    std::size_t dim, heads, count, elements_of_head, elements;

    block(const device_storage& storage, const run& rows, int n, int kind)
        : place((kind == 0 ? rows.keys(storage.shape(), 0, 0) : rows.values(storage.shape(), 0, 0))
                    .data),
          dim(static_cast<std::size_t>(kind == 0 ? storage.shape().key_head_dim
                                                 : storage.shape().value_head_dim)),
          heads(static_cast<std::size_t>(storage.shape().kv_heads)),
          count(static_cast<std::size_t>(n)),
          elements_of_head(count * dim),
          elements(heads * elements_of_head) {}

    std::size_t bytes() const { return elements * sizeof(T); }
    std::size_t vector_bytes() const { return dim * sizeof(T); }
    // visit(element among all rows, element among those of the head).
    template <class Visit>
    void for_tokens(int head, const Visit& visit) const {
      for (std::size_t t = 0; t < count; ++t)
        visit((t * heads + static_cast<std::size_t>(head)) * dim, t * dim);
    }
  };

  static T* resized(std::vector<T>& memory, std::size_t count) {
    if (memory.size() < count) memory.resize(count);
    return memory.data();
  }
  std::byte* page_buffer() const {
    std::size_t bytes = 0;
    for (int layer = 0; layer < this->layers(); ++layer) bytes += this->page_bytes(layer);
    if (page_.size() < bytes) page_.resize(bytes);
    return page_.data();
  }
  void move(void* to, const void* from, std::size_t bytes) const {
    if (bytes != 0) note(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  }
  void wait() const { note(cudaStreamSynchronize(stream_)); }
  void note(cudaError_t code) const {
    if (failed_ == cudaSuccess) failed_ = code;
  }

  cudaStream_t stream_ = nullptr;
  mutable cudaError_t failed_ = cudaSuccess;
  mutable std::vector<std::byte> page_;
  mutable std::vector<T> staging_;
  mutable std::vector<T> head_;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn::cuda
