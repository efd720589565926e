#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "offload/stats.h"
#include "streams/base/mutex.h"
#include "streams/base/process_mark.h"

namespace ebb {

// The bytes that ebb holds on the device, over time, for a picture of one step.
//
// Threads: every member may be called from any thread.
class Timeline {
 public:
  static constexpr std::size_t kMaxSamples = 1'000'000;  // 24 MB; later samples are dropped until the next take

  // Adds a sample of the present moment.
  void sample(std::uint64_t saved_on_device) noexcept;

  // Returns the samples and begins a new timeline, whose time starts at 0.
  [[nodiscard]] std::vector<TimelineSample> take();

 private:
  using Clock = std::chrono::steady_clock;

  const ProcessMark process_;
  Mutex mutex_;
  Clock::time_point start_ EBB_GUARDED_BY(mutex_) = Clock::now();
  std::vector<TimelineSample> samples_ EBB_GUARDED_BY(mutex_);
};

}  // namespace ebb
