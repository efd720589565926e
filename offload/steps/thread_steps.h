#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "streams/base/mutex.h"

namespace ebb {

class SavedStep;

// The steps that one thread has made with one offloader, as far as the thread's next step has to know of them. Graphs
// whose backward is over may stay alive by the thousand, so no member visits all living steps.
//
// Threads: every member may be called from any thread.
class ThreadSteps {
 public:
  // The step that was begun last; null if it has ended.
  [[nodiscard]] std::shared_ptr<SavedStep> last();
  void begin(const std::shared_ptr<SavedStep>& step);

  // Count the steps whose backward has begun, from the beginning of the backward until the step's end.
  void enter_backward() { in_backward_.fetch_add(1, std::memory_order_relaxed); }
  void leave_backward() { in_backward_.fetch_sub(1, std::memory_order_relaxed); }

  // How many steps with a backward that has begun are alive.
  [[nodiscard]] std::size_t in_backward() const { return in_backward_.load(std::memory_order_relaxed); }

  // Notes that `step` may hold unclaimed copies.
  void prefetches(std::weak_ptr<SavedStep> step);

  // Returns the living steps that prefetches() was called for since the last call of take_prefetching().
  [[nodiscard]] std::vector<std::shared_ptr<SavedStep>> take_prefetching();

  // Whether no step of the thread is alive that a later save or backward could ask for.
  [[nodiscard]] bool is_idle();

 private:
  std::atomic<std::size_t> in_backward_{0};
  Mutex mutex_;
  std::weak_ptr<SavedStep> last_ EBB_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<SavedStep>> prefetching_ EBB_GUARDED_BY(mutex_);
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) =
      64;  // entries pile up on an engine thread, where no step begins and takes them
};

// The ThreadSteps of all threads.
//
// Threads: every member may be called from any thread.
class StepsOfThreads {
 public:
  // The calling thread's ThreadSteps, made at the first call.
  [[nodiscard]] std::shared_ptr<ThreadSteps> here();

  [[nodiscard]] std::vector<std::shared_ptr<ThreadSteps>> all();

 private:
  Mutex mutex_;
  std::unordered_map<std::thread::id, std::shared_ptr<ThreadSteps>> steps_ EBB_GUARDED_BY(mutex_);
  std::size_t next_cleaning_ EBB_GUARDED_BY(mutex_) = 64;  // threads end, and their entries stay
};

}  // namespace ebb
