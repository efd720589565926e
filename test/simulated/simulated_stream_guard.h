#pragma once

#include <utility>

#include <c10/core/Stream.h>

namespace ebb {

// While a guard lives, its stream is the calling thread's current simulated stream; outside any guard that is stream 0.
// Guards nest. A guard is neither copied nor moved: it restores the state of the thread and scope where it began.
class SimulatedStreamGuard {
 public:
  explicit SimulatedStreamGuard(c10::StreamId stream) : previous_(std::exchange(current_, stream)) {}
  ~SimulatedStreamGuard() { current_ = previous_; }
  SimulatedStreamGuard(const SimulatedStreamGuard&) = delete;
  SimulatedStreamGuard& operator=(const SimulatedStreamGuard&) = delete;

  [[nodiscard]] static c10::StreamId current() { return current_; }

 private:
  static inline thread_local c10::StreamId current_ = 0;
  const c10::StreamId previous_;
};

}  // namespace ebb
