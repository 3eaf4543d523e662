// Attention of queries over sink, sealed groups and tail: one call, or items for an executor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "../config.hpp"
#include "../simd/on_target.hpp"
#include "attention.hpp"
#include "scalar_attention.hpp"

namespace kvarn {

inline namespace KVARN_ISA_NAMESPACE {

// One KV head of one sequence. Attends from every query to the memory: writes value_head_dim
// channels per query to `out`, in the order of the queries, and the log of the sum of exponentiated
// logits in nats to `lse` unless it is null. A query that sees nothing gets zeros and -infinity.
// Not-finite query values are replaced as in keys.
// Preconditions: validate(memory.format) is ok; every count fits its memory; sealed counts are in
// [0, group] and their records such as validate_record accepts; exact tokens are finite; queries
// have at least one head; options.softmax_scale > 0.
template <class Q, class T, class O>
struct attention_task {
  attention_queries<Q> queries = {};
  attention_memory<T> memory = {};
  attention_options options = {};
  tokens_view<O> out = {};
  float* lse = nullptr;
  std::ptrdiff_t out_token_gap = 0;  // as that of the queries
  std::ptrdiff_t lse_token_gap = 0;

  using query_element = Q;
  using memory_element = T;
  using output_element = O;

  // Row r is the query of token r / heads and head r % heads.
  int row_count() const { return queries.tokens * queries.heads; }
  tokens_view<const Q> query_of(int row) const {
    return at_row(queries.vectors, queries.token_gap, row);
  }
  tokens_view<O> out_of(int row) const { return at_row(out, out_token_gap, row); }
  float* lse_of(int row) const { return lse + row + row / queries.heads * lse_token_gap; }
  // The sink, the chunks of sealed groups, the tail.
  int chunk_count() const {
    return static_cast<int>((memory.sealed.size() + groups_per_chunk - 1) / groups_per_chunk) + 2;
  }
  // The groups of a chunk that is neither the sink nor the tail.
  sealed_run sealed_of(int chunk) const {
    constexpr auto whole = static_cast<std::size_t>(groups_per_chunk);
    const auto left = memory.sealed.subspan(static_cast<std::size_t>(chunk - 1) * whole);
    if (left.size() <= whole) return {left.data(), left.size()};
    return {left.data(), whole, left.data() + whole};
  }
  bool is_empty(int chunk) const {
    return chunk == 0                   ? memory.sink.count == 0
           : chunk == chunk_count() - 1 ? memory.tail.count == 0
                                        : false;
  }

 private:
  template <class V>
  tokens_view<V> at_row(tokens_view<V> vectors, std::ptrdiff_t token_gap, int row) const {
    vectors.data += row / queries.heads * token_gap;
    return vectors.from(row);
  }
};

// Calls f(0) .. f(count - 1) one after another. Another executor may call them in any order, from
// any threads, and returns when all are done.
struct serial_executor {
  template <class F>
  void operator()(std::size_t count, const F& f) const {
    for (std::size_t i = 0; i < count; ++i) f(i);
  }
};

namespace detail {

// Rows that go through the memory together.
inline constexpr int rows_per_block = 16;

// Floats that a block of rows needs: queries, totals, and the values of one chunk.
constexpr std::size_t block_floats(const cache_format& format, int rows) {
  return static_cast<std::size_t>(rows) *
         static_cast<std::size_t>(format.key_head_dim + 2 * format.value_head_dim);
}

inline void clear_row(attention_row& row, int dim) {
  row.maximum = minus_infinity;
  row.sum = 0.0f;
  std::fill(row.values, row.values + dim, 0.0f);
}

// Takes rows first_row .. first_row + count - 1 of a task through chunks first_chunk .. end_chunk -
// 1 and leaves the sums in totals[0 .. count - 1]. `workspace`: block_floats(count) floats, which
// then hold the values of the totals.
template <class Task>
void attend_rows(target on, const Task& task, int first_row, int count, int first_chunk,
                 int end_chunk, float* workspace, attention_row* totals) {
  const cache_format& format = task.memory.format;
  const int dim = format.value_head_dim;
  const float cap = task.options.logit_soft_cap * log2_e;
  float* const queries = workspace + std::ptrdiff_t{2} * count * dim;
  attention_row rows[rows_per_block];
  for (int i = 0; i < count; ++i) {
    const int index = first_row + i;
    float* const query = queries + std::ptrdiff_t{i} * format.key_head_dim;
    on_target::elements<typename Task::query_element>::prepare_query(
        on, task.query_of(index), 0, format.key_head_dim, task.options, query);
    attention_row& row = rows[i];
    row.query = query;
    row.end_visible = task.queries.position + index / task.queries.heads + 1;
    row.first_visible = task.options.window > 0 ? row.end_visible - task.options.window : 0;
    row.values = workspace + std::ptrdiff_t{count + i} * dim;
    totals[i] = row;
    totals[i].values = workspace + std::ptrdiff_t{i} * dim;
    clear_row(totals[i], dim);
  }
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    if (task.is_empty(chunk)) continue;
    for (int i = 0; i < count; ++i) clear_row(rows[i], dim);
    if (chunk == 0 || chunk == task.chunk_count() - 1) {
      on_target::elements<typename Task::memory_element>::attend_exact(
          on, format, chunk == 0 ? task.memory.sink : task.memory.tail, cap, rows, count);
    } else {
      on_target::attend_sealed(on, format, task.sealed_of(chunk), cap, task.options.precision, rows,
                               count);
    }
    for (int i = 0; i < count; ++i) on_target::join_row(on, totals[i], rows[i], dim);
  }
}

// Writes the outputs of rows first_row .. first_row + count - 1 from their totals.
template <class Task>
void finish_rows(target on, const Task& task, int first_row, int count, attention_row* totals) {
  const int dim = task.memory.format.value_head_dim;
  for (int i = 0; i < count; ++i) {
    attention_row& total = totals[i];
    const int index = first_row + i;
    if (task.options.sink_logits != nullptr)
      on_target::join_sink_logit(on, total, task.options.sink_logits[index % task.queries.heads],
                                 dim);
    on_target::elements<typename Task::output_element>::finish_row(
        on, total, dim, task.options.rotate_output, task.out_of(index), 0);
    if (task.lse != nullptr)
      *task.lse_of(index) =
          total.maximum == minus_infinity ? minus_infinity : log_of(total.sum, total.maximum);
  }
}

}  // namespace detail

// Floats of workspace that attend needs.
constexpr std::size_t attention_workspace(const cache_format& format) {
  return detail::block_floats(format, detail::rows_per_block);
}

// Runs one task in the calling thread. `workspace`: attention_workspace(task.memory.format) floats.
template <class Q, class T, class O>
void attend(const attention_task<Q, T, O>& task, float* workspace, target on = default_target()) {
  KVARN_ASSERT(task.options.softmax_scale > 0.0f);
  for (int first = 0; first < task.row_count(); first += detail::rows_per_block) {
    const int count = (std::min)(detail::rows_per_block, task.row_count() - first);
    attention_row totals[detail::rows_per_block];
    detail::attend_rows(on, task, first, count, 0, task.chunk_count(), workspace, totals);
    detail::finish_rows(on, task, first, count, totals);
  }
}

// The same, spelled out.
template <class Q, class T, class O>
void attend(const attention_queries<Q>& queries, const attention_memory<T>& memory,
            const attention_options& options, tokens_view<O> out, float* lse, float* workspace,
            target on = default_target()) {
  attend(attention_task<Q, T, O>{queries, memory, options, out, lse}, workspace, on);
}

// Many tasks (KV heads, sequences) cut into items for an executor. A task with few rows is cut
// along its chunks, one with many along its rows; either way the outputs are those of attend, bit
// for bit. Plans once per step and allocates only for that; the tasks must outlive it.
template <class Task>
class attention_batch {
 public:
  explicit attention_batch(std::span<const Task> tasks) : tasks_(tasks) {
    for (std::size_t t = 0; t < tasks.size(); ++t) {
      const Task& task = tasks[t];
      const int rows = task.row_count();
      if (rows <= detail::rows_per_block) {
        const std::size_t first_item = items_.size();
        for (int chunk = 0; chunk < task.chunk_count(); ++chunk)
          if (!task.is_empty(chunk)) add_item(t, 0, rows, chunk, chunk + 1);
        if (items_.size() == first_item) add_item(t, 0, rows, 0, 1);  // an empty memory
        joins_.push_back({first_item, items_.size()});
      } else {
        for (int row = 0; row < rows; row += detail::rows_per_block)
          add_item(t, row, (std::min)(detail::rows_per_block, rows - row), 0, task.chunk_count());
      }
    }
  }

  // Floats of workspace that run needs.
  std::size_t workspace() const { return workspace_; }
  std::size_t item_count() const { return items_.size(); }

  // Computes all outputs. `executor(count, f)` is called twice: for the items, then to join those
  // of the tasks that were cut along chunks.
  template <class Executor>
  void run(float* workspace, const Executor& executor, target on = default_target()) const {
    executor(items_.size(), [&](std::size_t i) { run_item(on, items_[i], workspace); });
    executor(joins_.size(), [&](std::size_t i) { join_items(on, joins_[i], workspace); });
  }

 private:
  struct item {
    std::size_t task;
    int first_row, rows;
    int first_chunk, end_chunk;
    std::size_t offset;  // of its floats in the workspace
  };
  struct item_range {
    std::size_t first, end;
  };

  void add_item(std::size_t task, int first_row, int rows, int first_chunk, int end_chunk) {
    items_.push_back({task, first_row, rows, first_chunk, end_chunk, workspace_});
    workspace_ +=
        detail::block_floats(tasks_[task].memory.format, rows) + 2 * static_cast<std::size_t>(rows);
  }

  // Maxima and sums of an item's rows stand behind its block, for the join.
  float* sums_of(const item& it, float* workspace) const {
    return workspace + it.offset + detail::block_floats(tasks_[it.task].memory.format, it.rows);
  }

  void run_item(target on, const item& it, float* workspace) const {
    const Task& task = tasks_[it.task];
    attention_row totals[detail::rows_per_block];
    detail::attend_rows(on, task, it.first_row, it.rows, it.first_chunk, it.end_chunk,
                        workspace + it.offset, totals);
    if (task.row_count() > detail::rows_per_block) {
      detail::finish_rows(on, task, it.first_row, it.rows, totals);
      return;
    }
    float* const sums = sums_of(it, workspace);
    for (int i = 0; i < it.rows; ++i) {
      float* const at = sums + std::ptrdiff_t{2} * i;
      at[0] = totals[i].maximum;
      at[1] = totals[i].sum;
    }
  }

  void join_items(target on, const item_range& range, float* workspace) const {
    const Task& task = tasks_[items_[range.first].task];
    const int dim = task.memory.format.value_head_dim;
    attention_row totals[detail::rows_per_block];
    for (std::size_t i = range.first; i < range.end; ++i) {
      const item& it = items_[i];
      const float* const sums = sums_of(it, workspace);
      for (int r = 0; r < it.rows; ++r) {
        attention_row part;
        part.maximum = sums[std::ptrdiff_t{2} * r];
        part.sum = sums[std::ptrdiff_t{2} * r + 1];
        part.values = workspace + it.offset + std::ptrdiff_t{r} * dim;
        if (i == range.first)
          totals[r] = part;
        else
          on_target::join_row(on, totals[r], part, dim);
      }
    }
    detail::finish_rows(on, task, 0, task.row_count(), totals);
  }

  std::span<const Task> tasks_;
  std::vector<item> items_;
  std::vector<item_range> joins_;
  std::size_t workspace_ = 0;
};

}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
