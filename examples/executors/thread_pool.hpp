// An executor for kvarn::attention_batch over std::thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kvarn_examples {

// `threads` threads, the caller among them, that share the items of each call. Keep one for the
// lifetime of the engine: starting threads costs more than a short attention. One call at a time;
// items must not throw. Threads look for more work for some tens of microseconds before they sleep:
// a model's step is hundreds of calls, and waking takes longer than many of them.
class thread_pool {
 public:
  explicit thread_pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~thread_pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  // The caller's among them.
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls f(0) .. f(count - 1) and returns when all are done.
  template <class F>
  void operator()(std::size_t count, const F& f) const {
    run({[](const void* context, std::size_t i) { (*static_cast<const F*>(context))(i); }, &f,
         count});
  }

 private:
  struct job {
    void (*call)(const void* context, std::size_t i) = nullptr;
    const void* context = nullptr;
    std::size_t count = 0;
  };

  void run(const job& wanted) const {
    if (wanted.count == 0) return;
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
    for (std::size_t i = next_++; i < job_.count; i = next_++) job_.call(job_.context, i);
  }

  // What a call changes is no part of what the pool is.
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_;
  mutable std::condition_variable done_;
  mutable job job_;
  mutable std::atomic<std::size_t> next_{0};
  mutable std::atomic<std::uint64_t> round_{0};
  mutable std::atomic<int> working_{0};
  mutable bool open_ = false;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace kvarn_examples
