#pragma once

#include <c10/core/Stream.h>

namespace ebb {

// While a guard lives, its stream is the calling thread's current simulated stream; outside any guard that is stream 0.
// Guards nest. A guard is neither copied nor moved: it restores the state of the thread and scope where it began.
class SimulatedStreamGuard {
 public:
  explicit SimulatedStreamGuard(c10::StreamId stream);
  ~SimulatedStreamGuard();
  SimulatedStreamGuard(const SimulatedStreamGuard&) = delete;
  SimulatedStreamGuard& operator=(const SimulatedStreamGuard&) = delete;

  [[nodiscard]] static c10::StreamId current();

 private:
  const c10::StreamId previous_;
};

}  // namespace ebb
