#pragma once

#include <chrono>
#include <optional>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

namespace ebb {

// From its making to `stop`, as the device sees it: on a GPU, what lies between the two points on the current stream;
// on the CPU, time itself.
//
// Threads: one at a time.
class DeviceClock {
 public:
  explicit DeviceClock(c10::Device device);
  void stop();

  // Requires that it was stopped and that the device has come to that point.
  [[nodiscard]] double ms() const;

 private:
  const c10::Device device_;
  std::optional<c10::Event> start_event_;
  std::optional<c10::Event> stop_event_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point stop_;
};

}  // namespace ebb
