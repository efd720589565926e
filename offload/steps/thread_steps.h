#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "streams/base/mutex.h"

namespace ebb {

class SavedStep;

// The steps that one thread has made with one offloader, as far as the next one has to know of them. Graphs that have
// gone backward may stay alive by the thousand, so nothing here visits them.
//
// Threads: every member may be called from any thread.
class ThreadSteps {
 public:
  // The step that was begun last; null if it has ended.
  [[nodiscard]] std::shared_ptr<SavedStep> last();
  void begin(const std::shared_ptr<SavedStep>& step);

  // A step whose backward has begun, from then until the step's end.
  void enter_backward() { in_backward_.fetch_add(1, std::memory_order_relaxed); }
  void leave_backward() { in_backward_.fetch_sub(1, std::memory_order_relaxed); }

  // How many such steps live.
  [[nodiscard]] std::size_t in_backward() const { return in_backward_.load(std::memory_order_relaxed); }

  // `step` may hold copies that nobody has asked for.
  void prefetches(std::weak_ptr<SavedStep> step);

  // The steps that prefetches() was called for since this was last asked, as far as they live.
  [[nodiscard]] std::vector<std::shared_ptr<SavedStep>> take_prefetching();

  // Nobody will miss it.
  [[nodiscard]] bool is_idle();

 private:
  std::atomic<std::size_t> in_backward_{0};
  Mutex mutex_;
  std::weak_ptr<SavedStep> last_ EBB_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<SavedStep>> prefetching_ EBB_GUARDED_BY(mutex_);
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) = 64;  // on a thread of the engine nobody takes them
};

// Those of all threads.
//
// Threads: every member may be called from any thread.
class StepsOfThreads {
 public:
  // The calling thread's.
  [[nodiscard]] std::shared_ptr<ThreadSteps> here();

  [[nodiscard]] std::vector<std::shared_ptr<ThreadSteps>> all();

 private:
  Mutex mutex_;
  std::unordered_map<std::thread::id, std::shared_ptr<ThreadSteps>> steps_ EBB_GUARDED_BY(mutex_);
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) = 64;  // threads come and go
};

}  // namespace ebb
