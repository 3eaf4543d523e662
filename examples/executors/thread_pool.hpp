// An executor for kvarn::attention_batch over std::thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace kvarn_examples {

// `threads` threads, the caller among them, that share the items of each call. Keep one for the
// lifetime of the engine: starting threads costs more than a short attention. Threads look for more
// work for some tens of microseconds before they sleep: a model's step is hundreds of calls, and
// waking takes longer than many of them.
class thread_pool {
 public:
  // Throws std::system_error where a thread cannot be started.
  explicit thread_pool(int threads) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~thread_pool() { stop(); }
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  // The caller's among them.
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls f(0) .. f(count - 1) and returns when all have ended. Where some threw, the exception of
  // the first of them, by number, then goes to the caller. May be called from several threads: one
  // call then waits for the other. An item may call another pool, but not one that waits for it,
  // its own or one whose item called its own: std::logic_error. Precondition: neither do calls of
  // several threads wait for one another, as where an item of A calls B while one of B calls A.
  template <class F>
  void operator()(std::size_t count, const F& f) const {
    run({[](const void* context, std::size_t i) { (*static_cast<const F*>(context))(i); }, &f,
         count, here_});
  }

 private:
  // That a thread runs items of a pool, which an item of another pool has called, or none.
  struct running {
    const thread_pool* pool;
    const running* caller;
  };

  struct job {
    void (*call)(const void* context, std::size_t i) = nullptr;
    const void* context = nullptr;
    std::size_t count = 0;
    const running* caller = nullptr;
  };

  void run(const job& wanted) const {
    for (const running* outer = wanted.caller; outer != nullptr; outer = outer->caller)
      if (outer->pool == this)
        throw std::logic_error("a thread_pool was called by an item that it waits for");
    if (wanted.count == 0) return;
    const std::lock_guard call(calls_);
    {
      const std::lock_guard lock(mutex_);
      job_ = wanted;
      next_ = 0;
      ++round_;
      open_ = true;
    }
    if (wanted.count > 1) wake_.notify_all();
    take_items();
    look_for([this] { return working_ == 0; });
    // A worker that has not woken yet has nothing left to do: only those at work are waited for.
    std::unique_lock lock(mutex_);
    open_ = false;
    done_.wait(lock, [this] { return working_ == 0; });
    if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void work() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_, std::defer_lock);
    while (true) {
      look_for([&] { return round_ != seen; });
      lock.lock();
      if (!open_ && round_ != seen) {  // too late for that one
        seen = round_;
        lock.unlock();
        continue;
      }
      wake_.wait(lock, [&] { return stopping_ || (open_ && round_ != seen); });
      if (stopping_) return;
      seen = round_;
      ++working_;
      lock.unlock();
      take_items();
      lock.lock();
      if (--working_ == 0) done_.notify_one();
      lock.unlock();
    }
  }

  template <class F>
  static void look_for(const F& found) {
    using clock = std::chrono::steady_clock;
    const auto end = clock::now() + std::chrono::microseconds(50);
    while (!found() && clock::now() < end) {
    }
  }

  void take_items() const {
    const running own{this, job_.caller};
    const running* const outer = std::exchange(here_, &own);
    for (std::size_t i = next_++; i < job_.count; i = next_++) {
      try {
        job_.call(job_.context, i);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (failure_ == nullptr || i < failed_item_) {
          failure_ = std::current_exception();
          failed_item_ = i;
        }
      }
    }
    here_ = outer;
  }

  // What this thread runs: on its stack, or on that of the thread that called, which waits.
  static inline thread_local const running* here_ = nullptr;

  // What a call changes is no part of what the pool is.
  mutable std::mutex calls_;  // held by the one call
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_;
  mutable std::condition_variable done_;
  mutable job job_;
  mutable std::atomic<std::size_t> next_{0};
  mutable std::atomic<std::uint64_t> round_{0};
  mutable std::atomic<int> working_{0};
  mutable bool open_ = false;
  mutable std::exception_ptr failure_;
  mutable std::size_t failed_item_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace kvarn_examples
